"""Starts that are alive together and train in turns.

A machine's own pace changes within seconds: of starts timed one after the other, each meets another
one, and what is the machine's looks like theirs. In turns all of them meet the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from tools.proofs.overhead.scatter import density
from tools.proofs.ranks import ENDING_S, PATIENCE_S, Ranks, raise_errors, started

POLL_S = 0.5
COUNTED = 2  # steps after all turns, under the counters, which slow them
RUSH_STEPS = 1
"""First steps of a turn that are not timed: the caches hold what the others worked on."""


@dataclass(frozen=True)
class Length:
    """How long each start trains."""

    warm_up: int
    """Steps before the first turn, at least one."""
    turns: int
    steps: int
    """Timed, in a turn."""

    @property
    def all_steps(self) -> int:
        """Steps of a start, with those under the counters."""
        return self.warm_up + self.turns * (RUSH_STEPS + self.steps) + COUNTED

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add --warm-up, --turns and --steps."""
        # In its first three steps the harness also compares the memory it holds with the estimate.
        parser.add_argument("--warm-up", type=int, default=4, help="steps before, at least one")
        parser.add_argument("--turns", type=int, default=4, help="of each start")
        parser.add_argument("--steps", type=int, default=2, help="timed, in each turn")

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """Return what `add_arguments` read."""
        return cls(args.warm_up, args.turns, args.steps)


@dataclass
class Start:
    """The ranks of one side, which wait for their turn."""

    group: Ranks
    lines: Sequence[Connection]
    """To each rank, in no order."""
    out: Path
    timed: list[list[dict[str, float]]]
    """Of each rank: its timed steps."""

    def train(self, steps: int, counted: bool = False) -> list[list[dict[str, float]]]:
        """Let all ranks train; return the steps of each, by rank. Raises SystemExit as `reply`."""
        for line in self.lines:
            line.send({"steps": steps, "counted": counted})
        return self.reply()

    def take_turn(self, steps: int) -> None:
        """Train, and keep the times of the last `steps` steps."""
        for timed, done in zip(self.timed, self.train(RUSH_STEPS + steps), strict=True):
            timed.extend(done[RUSH_STEPS:])

    def finish(self) -> list[dict[str, Any]]:
        """End the ranks; return each one's measurements. Raises SystemExit with their errors."""
        densities = [density(process.pid) for process in self.group.processes]
        for line in self.lines:
            line.send(None)
        raise_errors(self.group.wait(), self.out)
        return [
            json.loads((self.out / f"rank-{rank}.json").read_text())
            | {name: [step[name] for step in timed] for name in timed[0]}
            | {"density": densities[rank]}
            for rank, timed in enumerate(self.timed)
        ]

    def reply(self) -> list[list[dict[str, float]]]:
        """Wait until every rank has done its steps; return them, by rank.

        Raises SystemExit with what the ranks wrote if one of them ends instead.
        """
        replies: dict[int, list[dict[str, float]]] = {}
        waiting = list(self.lines)
        while waiting:
            for line in wait(waiting):
                assert isinstance(line, Connection)
                try:
                    rank, steps = line.recv()
                except (EOFError, ConnectionResetError):
                    raise_ended(self.group, self.out)
                replies[rank] = steps
                waiting.remove(line)
        return [replies[rank] for rank in sorted(replies)]


@contextlib.contextmanager
def waiting_start(
    command: Sequence[str], ranks: int, out: Path, door: Path, env: Mapping[str, str]
) -> Iterator[Start]:
    """Start `command` and wait until its ranks have warmed up; none of them outlives the block.

    They connect to the socket `door`. Raises SystemExit with what they wrote to `out`/*.error.
    """
    with (
        socket.socket(socket.AF_UNIX) as listener,
        contextlib.ExitStack() as lines_open,
    ):
        listener.bind(str(door))
        listener.listen(ranks)
        listener.settimeout(POLL_S)
        with started(command, ranks, logs=out, env=env) as group:
            lines: list[Connection] = []
            while len(lines) < ranks:
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    if group.ended:
                        raise_ended(group, out)
                    continue
                lines.append(lines_open.enter_context(Connection(peer.detach())))
            start = Start(group, lines, out, [[] for _ in range(ranks)])
            start.reply()
            yield start


def take_turns(starts: Sequence[Start], length: Length) -> None:
    """Let `starts` train in turns, each as often as `length` says; another one begins each time."""
    for turn in range(length.turns):
        first = turn % len(starts)
        for start in (*starts[first:], *starts[:first]):
            start.take_turn(length.steps)


def turn_medians_s(rank: Mapping[str, Any], turns: int) -> list[float]:
    """Return the median step of each turn, in seconds, from one rank's measurements."""
    steps: list[float] = rank["step_s"]
    each = len(steps) // turns
    return [statistics.median(steps[turn * each : (turn + 1) * each]) for turn in range(turns)]


def raise_ended(group: Ranks, out: Path) -> None:
    """Raise SystemExit: a rank has ended before its time."""
    codes = group.wait(limit_s=PATIENCE_S, patience_s=ENDING_S)  # others may wait for their turn
    raise_errors(codes, out)
    raise SystemExit(f"a rank ended before its time; all of them with {codes}; see {out}")
