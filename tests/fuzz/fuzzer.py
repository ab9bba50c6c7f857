"""Inputs, made and tried one by one: a source of chance, a place, a process, the rule."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

from tests.fuzz.case import Base, Case, Kind, Place, is_valid
from tests.fuzz.kinds.table import KINDS
from tests.fuzz.rule import HANG, NOT_MADE, Fault, faults_of, files_in
from tools.proofs.zygote import Outcome, Zygote

LIMIT_S = 20.0
"""After which an input is tried again, alone and with three times as long: then it is a hang."""


@dataclass(frozen=True)
class Name:
    """Names one input, which is always the same."""

    seed: int
    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    @property
    def replay(self) -> str:
        """The command that tries this input alone."""
        return f"make fuzz FUZZ_SEED={self.seed} FUZZ_ONLY={self}"


@dataclass(frozen=True)
class Tried:
    """The end of one input."""

    name: Name
    case: Case
    outcome: Outcome
    faults: list[Fault] = field(default_factory=list)

    @property
    def code(self) -> int | None:
        return self.outcome.codes[0]


def names(seed: int, inputs: int, kinds: Iterable[str] | None = None) -> list[Name]:
    """About `inputs` of them, distributed over the kinds as the table has it."""
    of_1500 = sum(kind.inputs for kind in KINDS.values())
    chosen = [KINDS[name] for name in kinds or KINDS]
    return [
        Name(seed, kind.name, index)
        for kind in chosen
        for index in range(max(1, round(kind.inputs * inputs / of_1500)))
    ]


def made(name: Name, place: Place, kind: Kind | None = None) -> Case:
    """Make an input in its place."""
    draw = random.Random(f"{name.seed}/{name.kind}/{name.index}")
    return (kind or KINDS[name.kind]).make(draw, place, is_valid(name.index))


def tried(zygote: Zygote, name: Name, case: Case, place: Place, limit_s: float = LIMIT_S) -> Tried:
    """Run one input in a process of its own, and hold it to the rule."""
    before = files_in(place.folder)
    logs = place.folder.with_name(f"{place.folder.name}.log")
    outcome = zygote.run(
        [
            os.fsdecode(os.fsencode(word)) if _can_be_passed(word) else ascii(word)
            for word in case.argv
        ],
        logs,
        ranks=1,
        limit_s=limit_s,
        main=case.main,
        cwd=place.folder,
        bounded=True,
    )
    return Tried(name, case, outcome, faults_of(case, place, before, outcome))


def _can_be_passed(word: str) -> bool:
    """A process's arguments are bytes without NUL."""
    try:
        return b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False


class Fuzzer:
    """Tries inputs in several processes at once; those that fail keep their folder."""

    def __init__(self, folder: Path, base: Base, zygotes: list[Zygote]) -> None:
        self.folder, self.base = folder, base
        self._zygotes: SimpleQueue[Zygote] = SimpleQueue()
        self._jobs = len(zygotes)
        for zygote in zygotes:
            self._zygotes.put(zygote)

    def each(self, inputs: list[Name]) -> Iterator[Tried]:
        """Try them all, in this order or nearly; what seems to hang is tried again at the end."""
        slow = []
        with ThreadPoolExecutor(self._jobs) as pool:
            waiting = iter(inputs)
            running = [pool.submit(self.one, name) for name in islice(waiting, self._jobs)]
            while running:
                result = running.pop(0).result()
                running += [pool.submit(self.one, name) for name in islice(waiting, 1)]
                if any(fault.kind == HANG for fault in result.faults):
                    slow.append(result.name)
                else:
                    yield result
        for name in slow:
            yield self.one(name, 3 * LIMIT_S)

    def one(self, name: Name, limit_s: float = LIMIT_S) -> Tried:
        """Try one input."""
        place = Place(self.folder / f"{name.kind}-{name.index}", self.base)
        remove(place.folder)
        place.folder.mkdir(parents=True)
        try:
            case = made(name, place)
        except Exception as error:  # a package or a right that this machine lacks
            fault = Fault(NOT_MADE, f"this machine cannot make it: {type(error).__name__}: {error}")
            return Tried(name, Case([], "not made"), Outcome([None], [], []), [fault])
        zygote = self._zygotes.get()
        try:
            result = tried(zygote, name, case, place, limit_s)
        finally:
            self._zygotes.put(zygote)
        if not result.faults:
            remove(place.folder)
            remove(place.folder.with_name(f"{place.folder.name}.log"))
        return result


def remove(folder: Path) -> None:
    """Remove a folder, however deep."""
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(max(limit, 20_000))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
    finally:
        sys.setrecursionlimit(limit)
