"""Whole runs of divided tensors and rows with optimizer and weights on the host: the same curve."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.runfolder import RunFolder
from tests.run.layout_runs import trained
from tests.two_ranks import events
from tools.proofs.zygote import Zygote

pytestmark = pytest.mark.slow

AXES = {"tensor": "ds.tensor_parallel.autotp_size=2", "sequence": "ds.sequence_parallel_size=2"}
# Nothing is small enough to stay whole on every rank.
SPLIT = "ds.zero_optimization.stage3_param_persistence_threshold=0"
LAYOUTS = {
    1: ("zero2_offload", ("ds.zero_optimization.stage=1",), 2),
    2: ("zero2_offload", (), 2),
    3: ("zero3_offload", (SPLIT,), 4),
}
"""JSON, more keys, and ranks: two, or two data ranks of two."""


def losses(run: RunFolder) -> list[tuple[float, ...]]:
    names = ("loss", "grad_norm", "eval_loss")
    return [tuple(line[name] for name in names if name in line) for line in run.read_metrics()]


@pytest.fixture(scope="module")
def undivided(
    tmp_path_factory: pytest.TempPathFactory, zygote: Zygote, data: list[str]
) -> RunFolder:
    folder = tmp_path_factory.mktemp("undivided") / "run"
    return trained(zygote, data, folder, "zero1", ranks=1)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("stage", LAYOUTS)
def test_the_curve_is_the_undivided_runs(
    stage: int, axis: str, undivided: RunFolder, zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    layout, more, ranks = LAYOUTS[stage]
    run = trained(zygote, data, tmp_path / "run", layout, AXES[axis], *more, ranks=ranks)
    assert len(losses(run)) == 5
    for line, expected in zip(losses(run), losses(undivided), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)
    (engine,), (verified,) = events(run, "engine"), events(run, "verified")
    assert {rank["inner_optimizer"] for rank in engine["ranks"]} == {"DeepSpeedCPUAdam"}
    assert {rank["zero_stage"] for rank in engine["ranks"]} == {stage}
    assert verified["loss"] == pytest.approx(losses(undivided)[1][0], rel=1e-5)
