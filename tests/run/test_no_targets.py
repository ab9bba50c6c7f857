"""Steps whose samples are prompts alone: nothing is learned from them, and nothing pretends so."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from harness.config.data_section import DataConfig
from harness.data.build import build_data
from harness.data.spec import DataSpec
from harness.runfolder import RunFolder
from tests.two_ranks import SHORT_RUN, SMALL_MODEL, events
from tools.proofs.zygote import Zygote

STEPS, BATCH, SEQ_LEN = 12, 2, 16
WORDS = "the model reads a long question and answers it in a word or two".split()  # noqa: SIM905
EXPERTS = (
    "model.name=mixtral-8x7b",  # whose routers the balancing loss would teach
    "model.overrides.num_local_experts=4",
)


def write_pairs(path: Path) -> Path:
    """Prompts several windows long, with completions of a few words."""
    draw = random.Random(0)

    def text(count: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(count))

    pairs = [{"prompt": text(60), "completion": text(8)} for _ in range(80)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def empty_steps(path: Path, cache: Path) -> list[int]:
    """The steps without a target, by the data alone."""
    config = DataConfig(path=str(path), cache_dir=str(cache), seq_len=SEQ_LEN, packing="stream")
    spec = DataSpec(config)
    train = build_data(spec).train
    return [s for s in range(1, STEPS + 1) if not train.targets_in((s - 1) * BATCH, BATCH)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["log", "rollback"])
def test_a_step_without_a_target_changes_nothing_and_says_so(
    policy: str, zygote: Zygote, tmp_path: Path
) -> None:
    path, cache = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "cache"
    words = [
        *(*SMALL_MODEL, *SHORT_RUN, *EXPERTS, f"run.dir={tmp_path / 'run'}"),
        *(f"data.path={path}", f"data.cache_dir={cache}", f"data.seq_len={SEQ_LEN}"),
        "data.packing=stream",
        *(f"train.steps={STEPS}", f"train.global_batch={BATCH}", "train.micro_batch=1"),
        *("eval.every=1", "guard.max_bad_steps=1", f"guard.spikes={policy}"),
        *("guard.spike_window=8", f"save.every={STEPS}"),
    ]
    ended = zygote.run(words, tmp_path / "logs")
    assert ended.codes == [0, 0], ended.output
    run, empty = RunFolder(tmp_path / "run"), empty_steps(path, cache)
    assert 1 < len(empty) < STEPS - 2
    lines = {line["step"]: line for line in run.read_metrics()}
    assert [step for step in range(1, STEPS + 1) if lines[step]["loss"] is None] == empty
    for step in range(1, STEPS + 1):
        if step in empty:
            assert lines[step]["grad_norm"] is None
            assert lines[step]["eval_loss"] == lines[step - 1]["eval_loss"]  # not a bit has moved
        else:
            assert lines[step]["eval_loss"] != lines[step - 1]["eval_loss"]
        assert lines[step]["samples"] == step * BATCH
    skipped = events(run, "skipped_step")
    assert [(event["step"], event["loss"]) for event in skipped] == [(s, None) for s in empty]
    assert {event["reason"] for event in skipped} == {"none of its samples has a target token"}
    assert lines[STEPS]["skipped_steps"] == len(empty)
    assert events(run, "spike") == []
    assert "no target" in ended.output
