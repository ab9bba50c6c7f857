"""The benchmark compares the same training, and counts what it says; how fast it is, is no test."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.run_tools import run_tool
from tests.two_ranks import SHARED_MEMORY
from tools.proofs.overhead.prepare import require_no_lock
from tools.proofs.overhead.recorder import counters

ONCE = ("--stages", 3, "--ranks", 1, "--rounds", 1, "--warm-up", 1, "--turns", 2, "--steps", 2)


@pytest.mark.gate("tools")
def test_the_harness_and_a_bare_loop_train_alike(tmp_path: Path) -> None:
    out, text = tmp_path / "found.json", tmp_path / "found.md"
    shared = {path.name for path in SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*")}
    done = run_tool(
        "proofs/benchmark_overhead", *ONCE, "--data-rounds", 0, "--json", out, "--markdown", text
    )
    (cell,) = json.loads(out.read_text())["cells"]
    (sides,) = cell["rounds"]
    harness, bare, trainer = (sides[name][0] for name in ("harness", "bare", "trainer"))
    assert len(bare["losses"]) == 9  # one, two turns of three, two that are counted
    assert len(harness["losses"]) == 8  # it was stopped before it logged the last step
    assert harness["losses"] == pytest.approx(bare["losses"][:8], rel=1e-6)
    assert trainer["losses"][:8] == pytest.approx(bare["losses"][:8], rel=1e-3)
    for side in (harness, bare, trainer):
        assert len(side["step_s"]) == len(side["processor_s"]) == 4
        assert math.isnan(side["density"]) or 0 < side["density"] <= 1
        assert side["marks"]["imported"][0] < side["marks"]["first step"][0]
        assert sum(side["syncs"].values()) > 0
        assert side["page_faults"][-1] < 5000  # of 64,000 where malloc returns what a step frees
    assert all(
        engine < step for engine, step in zip(harness["engine_s"], harness["step_s"], strict=True)
    )
    assert sum(harness["collectives"].values()) > sum(bare["collectives"].values())  # its metrics
    assert any("harness/run/meter.py" in site for site in harness["syncs"])
    assert "| the harness / bare DeepSpeed (1.01 at most) | **" in done.stdout
    assert done.stdout.strip() in text.read_text()
    left = {path.name for path in SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*")} - shared
    # DeepSpeed's, 69 MB for each rank. Tests beside this one have two.
    assert not [name for name in left if name[:-1] + "1" not in left]


def test_a_lock_that_a_killed_build_left_is_an_error_and_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    require_no_lock()
    (tmp_path / "deepspeed_shm_comm").mkdir()
    (tmp_path / "deepspeed_shm_comm" / "lock").touch()
    with pytest.raises(SystemExit, match="deepspeed_shm_comm/lock is there, for which bare"):
        require_no_lock()


@pytest.mark.parametrize(
    ("count", "code"),
    [
        (1, "x.sum().item()"),
        (1, "float(x[0])"),
        (1, "bool(x.any())"),
        (1, "x.tolist()"),
        (1, "x.cpu()"),
        (1, "x.nonzero()"),
        (2, "[int(v) for v in x]"),
        (0, "(x * 2).sum()"),
        (0, "torch.where(x > 1, x, 0)"),
    ],
)
def test_what_a_device_would_be_waited_for_is_counted_once(count: int, code: str) -> None:
    syncs: Counter[str] = Counter()
    functions, operators = counters(syncs, Counter(), Counter())
    with functions, operators:
        eval(code, {"torch": torch, "x": torch.tensor([1.0, 2.0])})
    assert sum(syncs.values()) == count


def test_page_faults_are_counted_where_a_page_is_touched_first() -> None:
    faults: Counter[str] = Counter()
    functions, operators = counters(Counter(), Counter(), faults)
    with functions, operators:
        torch.ones(2**24).sum()  # 64 MiB, which malloc maps by themselves
    place = max(faults, key=lambda place: faults[place])
    assert "/test_benchmark_overhead.py:" in place
    assert place.endswith(" ones")
