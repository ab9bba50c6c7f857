"""The record of a run's plan, written before the run begins."""

from __future__ import annotations

import hashlib
import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.data.data import Data
from harness.plan.duration import step_time
from harness.plan.plan import Plan
from harness.run.step_clock import seen_tokens

_HASHED_WINDOWS = 8


def plan_record(plan: Plan, data: Data, total_steps: int) -> dict[str, Any]:
    """Return the content of plan.json: everything needed to explain or repeat the run."""
    seen = seen_tokens(data.train)
    step = step_time(plan, seen_tokens=seen)
    packages = ("torch", "deepspeed", "transformers", "accelerate", "sentencepiece")
    return {
        **plan.to_json(),
        "total_steps": total_steps,
        "cores": len(os.sched_getaffinity(0)),
        "seen_tokens": seen,
        "predicted_step_s": None if step is None else step.seconds,
        "data_fingerprint": data.fingerprint,
        "held_out_set": _held_out_set(plan, data),
        "data_mixture": data.mixture(),
        "data": {
            "documents": data.documents,
            "tokens": data.tokens,
            "trained_examples": data.train.documents,
            "trained_windows": data.train.samples,
            "begins": data.sources[0].begins,
            "sources": data.summary(),
            "pairs": {source.name: source.pairs for source in data.sources if source.pairs},
        },
        "versions": {name: version(name) for name in packages},
        "git_commit": git_commit() if plan.world.rank == 0 else None,  # which writes it
    }


def _held_out_set(plan: Plan, data: Data) -> str:
    """Return a hash of what the held-out loss is measured on: the number and length of its windows,
    and the ids and targets of the first ones.
    """
    stream, samples = data.held_out, plan.config.eval.samples
    samples = min(samples, stream.samples)
    first = stream.batch(0, min(samples, _HASHED_WINDOWS))
    parts = (first.input_ids.numpy().tobytes(), first.labels.numpy().tobytes())
    sizes = f"{samples}:{stream.seq_len}".encode()
    return hashlib.sha256(b":".join((sizes, *parts))).hexdigest()[:16]


def git_commit() -> str | None:
    """Return the commit of the running code, with "+" if files differ from it."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        process = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
        )
        return process.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
