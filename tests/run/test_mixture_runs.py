"""Runs on a mixture: every layout reads and learns the same, and shows each source's loss."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config.run_file import load_run_config
from harness.data.build import build_data
from harness.data.spec import DataSpec
from harness.runfolder import RunFolder
from tests.run.layout_runs import trained
from tests.two_ranks import SHORT_RUN, SMALL_MODEL, events
from tools.proofs.zygote import Zygote

pytestmark = pytest.mark.slow

STEPS, BATCH = 6, 8
PHRASE = "the model reads a question and answers it in a word or two"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a mixture of text and pairs, with two held-out sets."""
    folder, draw = tmp_path_factory.mktemp("mixture"), random.Random(0)

    def text(most: int) -> str:
        return " ".join(draw.choice(PHRASE.split()) for _ in range(draw.randrange(3, most)))

    def write(name: str, *lines: dict[str, str]) -> Path:
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        return path

    texts = write("texts", *({"text": text(60)} for _ in range(150)))
    pairs = write("pairs", *({"prompt": text(9), "completion": text(9)} for _ in range(200)))
    held_out = write("held", *({"text": text(40)} for _ in range(40)))
    mix = f'{{path="{texts}", share=0.7, then=0.2}}, {{path="{pairs}", share=0.3, then=0.8}}'
    return [
        *(f"data.mix=[{mix}]", f"data.mix_until={STEPS // 2}", "log.every=2", "eval.every=3"),
        *("optim.schedule=constant", f"train.steps={STEPS}"),
        *(
            f'data.eval_path={{held="{held_out}", own="{pairs}"}}',
            f"data.cache_dir={folder / 'cache'}",
        ),
    ]


def by_step(run: RunFolder) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in run.read_metrics()}


@pytest.fixture(scope="module")
def whole(
    zygote: Zygote, words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    run = trained(zygote, words, tmp_path_factory.mktemp("whole") / "run", "zero1")
    output = (run.path.parent / "run-logs" / "rank-0.log").read_text()
    assert "held-out set own: " in output
    assert "mixture        texts: 45.83% of the samples" in output
    (packed, _) = events(run, "packed_whole")
    assert (packed["source"], packed["side"], packed["too_long"]) == ("pairs", "train", 0)
    assert json.loads(run.plan_path.read_text())["data_mixture"] == [[0, [7, 3]], [24, [1, 4]]]
    return by_step(run)


def test_losses_of_sources_are_parts_of_the_loss(
    whole: dict[int, dict[str, Any]], words: list[str]
) -> None:
    """Over the steps since the last line, by targets; the first step alone is a line of its own."""
    run = load_run_config(None, [*SMALL_MODEL, *SHORT_RUN[:-1], *words])
    stream = build_data(DataSpec.of_run(run, {"vocab_size": 512})).train
    previous = 0
    for step, line in whole.items():
        if "loss/texts" not in line or step - previous != 1:
            previous = step if "loss/texts" in line else previous
            continue
        texts, pairs = stream.targets_by_source(previous * BATCH + np.arange(BATCH))
        parts = texts * line["loss/texts"] + pairs * line["loss/pairs"]
        assert parts / (texts + pairs) == pytest.approx(line["loss"], rel=1e-6)
        previous = step
    assert {step for step, line in whole.items() if "loss/texts" in line} >= {2, 3, 4, 6}


def test_every_held_out_set_has_its_loss(whole: dict[int, dict[str, Any]]) -> None:
    for step in (0, 3, 6):
        assert whole[step]["eval_loss"] == whole[step]["eval_loss/held"]
        assert 0 < whole[step]["eval_loss/own"] != whole[step]["eval_loss"]


LAYOUTS = {
    "pipeline2": ("model.loss_chunk=128",),
    "tensor2_zero1": (),
    "zero3_sequence8": ("ds.sequence_parallel_size=2",),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_and_learns_the_same(
    layout: str, whole: dict[int, dict[str, Any]], words: list[str], zygote: Zygote, tmp_path: Path
) -> None:
    lines = by_step(trained(zygote, words, tmp_path / "run", layout, *LAYOUTS[layout]))
    for step, line in whole.items():
        for name, value in line.items():
            if name == "loss" or name.startswith(("loss/", "eval_loss")):
                assert lines[step][name] == pytest.approx(value, rel=5e-6), (step, name)


def test_a_run_resumes_in_another_layout(
    whole: dict[int, dict[str, Any]], words: list[str], zygote: Zygote, tmp_path: Path
) -> None:
    """The rest of the mixture is that of the whole run: shares change after half of it."""
    folder = tmp_path / "run"
    trained(zygote, words, folder, "zero1", "train.steps=2")
    again = trained(zygote, words, folder, "zero2", ranks=1)
    lines = by_step(again)
    for step in (4, 6):
        for name in ("loss", "loss/texts", "loss/pairs"):
            assert lines[step][name] == pytest.approx(whole[step][name], rel=5e-6)
    assert len(events(again, "resumed")) == 1
