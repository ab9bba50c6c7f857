"""The harness's own use of file system and network does not grow with the number of ranks.

Ranks are threads of one process that call the harness's own code.
"""

import contextlib
import io
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.checkpoint import store
from harness.checkpoint.manifest import Manifest, TrainState
from harness.checkpoint.reader import Reader
from harness.checkpoint.save import Saver
from harness.checkpoint.store import Retention, Store
from harness.checkpoint.tensor_file import Fragment
from harness.guard import replicas
from harness.guard.watchdog import Pulse, Watchdog
from harness.layout.box import Part
from harness.run import resumption
from harness.runfolder import RunFolder
from tests.thread_ranks import Group

FEW, MANY = 4, 16
# All of these query the file system for names or attributes.
CALLS = ("stat", "lstat", "open", "listdir", "scandir", "mkdir", "rmdir", "unlink", "remove",
         "rename", "replace", "fsync", "ftruncate")  # fmt: skip


@contextlib.contextmanager
def counted_calls() -> Iterator[Counter[threading.Thread]]:
    """Count calls that reach the file system, by thread."""
    calls: Counter[threading.Thread] = Counter()

    def counting(call: Any) -> Any:
        def counts(*arguments: Any, **named: Any) -> Any:
            calls[threading.current_thread()] += 1
            return call(*arguments, **named)

        return counts

    with contextlib.ExitStack() as patches:
        for name in CALLS:
            patches.enter_context(mock.patch.object(os, name, counting(getattr(os, name))))
        patches.enter_context(mock.patch.object(io, "open", counting(io.open)))
        yield calls


class Costs:
    """File system calls and received bytes by name, as (rank 0, busiest other rank)."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self.ranks = ranks
        self.calls: dict[str, tuple[int, int]] = {}
        self.bytes: dict[str, tuple[int, int]] = {}
        self._checkpoints(folder)
        weights = [torch.ones(4) for _ in range(8)]
        device = torch.device("cpu")
        checksums = lambda rank: replicas.checksums(weights, None, device)  # noqa: E731
        self._measure("replica checksums", checksums, replicas)
        (folder / "plan.json").write_text(json.dumps({"run": {"optim": {"lr": [1e-3] * 1000}}}))
        run = RunFolder(folder)
        self._measure("plan.json", lambda rank: resumption._read_plan(run))

    def _measure(self, what: str, work: Callable[[int], Any], *rooms: Any) -> None:
        group = Group(self.ranks)
        with counted_calls() as calls:
            group.run(work, *rooms)
        of_rank = [calls[thread] for thread in group.threads]
        self.calls[what] = of_rank[0], max(of_rank[1:])
        self.bytes[what] = group.received[0], max(group.received[1:])

    def _checkpoints(self, folder: Path) -> None:
        """Save three times, so that one checkpoint is removed; then verify."""
        kept = Store(folder / "checkpoints")
        savers = [Saver(kept, rank, Retention(last=2)) for rank in range(self.ranks)]

        def save(step: int, rank: int) -> None:
            fragments = [*self._fragments(rank)]
            savers[rank].start(_manifest(step), fragments, {}, background=False)
            savers[rank].finish()

        for step in (1, 2):
            Group(self.ranks).run(lambda rank, step=step: save(step, rank))
        self._measure("a save", lambda rank: save(3, rank))
        path = kept.at(3)
        self._measure("verification", lambda rank: store.verified(path))
        checkpoint = store.Checkpoint(path, store.read_manifest(path, check_sizes=False))

        def load(rank: int) -> None:
            if rank != 1:  # unlike ranks, threads share open files
                return
            reader = Reader.of(checkpoint)
            for fragment in self._fragments(rank):
                for kind, tensor in fragment.tensors.items():
                    reader.fill(fragment.name, kind, fragment.offset, tensor)

        self._measure("a load", load)

    def _fragments(self, rank: int) -> Iterator[Fragment]:
        """Yield a fragment of each of eight weights, as with ZeRO 3."""
        for number in range(8):
            tensors = {kind: torch.zeros(4) for kind in ("weight", "exp_avg", "exp_avg_sq")}
            name = f"model.layers.{number}.self_attn.q_proj.weight"
            yield Fragment(name, Part.of((4 * self.ranks,)), 4 * rank, tensors)


def _manifest(step: int) -> Manifest:
    engine = {"counters": {}, "loss_scaling": {}, "optimizer": {}}
    state, model = TrainState(step), {"model_type": "llama"}
    return Manifest(state, "fp32", model, None, engine, None, None, {})


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Costs, Costs]:
    few, many = (Costs(ranks, tmp_path_factory.mktemp("ranks")) for ranks in (FEW, MANY))
    return few, many


def test_a_rank_asks_the_file_system_as_often_of_many(costs: tuple[Costs, Costs]) -> None:
    few, many = costs
    for what, calls in many.calls.items():
        assert calls[1] == few.calls[what][1] <= 4, what
        # Rank 0 removes each rank's file of an old checkpoint.
        further = MANY - FEW if what == "a save" else 0
        assert calls[0] == few.calls[what][0] + further, what


def test_a_rank_is_sent_as_much_of_many(costs: tuple[Costs, Costs]) -> None:
    few, many = costs
    for what, sent in many.bytes.items():
        if what != "verification":  # it lists the files of all ranks
            assert sent[1] <= few.bytes[what][1] + 8, what


@pytest.mark.parametrize(("ranks", "tick_s"), [(64, 5), (256, 5), (1_024, 16), (16_384, 256)])
def test_all_heartbeats_are_few_calls_a_second(ranks: int, tick_s: float, tmp_path: Path) -> None:
    dog = Watchdog(Pulse(floor_s=0.0, factor=0.0, first_s=0.0), 0, ranks)
    dog.folder = tmp_path
    dog.tick()  # from now on the file exists
    with counted_calls() as calls:
        dog.tick()
    assert dog.tick_s == tick_s
    assert calls[threading.get_ident()] * ranks / dog.tick_s <= 3 * 64


def test_a_gather_to_all_would_be_seen() -> None:
    received = []
    for ranks in (FEW, MANY):
        group = Group(ranks)

        def work(rank: int, group: Group = group) -> None:
            group.all_gather_object([None] * group.ranks, "x")

        group.run(work)
        received.append(group.received[1])
    assert received[1] == 4 * received[0]
