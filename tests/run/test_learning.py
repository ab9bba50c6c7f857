"""The default job learns from text, and only from text; the demo beats pairs of tokens."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from harness.plan.command import parse_command, plan_from
from harness.runfolder import RunFolder
from tests.two_ranks import REPOSITORY, TRAIN, events, start, wait
from tools.proofs.ranks import Ranks

# A twelfth of the default's samples a step, a larger rate, and fewer steps: enough to be a nat
# below the tokens' own frequencies. After 120 steps text is half a nat below them, which shuffled
# targets never are.
JOB = (
    *("train.global_batch=4", "optim.lr=1e-3"),
    *("eval.every=0", "sample.tokens=0", "save.export=false"),
)
DEMO = REPOSITORY / "docs" / "demo.toml"
ZERO3 = REPOSITORY / "ds_configs" / "zero3.json"
STEPS = {"text": 220, "shuffled": 120}


@pytest.mark.gate("runs")
def test_the_default_job_learns_and_on_shuffled_targets_it_does_not(tmp_path: Path) -> None:
    jobs = {name: _start(name, tmp_path / name) for name in STEPS}
    outputs = {name: wait(job, timeout_s=1500).succeeded().output for name, job in jobs.items()}
    unigram_nats = json.loads(outputs["text"].splitlines()[-1])["unigram_nats"]
    assert _eval_loss(tmp_path / "text") < unigram_nats - 1.0
    assert _eval_loss(tmp_path / "shuffled") > unigram_nats - 0.3


def test_the_demo_has_as_many_ids_as_pieces() -> None:
    words = ["--deepspeed", str(ZERO3), "--config", str(DEMO)]
    plan = plan_from(parse_command(words), {"DS_ACCELERATOR": "cpu"})
    assert plan.model_config["vocab_size"] == plan.config.data.vocab_size < 8192
    assert f"--config {DEMO.relative_to(REPOSITORY)}" in (REPOSITORY / "Makefile").read_text()


@pytest.mark.gate("runs")
def test_the_demo_is_below_a_bigram_model_and_writes_python(tmp_path: Path) -> None:
    command = [sys.executable, TRAIN, "--deepspeed", ZERO3, "--config", DEMO]
    group = start([*command, f"run.dir={tmp_path / 'run'}", "save.export=false"], tmp_path, ranks=2)
    wait(group, timeout_s=3000).succeeded()
    run = RunFolder(tmp_path / "run")
    (baselines,) = events(run, "baselines")
    assert _eval_loss(run.path) < baselines["bigram_nats"] - 0.1
    (sample,) = events(run, "sample")
    words = {"def", "self", "return", "if", "import", "class", "for", "None", "raise", "else"}
    assert len(words & {*re.findall(r"\w+", sample["text"])}) >= 3


def _start(targets: str, folder: Path) -> Ranks:
    """One process with one thread; the two jobs share the machine."""
    words = [f"--deepspeed={REPOSITORY / 'ds_configs/fp32.json'}", f"run.dir={folder}"]
    words += [f"train.steps={STEPS[targets]}", *JOB]
    command = [sys.executable, "-m", "tests.run.learning_job", targets, *words]
    return start(command, folder.parent, ranks=1, logs=folder.parent / f"{targets}-logs")


def _eval_loss(folder: Path) -> float:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["eval_loss"])
