"""Label smoothing, stochastic depth and early stopping in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.runfolder import RunFolder
from tests.two_ranks import REPOSITORY, SHORT_RUN, SMALL_MODEL, events
from tools.proofs.zygote import Zygote

pytestmark = pytest.mark.slow

Line = dict[str, Any]


def trained(
    zygote: Zygote, data: list[str], path: Path, *more: str, config: str = "fp32", ranks: int = 1
) -> list[Line]:
    """The metrics of a run."""
    given = ["--deepspeed", str(REPOSITORY / "ds_configs" / f"{config}.json"), *SMALL_MODEL]
    arguments = [*given, *SHORT_RUN, *data, f"run.dir={path}", *more]
    ended = zygote.run(arguments, path.with_suffix(".logs"), ranks=ranks)
    assert ended.codes == [0] * ranks, ended.output
    return RunFolder(path).read_metrics()


def values(lines: list[Line], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


def test_smoothing_is_the_same_in_every_layout_and_not_in_the_held_out_loss(
    zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    plain = trained(zygote, data, tmp_path / "plain")
    smooth = "train.label_smoothing=0.2"
    one = trained(zygote, data, tmp_path / "one", smooth)
    assert values(one, "eval_loss")[0] == values(plain, "eval_loss")[0]
    assert values(one, "loss")[0] != values(plain, "loss")[0]
    for config in ("zero3", "pipeline2"):
        found = trained(zygote, data, tmp_path / config, smooth, config=config, ranks=2)
        for name in ("loss", "grad_norm", "eval_loss"):
            assert values(found, name) == pytest.approx(values(one, name), rel=1e-5), name


def test_layers_are_left_out_alike_when_they_are_recomputed(
    zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    depth = "model.stochastic_depth=0.5"
    runs = {
        "zero3": trained(zygote, data, tmp_path / "zero3", depth, config="zero3", ranks=2),
        "again": trained(
            *(zygote, data, tmp_path / "again", depth, "model.checkpointing=full"),
            config="zero3",
            ranks=2,
        ),
    }
    assert values(runs["again"], "loss") == pytest.approx(values(runs["zero3"], "loss"), rel=1e-6)
    plain = trained(zygote, data, tmp_path / "plain", config="zero3", ranks=2)
    assert values(plain, "eval_loss")[0] == values(runs["zero3"], "eval_loss")[0]
    assert values(plain, "loss")[0] != values(runs["zero3"], "loss")[0]


def test_pipeline_stages_leave_layers_out(zygote: Zygote, data: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run"
    trained(zygote, data, path, "model.stochastic_depth=0.5", config="pipeline2", ranks=2)
    (verified,) = events(RunFolder(path), "verified")
    assert verified["grad_norm"] == "not compared: steps are random"


def test_a_run_that_learns_nothing_more_ends(
    zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    still = ("optim.lr=1e-12", "eval.every=1", "train.steps=9")
    patient = (*still, "eval.patience=2")
    lines = trained(zygote, data, tmp_path / "run", *patient, "eval.better_by=0.01", ranks=2)
    # The first, before any step, is the best; two more are enough.
    assert lines[-1]["step"] == 2
    run = RunFolder(tmp_path / "run")
    (ended,) = events(run, "ended_early")
    assert (ended["step"], ended["best_step"]) == (2, 0)
    assert run.read_status()["outcome"] == "done"
    # It stays ended, until it is given more patience.
    trained(zygote, data, tmp_path / "run", *patient, "eval.better_by=0.01", ranks=2)
    assert run.read_metrics()[-1]["step"] == 2
    # A branch has as much patience as the run began with.
    branch = (f"resume.from={tmp_path / 'run'}", *patient, "eval.better_by=0.01", "train.steps=6")
    assert trained(zygote, data, tmp_path / "branch", *branch, ranks=2)[-1]["step"] > 4
    more = trained(zygote, data, tmp_path / "run", *still, "eval.patience=0", ranks=2)
    assert more[-1]["step"] == 9
