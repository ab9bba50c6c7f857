"""Ranks as threads of one process: a stand-in for torch.distributed that counts received bytes."""

import contextlib
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


@dataclass
class Group:
    """Stands in for `torch.distributed`. Functions that it lacks raise AttributeError.

    It counts received bytes: a gather is a message from every other rank to rank 0, a broadcast one
    to each rank, an all-gather one from every other rank to each, and a reduction its tensor twice
    (there and back, as in a tree).
    """

    ranks: int
    ReduceOp = dist.ReduceOp

    def __post_init__(self) -> None:
        self.received = [0] * self.ranks
        """Bytes that reached each rank."""
        self.threads: list[threading.Thread] = []
        """Thread of each rank in the last run. An ident may be reused once its thread has ended."""
        self._here = threading.local()
        self._meet = threading.Barrier(self.ranks)
        self._values: list[Any] = [None] * self.ranks

    def run(self, work: Callable[[int], Any], *rooms: ModuleType) -> list[Any]:
        """Call `work` once per rank, with this group as the modules' `dist`, and for those that
        look it up (harness.checkpoint.collectives).
        """
        results: list[Any] = [None] * self.ranks
        failures: list[BaseException] = []

        def of_rank(rank: int) -> None:
            self._here.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                failures.append(error)
                self._meet.abort()

        threads = self.threads = [
            threading.Thread(target=of_rank, args=(rank,)) for rank in range(self.ranks)
        ]
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.dict(sys.modules, {"torch.distributed": self}))  # type: ignore[dict-item]
            for room in rooms:
                patches.enter_context(mock.patch.object(room, "dist", self))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for failure in failures:
            if not isinstance(failure, threading.BrokenBarrierError):
                raise failure
        return results

    def is_initialized(self) -> bool:
        """Return True."""
        return True

    def get_rank(self, group: Any = None) -> int:
        """Return the rank of this thread."""
        rank: int = self._here.rank
        return rank

    def get_world_size(self, group: Any = None) -> int:
        """Return the number of ranks."""
        return self.ranks

    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        """Return all ranks: there are no other groups."""
        return [*range(self.ranks)]

    def gather_object(self, value: Any, into: list[Any] | None = None) -> None:
        """Fill rank 0's list."""
        texts = self._exchanged(pickle.dumps(value))
        if into is not None:
            self._count(sum(map(len, texts[1:])))
            into[:] = map(pickle.loads, texts)

    def broadcast_object_list(self, values: list[Any]) -> None:
        """Replace the values of the other ranks by rank 0's."""
        text = self._exchanged(pickle.dumps(values) if self.get_rank() == 0 else b"")[0]
        if self.get_rank():
            self._count(len(text))
            values[:] = pickle.loads(text)

    def all_gather_object(self, into: list[Any], value: Any) -> None:
        """Fill every rank's list."""
        texts = self._exchanged(pickle.dumps(value))
        self._count(sum(map(len, texts)))
        into[:] = map(pickle.loads, texts)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None
    ) -> None:
        """Replace every rank's tensor by the elementwise maximum or sum."""
        tensors = torch.stack(self._exchanged(tensor.clone()))
        self._count(2 * tensor.nbytes)
        tensor.copy_(tensors.amax(0) if op == dist.ReduceOp.MAX else tensors.sum(0))

    def all_gather(self, into: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        """Fill every rank's tensors."""
        self._count(self.ranks * own.nbytes)
        for tensor, other in zip(into, self._exchanged(own.clone()), strict=True):
            tensor.copy_(other)

    def _exchanged(self, value: Any) -> list[Any]:
        self._values[self.get_rank()] = value
        self._meet.wait()
        values = self._values
        self._meet.wait()
        if self.get_rank() == 0:
            self._values = [None] * self.ranks
        self._meet.wait()
        return values

    def _count(self, size: int) -> None:
        self.received[self.get_rank()] += size
