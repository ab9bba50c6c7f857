"""Jobs of the gates: their requirements are checked before the first job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.launch.ranks import ON_CPU
from tests.gates.jobs import Group, run_jobs
from tests.gates.models import LEARNED
from tests.gates.parity.cells import Cell, Job, nvme_cells
from tests.gates.parity.measure import Trajectory


def test_jobs_that_this_machine_cannot_do_end_with_its_lack_before_any_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    jobs = [Job(cell) for cell in nvme_cells()]
    with pytest.raises(SystemExit, match="apt install libaio-dev"):
        run_jobs("parity", jobs, tmp_path, lambda job: Group(0, job.cell.ranks))
    assert not [*tmp_path.iterdir()]


@pytest.mark.gate("parity")
def test_ranks_of_their_own_do_what_forks_do(tmp_path: Path) -> None:
    """As on GPUs, where forks cannot be used."""
    job = Job(Cell("llama", "zero1", "fp32", 4, 1))
    for name, env in (("forked", None), ("own", ON_CPU)):
        out = tmp_path / name
        out.mkdir()
        (out / "llama.config.json").write_text(json.dumps(LEARNED["llama"]))
        run_jobs("parity", [job], out, lambda job: Group(0, job.cell.ranks), env)
    forked, own = (Trajectory.load(tmp_path / name / job.cell.name) for name in ("forked", "own"))
    assert own.losses == forked.losses
    (tmp_path / "own" / "llama.config.json").unlink()
    with pytest.raises(SystemExit, match=r"llama\.config\.json"):
        run_jobs("parity", [job], tmp_path / "own", lambda job: Group(0, 1), ON_CPU)
