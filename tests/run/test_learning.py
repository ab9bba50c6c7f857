"""The default job learns from text, and only from text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Half the default's samples a step, and fewer steps: enough to be a nat below the tokens' own
# frequencies. After 40 steps text is 0.6 nats below them, which shuffled targets never are.
STEPS = {"text": 80, "shuffled": 40}

# The command's own build and train, on the default model and data; the targets may be shuffled.
JOB = """
import dataclasses, json, sys
import numpy as np
from harness.plan.command import parse_command, plan_from
from harness.data.build import DataSpec, build_data
from harness.data.packing import Packed
from harness.loop import build, train

def shuffle_targets():
    # Targets from another window, in another order: only their frequencies are left.
    read = Packed.read

    def shuffled(packed, windows):
        elsewhere = read(packed, (windows * 7919 + 1) % packed.num_windows).labels
        rows = [np.random.default_rng(n).permutation(row) for n, row in zip(windows, elsewhere)]
        return dataclasses.replace(read(packed, windows), labels=np.stack(rows))

    Packed.read = shuffled

def main():
    shuffle, *argv = sys.argv[1:]
    plan = plan_from(parse_command(argv))
    spec = DataSpec.of_run(plan.config, plan.model_config)
    data = build_data(spec)
    run = build(plan, data=data)
    unigram_nats = data.unigram_nats
    if shuffle == "shuffled":
        shuffle_targets()
    assert train(run) == 0
    print(json.dumps({"unigram_nats": unigram_nats}))

main()
"""


@pytest.mark.slow
def test_the_default_job_learns_and_on_shuffled_targets_it_does_not(tmp_path: Path) -> None:
    jobs = {name: _start(name, tmp_path / name) for name in ("text", "shuffled")}
    results = {name: job.communicate(timeout=1500) for name, job in jobs.items()}
    for name, job in jobs.items():
        assert job.returncode == 0, results[name][1][-2000:]
    unigram_nats = json.loads(results["text"][0].splitlines()[-1])["unigram_nats"]
    assert _eval_loss(tmp_path / "text") < unigram_nats - 1.0
    assert _eval_loss(tmp_path / "shuffled") > unigram_nats - 0.3


def _start(name: str, folder: Path) -> subprocess.Popen[str]:
    """One process with one thread; the two jobs share the machine."""
    words = [sys.executable, "-c", JOB, name, f"--deepspeed={ROOT / 'ds_configs/fp32.json'}"]
    words += [f"run.dir={folder}", f"train.steps={STEPS[name]}", "train.global_batch=24"]
    words += ["eval.every=0", "save.export=false"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _eval_loss(folder: Path) -> float:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["eval_loss"])
