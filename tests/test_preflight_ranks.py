"""The preflight on real ranks, one of which is manipulated."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from harness.launch.ranks import Outcome
from tests.real_runs import REPOSITORY, SMALL_MODEL, run_ranks
from tests.tables import beside

TABLES = beside(__file__, "preflight_ranks.toml")

NODES = 'os.environ["SLURMD_NODENAME"] = f"n{rank + 1}"'


def fly(
    folder: Path, *arguments: object, what: str = "", limit_s: float = 120, fresh: bool = False
) -> Outcome:
    """Do `what` to each `rank`, then run the check; with `fresh`, nothing is imported before."""
    words = [sys.executable, "-m", "tests.planted_preflight", what, *SMALL_MODEL]
    env = {"PYTHONPATH": str(REPOSITORY)} if fresh else None
    folder.mkdir(exist_ok=True)
    return run_ranks([*words, f"--limit-s={limit_s}", *arguments], folder, env=env)


def verdicts(ended: Outcome) -> dict[str, dict[str, str]]:
    """Return the checks of --json by name."""
    text = ended.outputs[0]
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return {check["check"]: check for check in found["checks"]}


def test_two_real_ranks_are_ready(data: list[str], tmp_path: Path) -> None:
    ended = fly(tmp_path, *data, f"run.dir={tmp_path / 'run'}", what=NODES).succeeded()
    table = ended.outputs[0]
    for check in ("plan", "code", "data", "clocks", "matmul rate", "memory", "all-reduce", "room"):
        assert f"\n{check:<20}" in table, table
    assert "links between nodes" in table
    assert "preflight: ok to start" in table
    # torch's CUDA build warns about a machine without a GPU.
    assert [line for line in ended.outputs[1].splitlines() if "cpp_extension" not in line] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.log", "rank-1.log"]


@pytest.mark.gate("tools")
def test_a_wrong_config_is_one_report(tmp_path: Path) -> None:
    ended = fly(tmp_path, "train.stpes=3", "optim.lr=-1")
    assert ended.codes == [2, 2]
    assert "2 problems" in ended.outputs[0]
    assert "did you mean train.steps?" in ended.outputs[0]
    assert ended.outputs[1] == ""


@pytest.mark.gate("tools")
def test_a_rank_that_reads_another_config_is_named(data: list[str], tmp_path: Path) -> None:
    files = [tmp_path / f"run-{rank}.toml" for rank in range(2)]
    for rank, file in enumerate(files):
        file.write_text(f"optim.lr = {rank + 1}e-4\n")
    what = f'{NODES}\nsys.argv.append(f"--config={tmp_path}/run-{{rank}}.toml")'
    ended = fly(tmp_path, *data, "--json", f"run.dir={tmp_path / 'run'}", what=what)
    assert ended.codes == [2, 2]
    found = verdicts(ended)
    assert '"rates": {' in ended.outputs[0]
    assert '"nodes": 2' in ended.outputs[0]
    assert found["run config"]["verdict"] == "FAIL"
    assert found["run config"]["found"].startswith("n2 (rank 1)")
    assert found["code"]["verdict"] == "ok"


@pytest.mark.gate("tools")
def test_a_rank_that_computes_slowly_is_named(data: list[str], tmp_path: Path) -> None:
    what = f"{NODES}\n{TABLES['slowly']}"
    ended = fly(tmp_path, *data, "--json", f"run.dir={tmp_path / 'run'}", what=what).succeeded()
    found = verdicts(ended)["matmul rate"]
    assert (found["verdict"], "slow: n2 (rank 1)" in found["found"]) == ("warn", True)


@pytest.mark.gate("tools")
def test_a_rank_that_never_comes_is_named_in_time(tmp_path: Path) -> None:
    ended = fly(tmp_path, what="if rank == 1: sys.exit(9)", limit_s=16)
    assert ended.codes == [2, 9]
    assert "1 of 2 ranks did not come within 8 s: 1" in ended.outputs[0]


@pytest.mark.gate("tools")
def test_a_rank_without_the_environment_says_so(tmp_path: Path) -> None:
    bare = f"if rank == 1: sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n{NODES}"
    ended = fly(tmp_path, what=bare, limit_s=16, fresh=True)
    assert ended.codes == [2, 2]
    named = f"cannot check: n2: {sys.executable} cannot import torch, deepspeed, transformers"
    assert ended.outputs[1].startswith(named)
    assert "1 of 2 ranks did not come within 8 s: 1" in ended.outputs[0]


@pytest.mark.gate("tools")
def test_a_network_that_hangs_ends_with_the_rank_named(data: list[str], tmp_path: Path) -> None:
    words = (*data, "--json", f"run.dir={tmp_path / 'run'}")
    ended = fly(tmp_path, *words, what=f"{NODES}\n{TABLES['hangs']}", limit_s=30)
    assert ended.codes == [2, 2]
    found = verdicts(ended)["all-reduce"]
    assert found["verdict"] == "FAIL"
    assert "not finished after" in found["found"]
    assert "with rank 0" in found["found"]


@pytest.mark.gate("tools")
def test_a_rank_that_python_cannot_reach_ends_itself(data: list[str], tmp_path: Path) -> None:
    """Killed from outside, it would hide the others' code."""
    hangs = """
import ctypes, torch
if rank == 1:
    torch.mm = lambda *_, **__: ctypes.PyDLL(None).sleep(1000)
"""
    shorter = f"import tools.preflight as tool; tool._GRACE_S = 12.0\n{NODES}\n{hangs}"
    what = f"{shorter}\nsys.exit(tool.main(sys.argv[1:]))"
    words = (*data, "--json", f"run.dir={tmp_path / 'run'}")
    ended = fly(tmp_path, *words, what=what, limit_s=16)
    assert ended.codes == [2, 1]
    assert verdicts(ended)["reports"]["found"] == "none from n2 (rank 1)"
    assert "measure_machine" in ended.outputs[1]


@pytest.mark.gate("tools")
def test_a_disk_that_is_too_small_fails(data: list[str], small_disk: Path, tmp_path: Path) -> None:
    words = ("--json", "save.every=1", f"run.dir={small_disk / 'run'}")
    ended = fly(tmp_path / "logs", *data, *words)
    assert ended.codes == [2, 2]
    found = verdicts(ended)
    assert found["room"]["verdict"] == "FAIL"
    assert "lower save.keep (now 3)" in found["room"]["todo"]
    assert found["write speed"]["verdict"] == "FAIL"
    assert "No space left on device" in found["write speed"]["found"]
    assert list(small_disk.iterdir()) == []
    assert shutil.disk_usage(small_disk).used == 0
