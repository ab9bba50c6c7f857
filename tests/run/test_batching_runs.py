"""Runs on micro-batches by length: every layout and division reads and learns the same."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from harness.runfolder import RunFolder
from tests.run.layout_runs import trained
from tests.two_ranks import events
from tools.proofs.zygote import Zygote

pytestmark = pytest.mark.slow

STEPS = 4
WORDS = "the model reads a question and answers it in a word or two".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a corpus of skewed lengths."""
    folder, draw = tmp_path_factory.mktemp("skewed"), random.Random(0)
    texts = [
        " ".join(draw.choice(WORDS) for _ in range(int(draw.lognormvariate(2, 0.8)) + 2))
        for _ in range(200)
    ]
    path = folder / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return [
        *(f"data.path={path}", f"data.cache_dir={folder / 'cache'}", "data.vocab_size=512"),
        *("data.pool_samples=32", "data.group_samples=2", "optim.schedule=constant"),
        f"train.steps={STEPS}",
    ]


def lines_of(run: RunFolder) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in run.read_metrics()}


@pytest.fixture(scope="module")
def whole(
    zygote: Zygote, words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run = trained(zygote, words, folder, "zero1", "data.batching=length_grouped", ranks=1)
    (batched,) = events(run, "batched")
    shares = [batched[f"{name}padding_share"] for name in ("", "plain_", "full_")]
    assert shares == sorted(shares)
    assert shares[0] < 0.75 * shares[1]  # these documents are short beside multiples of 8
    lines = lines_of(run)
    assert all(0 <= lines[step]["padding_share"] < 0.5 for step in range(1, STEPS + 1))
    assert all(0 <= lines[step]["data_wait_share"] <= 1 for step in range(1, STEPS + 1))
    assert lines[STEPS]["tokens"] < STEPS * 8 * 32
    return lines


LAYOUTS = {
    "zero3": ("data.batching=token_budget", "data.tokens_per_batch=64"),
    "tensor2_zero1": ("data.batching=length_grouped",),
    "zero3_sequence8": ("ds.sequence_parallel_size=2", "data.batching=length_grouped"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_and_learns_the_same(
    layout: str, whole: dict[int, dict[str, Any]], words: list[str], zygote: Zygote, tmp_path: Path
) -> None:
    run = trained(zygote, words, tmp_path / "run", layout, *LAYOUTS[layout])
    assert_same(lines_of(run), whole, range(STEPS + 1))


def test_a_run_resumes_in_another_layout(
    whole: dict[int, dict[str, Any]], words: list[str], zygote: Zygote, tmp_path: Path
) -> None:
    folder, batching = tmp_path / "run", "data.batching=length_grouped"
    trained(zygote, words, folder, "zero1", "train.steps=2", batching)
    run = trained(zygote, words, folder, "zero2", batching, "train.micro_batch=4", ranks=1)
    assert_same(lines_of(run), whole, range(3, STEPS + 1))
    assert lines_of(run)[STEPS]["tokens"] == whole[STEPS]["tokens"]


def assert_same(
    ours: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]], steps: range
) -> None:
    for step in steps:
        for name in ("loss", "grad_norm", "eval_loss", "tokens", "samples"):
            if name in theirs[step]:
                assert ours[step][name] == pytest.approx(theirs[step][name], rel=1e-5), (step, name)
        for mine, other in zip(
            ours[step].get("loss_by_position", ()),
            theirs[step].get("loss_by_position", ()),
            strict=True,
        ):
            assert mine == other or mine == pytest.approx(other, rel=1e-5)
