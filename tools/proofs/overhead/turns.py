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
from typing import Any, NoReturn, Self

from tools.proofs.overhead.scatter import density
from tools.proofs.ranks import ENDING_S, PATIENCE_S, Ranks, raise_errors, started

POLL_S = 0.5
COUNTED = 2  # steps after all turns, under the counters, which slow them
UNTIMED_STEPS = 1
"""First steps of a turn: the caches hold what the others worked on."""


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
        return self.warm_up + self.turns * (UNTIMED_STEPS + self.steps) + COUNTED

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add --warm-up, --turns and --steps."""
        # In its first three steps the harness also compares the memory it holds with the estimate.
        for name, steps, about in (
            ("--warm-up", 4, "steps of a start before its first turn"),
            ("--turns", 3, "of each start"),
            ("--steps", 3, "timed, in each turn"),
        ):
            parser.add_argument(name, type=_at_least_one, default=steps, metavar="N", help=about)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """Return what `add_arguments` read."""
        return cls(args.warm_up, args.turns, args.steps)


@dataclass
class Start:
    """The ranks of one side, which wait for their turn."""

    group: Ranks
    connections: Sequence[Connection]
    """To each rank, in no order."""
    out: Path
    timed: list[list[dict[str, float]]]
    """Of each rank: its timed steps."""

    def train(self, steps: int, counted: bool = False) -> list[list[dict[str, float]]]:
        """Let all ranks train; return the steps of each, by rank. Raises SystemExit as `reply`."""
        self._tell({"steps": steps, "counted": counted})
        return self.reply()

    def take_turn(self, steps: int) -> None:
        """Train, and keep the times of the last `steps` steps."""
        for timed, done in zip(self.timed, self.train(UNTIMED_STEPS + steps), strict=True):
            timed.extend(done[UNTIMED_STEPS:])

    def finish(self) -> list[dict[str, Any]]:
        """End the ranks; return each one's measurements. Raises SystemExit with their errors."""
        densities = [density(process.pid) for process in self.group.processes]
        self._tell(None)
        raise_errors(self.group.wait(), self.out)
        return [
            json.loads((self.out / f"rank-{rank}.json").read_text())
            | {name: [step[name] for step in timed] for name in timed[0]}
            | {"density": densities[rank]}
            for rank, timed in enumerate(self.timed)
        ]

    def _tell(self, message: dict[str, Any] | None) -> None:
        try:
            for connection in self.connections:
                connection.send(message)
        except (BrokenPipeError, ConnectionResetError):  # it ended while it waited
            _raise_ended(self.group, self.out)

    def reply(self) -> list[list[dict[str, float]]]:
        """Wait until every rank has done its steps; return them, by rank.

        Raises SystemExit with what the ranks wrote if one of them ends instead.
        """
        replies: dict[int, list[dict[str, float]]] = {}
        waiting = list(self.connections)
        while waiting:
            for connection in wait(waiting):
                assert isinstance(connection, Connection)
                try:
                    rank, steps = connection.recv()
                except (EOFError, ConnectionResetError):
                    _raise_ended(self.group, self.out)
                replies[rank] = steps
                waiting.remove(connection)
        return [replies[rank] for rank in sorted(replies)]


@contextlib.contextmanager
def waiting_start(
    command: Sequence[str], ranks: int, out: Path, socket_path: Path, env: Mapping[str, str | None]
) -> Iterator[Start]:
    """Start `command` and wait until its ranks have warmed up; none of them outlives the block.

    They connect to the socket at `socket_path`. Raises SystemExit with what they wrote to
    `out`/*.error.
    """
    with (
        socket.socket(socket.AF_UNIX) as listener,
        contextlib.ExitStack() as opened,
    ):
        listener.bind(str(socket_path))
        listener.listen(ranks)
        listener.settimeout(POLL_S)
        with started(command, ranks, logs=out, env=env) as group:
            connections: list[Connection] = []
            while len(connections) < ranks:
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    if group.ended:
                        _raise_ended(group, out)
                    continue
                connections.append(opened.enter_context(Connection(peer.detach())))
            start = Start(group, connections, out, [[] for _ in range(ranks)])
            start.reply()
            yield start


def take_turns(starts: Sequence[Start], length: Length) -> None:
    """Let `starts` train in turns, each as often as `length` says; another one begins each time."""
    for turn in range(length.turns):
        first = turn % len(starts)
        for start in (*starts[first:], *starts[:first]):
            start.take_turn(length.steps)


def order_of(sides: Sequence[str], number: int) -> list[str]:
    """Return the order in which a round starts its sides, forwards or backwards from one of them.

    A start before another gets other pages of memory. Of three sides, in any count of rounds, each
    is first, second and last equally often, but for one round.
    """
    first, turned = number % len(sides), number // len(sides) % 2
    order = [*sides[first:], *sides[:first]]
    return order[::-1] if turned else order


def turn_medians_s(rank: Mapping[str, Any], turns: int) -> list[float]:
    """Return the median step of each turn, in seconds, from one rank's measurements."""
    steps: list[float] = rank["step_s"]
    each = len(steps) // turns
    return [statistics.median(steps[turn * each : (turn + 1) * each]) for turn in range(turns)]


def _raise_ended(group: Ranks, out: Path) -> NoReturn:
    """Raise SystemExit: a rank has ended before its time."""
    codes = group.wait(limit_s=PATIENCE_S, patience_s=ENDING_S)  # others may wait for their turn
    raise_errors(codes, out)
    raise SystemExit(f"a rank ended before its time; all of them with {codes}; see {out}")


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {number}")
    return number
