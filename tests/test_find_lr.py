"""tools/find_lr.py on the real engine, against a grid of whole runs."""

import functools
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from harness.layout.world import World, slurm_port
from tests.real_runs import REPOSITORY, SMALL_MODEL, run_ranks
from tests.run_tools import run_tool
from tools import find_lr
from tools.find_lr import _temporary, main

TOOL = REPOSITORY / "tools" / "find_lr.py"
RUN = (
    *("data.seq_len=32", "train.global_batch=8", "train.micro_batch=2", "ds.bf16.enabled=false"),
    *("optim.weight_decay=0", "--to", "10", "--steps", "120"),
)
# Held-out losses after 100 steps of this run at a constant rate (10 of warm-up): adamw 2.480 at
# 2**-10, 2.462, 2.405 at 2**-8, 2.418, 2.434 at 2**-6; lion 2.457 at 2**-10, 2.418, 2.412 at 2**-8,
# 2.426, 2.471 at 2**-6.
BEST = 2**-8


look = functools.partial(run_tool, "find_lr")


@pytest.mark.gate("tools")
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_find_lr_is_within_a_factor_of_two_of_the_best_rate(name: str, data: list[str]) -> None:
    shown = look(*SMALL_MODEL, *data, *RUN, f"optim.name={name}", "--json").stdout
    found = json.loads(shown.splitlines()[-1])  # DeepSpeed prints warnings before it
    assert BEST / 2 < found["suggested"] < 2 * BEST
    assert found["suggested"] < found["lowest"] < found["rates"][-1]
    assert len(found["rates"]) == len(found["losses"]) < 120  # it stopped after the loss exploded


@pytest.mark.gate("tools")
def test_ranks_of_zero_3_find_the_same_and_leave_nothing(data: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "lr.svg"
    before = set(Path(tempfile.gettempdir()).iterdir()), {*REPOSITORY.glob("runs/*")}
    json_file = REPOSITORY / "ds_configs" / "zero3.json"
    words = [*SMALL_MODEL, *data, *RUN, "--deepspeed", json_file, "--plot", picture, "--json"]
    ended = run_ranks([sys.executable, TOOL, *words], tmp_path)
    assert ended.codes == [0, 0], ended.output
    assert "find-lr-" not in ended.output  # a folder that is gone
    found = json.loads(ended.outputs[0].splitlines()[-2])
    assert BEST / 2 < found["suggested"] < 2 * BEST
    assert "learning rate" in picture.read_text()
    left = set(Path(tempfile.gettempdir()).iterdir()) - before[0]
    assert not [path for path in left if path.name.startswith("find-lr")]
    assert {*REPOSITORY.glob("runs/*")} == before[1]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_of_srun_share_a_folder_and_one_reports(rank: str, monkeypatch, capsys) -> None:
    place = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
    for name, value in {**place, "SLURM_STEP_ID": "3", "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert _temporary(World.from_environ()).name == f"find-lr-{os.getuid()}-{slurm_port()}"
    assert main(["--steps=3"]) == 2
    assert ("--steps is 3" in capsys.readouterr().err) == (rank == "0")


@pytest.mark.parametrize("words", [["--json"], []])
def test_find_lr_prints_json_only_if_asked(words: list[str], monkeypatch, capsys) -> None:
    curve = [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0, 99.0]
    monkeypatch.setattr(find_lr, "_on_all_ranks", lambda *of: curve)
    assert main(words) == 0
    assert capsys.readouterr().out.startswith('{"rates": ' if words else "try optim.lr=0.01\n")
    curve[1][:] = [4.5, 4.0, 3.5, 4.0, 5.0, 3.0]
    assert (main(words), "which may be noise" in capsys.readouterr().err) == (2, True)
