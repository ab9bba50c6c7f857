"""Calls, bytes and seconds of what every rank does on its own account, at a number of ranks."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.checkpoint import find, meeting
from harness.checkpoint.fragment import Fragment
from harness.checkpoint.manifest import Manifest, TrainState
from harness.checkpoint.save import Saver
from harness.checkpoint.store import Retention, Store
from harness.guard import replicas
from harness.guard.pulse import Limits, Pulse
from harness.guard.signals import groups_of
from harness.guard.watchdog import Watchdog
from harness.layout.box import Part
from harness.run import resumption
from harness.run.live_memory import Compared
from harness.runfolder import RunFolder
from tools.proofs.own_cost.file_calls import counted_calls
from tools.proofs.own_cost.simulated import Group

TENSORS = 32
"""Parameters of the model, of each of which every rank has a fragment, as under ZeRO 3."""
_ELEMENTS = 4  # of a fragment: what they hold is not the harness's own cost
_KINDS = ("weight", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Row:
    """Cost of one operation on rank 0, and on the busiest other rank."""

    what: str
    calls: tuple[float, float]
    bytes: tuple[float, float]
    milliseconds: tuple[float, float]


def measured(ranks: int) -> Iterator[Row]:
    """Yield a row for each thing, of so many ranks. Takes seconds for a few hundred."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        yield from _checkpoints(ranks, folder / "checkpoints")
        yield _replicas(ranks)
        rows = [Compared(point, 2**30, 2**30) for point in ("built", "between_steps", "peak")]
        yield _cost("memory rows (an attempt)", ranks, lambda rank: meeting.gathered(rows))
        (folder / "plan.json").write_text(json.dumps({"run": {"optim": {"lr": [1e-3] * 1000}}}))
        read = resumption._read_plan
        run = RunFolder(folder)
        yield _cost("plan.json of a run (a start)", ranks, lambda rank: read(run), resumption)
        yield _hang(ranks, folder / "heartbeats")


def _cost(
    what: str, ranks: int, work: Callable[[int], Any], *rooms: Any, alone: bool = False
) -> Row:
    """Return the cost of what each rank does; `alone`: it exchanges nothing."""
    group = Group(ranks)
    with counted_calls() as calls:
        group.run(work, meeting, *rooms)
    costs = [
        (calls[ident], cost.bytes, 1000 * cost.seconds)
        for ident, cost in zip(group.idents, group.costs, strict=True)
    ]
    calls_of, bytes_of, ms_of = zip(*costs, strict=True)
    # Of the others' seconds most are the simulation's: every thread copies what all have sent.
    return Row(
        what,
        (calls_of[0], max(calls_of[1:], default=0)),
        (bytes_of[0], max(bytes_of[1:], default=0)),
        (ms_of[0], max(ms_of[1:], default=0.0) if alone else 0.0),
    )


def _checkpoints(ranks: int, folder: Path) -> Iterator[Row]:
    """Save three times, so that one is removed; then resume."""
    savers = [Saver(Store(folder), rank, Retention(last=2)) for rank in range(ranks)]

    def save(step: int, rank: int) -> None:
        savers[rank].start(_manifest(step), [*_fragments(rank, ranks)], {}, background=False)
        savers[rank].finish()

    for step in (1, 2):
        Group(ranks).run(lambda rank, step=step: save(step, rank), meeting)
    yield _cost("a save", ranks, lambda rank: save(3, rank))
    path = Store(folder).at(3)
    yield _cost("verification (a start)", ranks, lambda rank: find.verified(path), find)
    checkpoint = find.Checkpoint(path, find.read_manifest(path, check_sizes=False))

    def load(rank: int) -> None:
        if rank < 2:  # as all others do
            reader = checkpoint.reader()
            for fragment in _fragments(rank, ranks):
                for kind, tensor in fragment.tensors.items():
                    reader.fill(fragment.name, kind, fragment.offset, tensor)

    size = (path / "index.json").stat().st_size
    row = _cost("index (a start)", ranks, load, alone=True)
    yield Row(row.what, row.calls, (size, size if ranks > 1 else 0), row.milliseconds)


def _fragments(rank: int, ranks: int) -> Iterator[Fragment]:
    for number in range(TENSORS):
        part = Part.of((ranks * _ELEMENTS,))
        tensors = {kind: torch.zeros(_ELEMENTS) for kind in _KINDS}
        name = f"model.layers.{number}.self_attn.q_proj.weight"
        yield Fragment(name, part, rank * _ELEMENTS, tensors)


def _manifest(step: int) -> Manifest:
    engine = {"counters": {}, "loss_scaling": {}, "optimizer": {}}
    state, model = TrainState(step), {"model_type": "llama"}
    return Manifest(state, "fp32", model, None, engine, None, None, {})


def _replicas(ranks: int) -> Row:
    weights = [(str(number), torch.ones(_ELEMENTS)) for number in range(TENSORS)]
    what = "replica checksums (a save)"
    return _cost(
        what,
        ranks,
        lambda rank: replicas.checksums(
            [weight for _, weight in weights], None, torch.device("cpu")
        ),
        replicas,
    )


def _dog(ranks: int, folder: Path) -> Watchdog:
    folder.mkdir(exist_ok=True)
    dog = Watchdog(Pulse(Limits(0.0, 0.0, 0.0)), 0, ranks)
    dog.folder = folder
    return dog


@dataclass(frozen=True)
class Heartbeats:
    """Of all ranks together, a second: the file system is one."""

    tick_s: float
    calls_per_s: float
    bytes_per_s: float
    report_s: float
    """From the end of a rank's limit: a tick, and the report's patience."""


def heartbeat(ranks: int) -> Heartbeats:
    """Count a tick of one of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        dog = _dog(ranks, Path(folder))
        dog.tick()  # the file is there already
        with counted_calls() as calls:
            dog.tick()
        size = Path(folder, "rank-00000.json").stat().st_size
    per_s = ranks / dog.tick_s
    count = calls[threading.get_ident()]
    return Heartbeats(dog.tick_s, count * per_s, size * per_s, dog.grace_s)


def _hang(ranks: int, folder: Path) -> Row:
    """Of the rank that reports: it reads all heartbeats, twice."""
    dog = _dog(ranks, folder)
    for rank in range(ranks):
        dog.rank = rank
        dog.tick()
    dog.rank, began = 0, time.thread_time()
    with counted_calls() as calls:
        dog.all_ranks()
    seconds = time.thread_time() - began
    size = sum(path.stat().st_size for path in folder.iterdir())
    return Row(
        "a report of a hang (once)",
        (2 * calls[threading.get_ident()], 0),
        (2 * size, 0),
        (2000 * seconds, 0),
    )


def agreement(ranks: int) -> tuple[int, int]:
    """Return the other ranks that a rank is connected to so that it can be stopped, and the ranks
    that an answer goes through one after the other: gloo's ring, there and back, of every group.
    """
    others = [len(group) - 1 for group in groups_of(0, ranks)]
    return sum(others), 2 * sum(others)
