"""Opens the run folder, and builds the plan record that is stored in it."""

import hashlib
import os
import subprocess
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.data.data import Data
from harness.errors import CannotSave, ConfigError, is_full_disk
from harness.plan.duration import step_time
from harness.plan.plan import Plan
from harness.run.meter import seen_tokens
from harness.run.notify import printable, user_name
from harness.runfolder import RunFolder, create_run_dir

_HASHED_WINDOWS = 8
_ASKED_CHATS = 64


def plan_record(plan: Plan, data: Data, total_steps: int) -> dict[str, Any]:
    """Return the content of plan.json: everything needed to explain or repeat the run."""
    seen = seen_tokens(data.train)
    step = step_time(plan, seen_tokens=seen)
    packages = ("torch", "deepspeed", "transformers", "accelerate", "sentencepiece")
    planned, settings = plan.to_json(), plan.config.run
    if settings.notify is not None:  # plan.json is shown to others
        planned["run"]["run"]["notify"] = printable(settings.notify)
    return {
        **planned,
        "started_in": str(Path.cwd()),  # where relative paths begin
        "owner": settings.owner or user_name(),
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
            "tools": _tools(data),
            "sources": data.summary(),
            "pairs": {source.name: source.pairs for source in data.sources if source.pairs},
        },
        "versions": {name: version(name) for name in packages},
        "git_commit": git_commit() if plan.world.rank == 0 else None,  # rank 0 writes the file
    }


def _tools(data: Data) -> list[str]:
    """Return the names of the tools in the first conversations of each source."""
    chats = chain(*(islice(source.corpus.chats(), _ASKED_CHATS) for source in data.sources))
    functions = (tool.get("function") for chat in chats for tool in chat.tools or ())
    return sorted({str(each.get("name")) for each in functions if isinstance(each, dict)})


def _held_out_set(plan: Plan, data: Data) -> str:
    """Return a hash of what the held-out loss is measured on: the size of the set, the ids and
    targets of its first windows, and an objective of pairs with its settings.
    """
    stream, samples = data.held_out, plan.config.eval.samples
    samples = min(samples, stream.samples)
    first = stream.batch(0, min(samples, _HASHED_WINDOWS))
    parts = (first.input_ids.numpy().tobytes(), first.labels.numpy().tobytes())
    train = plan.config.train
    of_pairs = f"{train.objective}:{train.beta_used}:{train.margin_used}:{train.sft_weight}"
    sizes = f"{samples}:{stream.seq_len}{of_pairs if train.preferences else ''}".encode()
    return hashlib.sha256(b":".join((sizes, *parts))).hexdigest()[:16]


def git_commit() -> str | None:
    """Return the commit of the running code, with "+" if files differ from it; None without git."""
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


def open_folder(plan: Plan, say: Callable[[str], None]) -> RunFolder:
    """Choose and open the run folder on rank 0; tell every rank its path and attempt. Collective.

    Raises ConfigError or CannotSave on every rank if rank 0 cannot open it.
    """
    folder: RunFolder | None = None
    outcome: list[Any] = [None, 0, 0.0, None]
    if plan.world.rank == 0:
        try:
            folder = _chosen(plan, say)
            outcome[:3] = str(folder.path), folder.attempt, folder.gpu_hours_before
        except (ConfigError, CannotSave, OSError) as error:
            kind = CannotSave if is_full_disk(error) else ConfigError
            outcome[3] = kind(f"run.dir={plan.config.run.dir}: {error}")
    dist.broadcast_object_list(outcome)
    path, attempt, hours, problem = outcome
    if problem is not None:
        raise problem
    if folder is None:
        folder = RunFolder(path)
        folder.attempt, folder.gpu_hours_before = attempt, hours
    return folder


def _chosen(plan: Plan, say: Callable[[str], None]) -> RunFolder:
    """Return the run folder, created if needed, locked, and open for writing."""
    json_name = Path(plan.deepspeed_source).stem
    path = plan.config.run.dir or create_run_dir(plan.config.model.name, json_name, datetime.now())
    folder = RunFolder(path)
    stale_owner = folder.open()
    if stale_owner is not None:
        folder.append_event("stale_lock", owner=str(stale_owner))
    for problem in folder.damaged:
        folder.append_event("damaged_record", message=problem)
        say(f"ignored, not needed: {problem}")
    return folder
