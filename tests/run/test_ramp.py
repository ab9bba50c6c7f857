"""Runs whose batches and sequences grow, in layouts that all have to read and learn the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.runfolder import RunFolder
from tests.two_ranks import REPOSITORY, SHORT_RUN, SMALL_MODEL
from tools.proofs.zygote import Zygote

pytestmark = pytest.mark.slow

# Six steps of 4 samples, four of 8, one of 12, ... of 32 tokens; sequences of 8, 16, 32 tokens.
RAMP = (
    "train.global_batch=12",
    "train.micro_batch=2",
    "ramp.batch_from=4",
    "ramp.batch_tokens=1400",
    "ramp.length_from=8",
    "ramp.length_tokens=1000",
)
LAYOUTS = {
    "zero0": ("fp32", 1),
    "zero1": ("zero1", 2),
    "zero2_offload": ("zero2_offload", 2),
    "zero3": ("zero3", 2),
    "pipeline2": ("pipeline2", 2),
}


def trained(
    zygote: Zygote, data: list[str], folder: Path, layout: str, *more: str
) -> dict[int, dict[str, float]]:
    """A run's metrics by step, after it went (on) in a layout."""
    config, ranks = LAYOUTS[layout]
    given = ["--deepspeed", str(REPOSITORY / "ds_configs" / f"{config}.json"), *SMALL_MODEL]
    short = [argument for argument in SHORT_RUN if not argument.startswith("train.")]
    arguments = [*given, *short, *data, *RAMP, f"run.dir={folder}", *(more or ("train.steps=9",))]
    outcome = zygote.run(arguments, folder.parent / f"{folder.name}-logs", ranks=ranks)
    assert outcome.codes == [0] * ranks, outcome.output
    return {line["step"]: line for line in RunFolder(folder).read_metrics() if "loss" in line}


@pytest.fixture(scope="module")
def whole(
    zygote: Zygote, data: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, float]]:
    return trained(zygote, data, tmp_path_factory.mktemp("ramp") / "whole", "zero0")


def test_batches_and_lengths_are_as_planned(whole: dict[int, dict[str, float]]) -> None:
    # The batch rises with the first step that begins after 22 of 44 samples, and after 44;
    # sequences double after 16 and 32 of 32.
    assert [line["global_batch"] for line in whole.values()] == [4] * 6 + [8] * 3
    assert [line["samples"] for line in whole.values()] == [4, 8, 12, 16, 20, 24, 32, 40, 48]
    assert [line["sequence_length"] for line in whole.values()] == [8] * 4 + [16] * 3 + [32] * 2
    assert all(line["tokens"] == 32 * line["samples"] for line in whole.values())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "zero0"])
def test_every_layout_learns_the_same(
    layout: str,
    whole: dict[int, dict[str, float]],
    zygote: Zygote,
    data: list[str],
    tmp_path: Path,
) -> None:
    found = trained(zygote, data, tmp_path / layout, layout)
    for step, line in whole.items():
        for name in ("samples", "global_batch", "sequence_length"):
            assert found[step][name] == line[name]
        assert found[step]["loss"] == pytest.approx(line["loss"], rel=2e-6)
        assert found[step]["grad_norm"] == pytest.approx(line["grad_norm"], rel=2e-5)


def test_a_run_resumes_within_its_ramp(
    whole: dict[int, dict[str, float]], zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    trained(zygote, data, tmp_path / "run", "zero1", "train.steps=5")
    found = trained(zygote, data, tmp_path / "run", "zero3")
    assert [line["samples"] for line in found.values()] == [
        line["samples"] for line in whole.values()
    ]
    # The learning rate's schedule is that of the length given last.
    assert found[9]["learning_rate"] == whole[9]["learning_rate"]


def test_a_run_in_tokens_ends_with_the_step_that_reaches_them(
    zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    found = trained(zygote, data, tmp_path / "run", "zero0", "train.tokens=1000")
    assert [line["samples"] for line in found.values()] == [4, 8, 12, 16, 20, 24, 32]
