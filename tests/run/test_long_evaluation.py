"""Continued training at a longer context, from given weights: it plans, ramps and runs, and what is
evaluated beyond the training length is what plain transformers has.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from harness.config.run_config import RunConfig
from harness.data.batch import Batch
from harness.data.build import build_data
from harness.data.needles import DEPTHS, SAMPLES, needles
from harness.data.spec import DataSpec
from harness.run.evaluation import POSITIONS
from harness.runfolder import RunFolder
from tests.two_ranks import run_ranks, train_command

pytestmark = pytest.mark.slow

TRAINED, LONGER = 128, 256


@pytest.fixture(scope="module")
def run(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Two steps of 64 positions, then six from their export, of 32 to 128 tokens."""
    folder = tmp_path_factory.mktemp("longer")
    first, second = RunFolder(folder / "first"), RunFolder(folder / "second")
    short = ("model.overrides.max_position_embeddings=64", "data.seq_len=64", "train.steps=2")
    words = (*data, "save.export=true", "eval.every=0", "log.every=1")
    command = train_command(*words, *short, f"run.dir={first.path}")
    run_ranks(command, folder / "a", ranks=1).succeeded()
    longer = (
        *(f"model.name={first.export_dir}", f"model.init_from={first.export_dir}"),
        *(f"data.tokenizer={first.export_dir}", f"model.context={LONGER}", "model.rope=ntk"),
        *(f"data.seq_len={TRAINED}", "ramp.length_from=32", "ramp.length_tokens=3072"),
        *(f"eval.seq_len={LONGER}", f"eval.needle_lengths=[128,{LONGER}]", "train.steps=6"),
    )
    command = train_command(*words, *longer, f"run.dir={second.path}")
    command = [word for word in command if not str(word).startswith("model.overrides.")]
    run_ranks(command, folder / "b").succeeded()
    return second


def plain_losses(run: RunFolder, batch: Batch) -> torch.Tensor:
    """Nats of each token, (samples, tokens), by transformers alone; 0 where none is a target."""
    model = AutoModelForCausalLM.from_pretrained(run.export_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
    return functional.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")


def test_what_lies_beyond_the_training_length_is_what_plain_transformers_has(
    run: RunFolder,
) -> None:
    lines = [*run.read_metrics()]
    lengths = [line["sequence_length"] for line in lines if "loss" in line]
    assert lengths[0] == 32
    assert lengths[-1] == TRAINED
    plan = json.loads(run.plan_path.read_text())
    config = RunConfig.model_validate(plan["run"])
    read = build_data(DataSpec.of_run(config, plan["model_config"]))
    assert read.long_held_out is not None
    samples = min(config.eval.samples * TRAINED // LONGER, read.long_held_out.samples)
    losses = plain_losses(run, read.long_held_out.batch(0, samples))
    expected = losses.view(samples, POSITIONS, -1).mean((0, 2)).tolist()
    assert lines[-1]["loss_by_position"] == pytest.approx(expected, rel=1e-4)
    for length in (128, LONGER):
        batch = needles(read.held_out, read.tokenizer, length, 0, SAMPLES)
        asked, losses = batch.labels != -100, plain_losses(run, batch)
        expected = [
            math.exp(-float(losses[place :: len(DEPTHS)].sum() / asked[place :: len(DEPTHS)].sum()))
            for place in range(len(DEPTHS))
        ]
        assert lines[-1][f"needle/{length}"] == pytest.approx(expected, rel=1e-4)
