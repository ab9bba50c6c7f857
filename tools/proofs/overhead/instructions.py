"""The processor's instructions in a step, counted by valgrind's callgrind.

They do not depend on the machine's pace, on its other work, or on where pages lie.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.proofs.overhead.prepare import Bench
from tools.proofs.overhead.suspects import Suspect
from tools.proofs.overhead.turns import UNTIMED_STEPS, Length

LENGTH = Length(warm_up=4, turns=1, steps=1)
STEPS = UNTIMED_STEPS + LENGTH.steps
"""Counted. After its third step the harness compares the memory it holds with the estimate, once,
which takes 0.9 billion."""
# Vectors of 128 bits: of wider ones valgrind calculates each fused multiplication by a function of
# its own, and a matrix product takes up to ninety times as long.
_NARROW = Suspect(
    environment={
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    }
)
_NAMED = re.compile(r"c?ob=\((\d+)\)(?: (.*))?")


class Place(NamedTuple):
    """A library and a kind of thread, in which instructions were executed."""

    library: str
    """File name of the shared object."""
    is_main: bool
    """In the process's first thread, which trains."""


def instructions_of(bench: Bench, side: str, stage: int, ranks: int) -> Counter[Place]:
    """Return the instructions of `STEPS` steps of a new start, all ranks together.

    Raises SystemExit with the failure.
    """
    profiles = bench.folder / f"callgrind-{side}-{stage}-{ranks}"
    profiles.mkdir()
    callgrind = (
        *("valgrind", "--tool=callgrind", "--quiet", "--instr-atstart=no"),
        *("--separate-threads=yes", f"--callgrind-out-file={profiles}/%p"),
    )
    with bench.start(side, stage, ranks, LENGTH, _NARROW, under=callgrind) as start:
        pids = [process.pid for process in start.group.processes]
        _switch("on", pids)
        start.take_turn(LENGTH.steps)
        _switch("off", pids)
        start.finish()
    counts: Counter[Place] = Counter()
    for path in profiles.iterdir():
        counts += read_profile(path.read_text(errors="replace"))
    return counts


def _switch(counting: str, pids: Sequence[int]) -> None:
    """While they wait for their turn."""
    for pid in pids:
        subprocess.run(
            ["callgrind_control", "-i", counting, f"{pid}"], check=True, capture_output=True
        )


def read_profile(text: str) -> Counter[Place]:
    """Return the instructions in a thread's file of callgrind, each where it was executed.

    Raises ValueError if they are not as many as the file says (valgrind: Callgrind Format
    Specification).
    """
    thread = re.search(r"^thread: (\d+)$", text, re.MULTILINE)
    names: dict[str, str] = {}
    counts: Counter[Place] = Counter()
    library, is_call = "", False
    for line in text.splitlines():
        if match := _NAMED.fullmatch(line):  # a name is spelled out once, then by its number
            number, path = match.groups()
            if path is not None:
                names[number] = Path(path).name
            if line.startswith("ob="):
                library = names[number]
        elif line.startswith("calls="):
            is_call = True
        elif line[:1].isdigit() or line[:1] in ("+", "-", "*"):
            if not is_call:  # the line after a call has what was executed inside of it
                counts[Place(library, thread is None or thread[1] == "1")] += int(line.split()[1])
            is_call = False
    totals = re.search(r"^totals: (\d+)$", text, re.MULTILINE)
    if counts.total() != (int(totals[1]) if totals else 0):
        raise ValueError(f"{counts.total():,} instructions were read, of {totals and totals[1]}")
    return +counts
