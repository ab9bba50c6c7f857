"""Runs with a carried state: resumed bit for bit, on another number of ranks, past skipped text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint.find import Store
from harness.runfolder import RunFolder
from tests.two_ranks import REPOSITORY, SHORT_RUN
from tools.proofs.zygote import Zygote

pytestmark = pytest.mark.slow

MODEL = {
    "model_type": "recurrent",
    "cell": "lstm",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
}
LINES = ("loss", "grad_norm", "eval_loss")


def trained(
    zygote: Zygote, words: list[str], run: Path, json_name: str, *more: str, ranks: int = 2
) -> dict[int, dict[str, Any]]:
    """A run's metrics by step, after it went (on)."""
    arguments = [
        *(f"--deepspeed={REPOSITORY / 'ds_configs' / json_name}.json", *SHORT_RUN, *words),
        *(f"run.dir={run}", "train.carry_state=true", "train.steps=6"),
        *("optim.schedule=constant", "save.every=3", "save.keep=9", *more),
    ]
    ended = zygote.run(arguments, run.parent / f"{run.name}-logs", ranks=ranks)
    assert ended.codes == [0] * ranks, ended.output
    return {line["step"]: line for line in RunFolder(run).read_metrics()}


@pytest.fixture(scope="module")
def words(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of data and model."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(MODEL))
    return [*data, f"model.name={model}"]


@pytest.fixture(scope="module")
def whole(
    zygote: Zygote, words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, dict[str, Any]]]:
    run = tmp_path_factory.mktemp("carried") / "run"
    return run, trained(zygote, words, run, "zero1", "eval.every=1")


def begun_again(run: Path, copy: Path) -> Path:
    """A copy of the run as it was after its third step."""
    shutil.copytree(run, copy)
    shutil.rmtree(Store(copy / "checkpoints").at(6))
    return copy


def test_a_resumed_run_is_the_same_bit_for_bit(
    whole: tuple[Path, dict[int, dict[str, Any]]], zygote: Zygote, words: list[str], tmp_path: Path
) -> None:
    run, lines = whole
    # It does not evaluate between its steps: an evaluation leaves the states as they are.
    again = trained(zygote, words, begun_again(run, tmp_path / "run"), "zero1", "eval.every=50")
    for step in (4, 5, 6):
        assert [again[step][name] for name in LINES[:2]] == [
            lines[step][name] for name in LINES[:2]
        ]
    assert again[6]["eval_loss"] == lines[6]["eval_loss"]


def test_it_goes_on_by_rows_on_another_number_of_ranks(
    whole: tuple[Path, dict[int, dict[str, Any]]], zygote: Zygote, words: list[str], tmp_path: Path
) -> None:
    run, lines = whole
    more = ("train.micro_batch=4", "eval.every=1")
    other = trained(zygote, words, begun_again(run, tmp_path / "run"), "zero3", *more, ranks=1)
    for step in (4, 5, 6):
        for name in LINES:
            assert other[step][name] == pytest.approx(lines[step][name], rel=1e-5), (step, name)
