"""Real runs on a few CPU ranks without a launcher, whose imports take 5 s."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.launch import ranks as cpu_ranks
from harness.launch.fork_server import Zygote
from harness.launch.ranks import REPOSITORY, Outcome
from harness.launch.ranks import Ranks as Group
from harness.runfolder import RunFolder

TRAIN = REPOSITORY / "harness" / "train.py"
SHARED_MEMORY = Path("/dev/shm")

# A Llama with about 100,000 parameters; a step takes milliseconds.
SMALL_MODEL = (
    *("model.overrides.vocab_size=512", "model.overrides.hidden_size=64"),
    *("model.overrides.intermediate_size=128", "model.overrides.num_hidden_layers=2"),
    *("model.overrides.num_attention_heads=4", "model.overrides.num_key_value_heads=2"),
    "model.overrides.head_dim=16",
)
SHORT_RUN = (
    *("data.seq_len=32", "train.global_batch=8", "train.micro_batch=2", "train.steps=4"),
    *("optim.warmup_steps=0", "eval.samples=8", "sample.tokens=0", "save.export=false"),
    *("log.report=false", "ds.bf16.enabled=false"),  # the same precision on every machine
)

_WORDS = "the model reads a text and learns which word follows another".split()  # noqa: SIM905


def fill(disk: Path) -> None:
    """Leave no room in a file system."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def write_corpus(path: Path, documents: int = 200) -> Path:
    """Write a folder of text files with few words in random order: learnable and small."""
    path.mkdir()
    draw = random.Random(0)
    for number in range(documents):
        words = [draw.choice(_WORDS) for _ in range(draw.randrange(20, 120))]
        (path / f"{number}.txt").write_text(" ".join(words) + ".\n")
    return path


# Environment changes for a run on CPU; None removes a variable.
CHANGES = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONPATH": None,
    # As in an activated environment: another ninja would rebuild every operator.
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


def environment(**changes: str | None) -> dict[str, str]:
    """Return this process's environment for a run on CPU; None removes a variable."""
    return cpu_ranks.environment(CHANGES, changes)


@functools.cache
def imported() -> tuple[Zygote, tempfile.TemporaryDirectory[str]]:
    """Return the process that has imported everything, for ranks and tools, and its TMPDIR."""
    temporary = tempfile.TemporaryDirectory()
    variables = {**CHANGES, "PYTHONWARNINGS": "ignore", "TMPDIR": temporary.name}
    return Zygote(variables, "tests.faults.plant"), temporary


def _module_of(words: Sequence[str]) -> str | None:
    """Return the module of harness/ or tools/, or after -m, that `words` run; None without one."""
    interpreter, script, *arguments = words
    if interpreter != sys.executable:
        return None
    if script == "-m":
        return arguments[0]
    rooms = (REPOSITORY / "harness", REPOSITORY / "tools")
    if not any(Path(script).is_relative_to(room) for room in rooms):
        return None
    return ".".join(Path(script).relative_to(REPOSITORY).with_suffix("").parts)


def start(
    command: Sequence[object],
    folder: Path,
    ranks: int = 2,
    env: Mapping[str, str | None] | None = None,
    logs: Path | None = None,
) -> Group:
    """Start `command` in `folder`, once per rank; rank N writes to rank-N.log there, or in `logs`.

    A module or script of this repository is forked from a process that has imported everything,
    unless `env` changes the environment.
    """
    words = [str(word) for word in command]
    if not env and (module := _module_of(words)):
        arguments = words[3:] if words[1] == "-m" else words[2:]
        zygote, _ = imported()
        return zygote.start(module, arguments, ranks, folder, logs or folder, environment())
    return cpu_ranks.start(words, ranks, folder, logs or folder, {**CHANGES, **(env or {})})


def wait(group: Group, timeout_s: float = 900) -> Outcome:
    """Wait for the ranks of `start`. Ranks that exceed the time print their stacks and abort."""
    deadline = time.monotonic() + timeout_s

    def abort_late() -> None:
        if time.monotonic() > deadline:
            for process in group.processes:
                process.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER prints the stacks

    ended = group.wait(meanwhile=abort_late, patience_s=math.inf)
    for left in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{group.port}_*"):
        left.unlink()
    return ended


def run_ranks(
    command: Sequence[object],
    folder: Path,
    ranks: int = 2,
    env: Mapping[str, str | None] | None = None,
) -> Outcome:
    """Start `command` on every rank and wait for all."""
    return wait(start(command, folder, ranks, env))


def train_command(*arguments: object) -> list[object]:
    """Return the main command with `arguments`, after those of a short run of a small model."""
    return [sys.executable, TRAIN, *SMALL_MODEL, *SHORT_RUN, *arguments]


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    """Return a run's events of one kind."""
    return [event for event in run.read_events() if event["kind"] == kind]


def wait_for(
    condition: Callable[[], object], what: str, timeout_s: float = 600, every_s: float = 0.02
) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(every_s)
