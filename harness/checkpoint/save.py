"""Saves a checkpoint: every rank writes its fragments, then rank 0 publishes them."""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors

from harness.checkpoint.collectives import broadcast_object, gather_objects
from harness.checkpoint.index import INDEX, merged, to_index
from harness.checkpoint.manifest import MANIFEST, PROBE, Manifest
from harness.checkpoint.store import Retention, Store
from harness.checkpoint.tensor_file import (
    Fragment,
    HostCopies,
    Written,
    start_hashing,
    write_bytes,
    write_fragments,
)
from harness.errors import ExitCode, RunStopped
from harness.estimate.memory_item import as_size


@dataclass(frozen=True)
class Saved:
    """The result of a save.

    `stall_s`: seconds that training waited; `seconds`: total seconds; `bytes`: over all ranks.
    """

    path: Path
    step: int
    stall_s: float
    seconds: float
    bytes: int
    removed: list[str]


@dataclass
class _Pending:
    """A save in progress. The writing thread sets the files and index, or the problem."""

    manifest: Manifest
    began: float
    stall_s: float
    writing: Future[None] | None = None
    files: list[Written] = field(default_factory=list)
    index: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


class Saver:
    """Saves one checkpoint at a time; every rank calls the same methods in the same order.

    The background thread writes copies and is not collective; the ranks synchronise in `finish`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        keep: Retention,
        before_publishing: Callable[[], None] = lambda: None,
    ) -> None:
        """`before_publishing` is called on rank 0 when a checkpoint is on disk but not yet
        renamed.
        """
        self.store = store
        self.rank = rank
        self.keep = keep
        self.before_publishing = before_publishing
        self.copies = HostCopies()
        self.longest_s = 0.0  # from the start of a save, background or not, to its checkpoint
        self._pending: _Pending | None = None
        start_hashing()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._background.submit(int).result()  # starts the thread now (see start_hashing)

    @property
    def is_busy(self) -> bool:
        """True if a save is pending."""
        return self._pending is not None

    @property
    def written(self) -> bool:
        """True if a save is pending and this rank has written its part."""
        pending = self._pending
        return pending is not None and not (pending.writing and not pending.writing.done())

    def start(
        self,
        manifest: Manifest,
        fragments: Sequence[Fragment],
        probe: dict[str, torch.Tensor],
        background: bool,
    ) -> None:
        """Start a save. With `background`, return as soon as the fragments have been copied.

        Collective. Raises RunStopped (cannot save) if there is not enough space.
        """
        assert self._pending is None, "the last save is not finished"
        began = time.perf_counter()
        self._make_room(manifest.state.step, sum(fragment.bytes for fragment in fragments))
        pending = self._pending = _Pending(manifest, began, 0.0)
        if background:
            copies = self.copies.of(fragments)
            pending.writing = self._background.submit(self._write, pending, copies, probe)
        else:
            self._write(pending, fragments, probe)
        pending.stall_s = time.perf_counter() - began

    def finish(self) -> Saved | None:
        """Wait for the pending save and publish the checkpoint; None if there is none. Collective.

        Raises RunStopped (cannot save) on all ranks if any of them failed to write. Earlier
        checkpoints are unchanged.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        began = time.perf_counter()
        if pending.writing is not None:
            pending.writing.result()
        reports: list[Any] = gather_objects((pending.files, pending.index, pending.problem))
        result: str | tuple[int, list[str]] = ""  # the problem, or what was committed
        if self.rank == 0:
            try:
                problem = next((problem for *_, problem in reports if problem), None)
                result = problem or self._commit(pending.manifest, reports)
            except Exception as error:  # any error: the other ranks wait in the next line
                result = f"rank 0: {type(error).__name__}: {error}"
        result = broadcast_object(result)
        if isinstance(result, str):
            raise self._failure(pending.manifest.state.step, result)
        now = time.perf_counter()
        return Saved(
            path=self.store.at(pending.manifest.state.step),
            step=pending.manifest.state.step,
            stall_s=pending.stall_s + now - began,
            seconds=now - pending.began,
            bytes=result[0],
            removed=result[1],
        )

    def _make_room(self, step: int, own_bytes: int) -> None:
        """Create an empty folder and check that all ranks' files fit on the disk. Collective."""
        sizes, problem = gather_objects(own_bytes), None
        if self.rank == 0:
            try:
                self.store.make_unfinished(step)
                free = self.store.free_bytes()
                total = sum(sizes)
                if total > free:
                    problem = f"it needs {as_size(total)}, but only {as_size(free)} are free"
            except Exception as error:  # as in `finish`
                problem = f"rank 0: {type(error).__name__}: {error}"
        if (problem := broadcast_object(problem)) is not None:
            raise self._failure(step, problem)

    def _write(
        self, pending: _Pending, fragments: Sequence[Fragment], probe: dict[str, torch.Tensor]
    ) -> None:
        folder = self.store.unfinished(pending.manifest.state.step)
        try:
            files, entries = write_fragments(folder, self.rank, fragments)
            if self.rank == 0 and probe:
                files.append(write_bytes(folder / PROBE, to_safetensors(probe)))
            pending.files, pending.index = files, to_index(entries)
        except Exception as error:  # raised on all ranks in `finish`
            pending.problem = f"rank {self.rank}: {type(error).__name__}: {error}"

    def _commit(self, manifest: Manifest, reports: list[Any]) -> tuple[int, list[str]]:
        """Write index and manifest on rank 0 and publish; return total bytes and removed
        checkpoints.
        """
        step = manifest.state.step
        folder = self.store.unfinished(step)
        files = [file for files, *_ in reports for file in files]
        index = merged(index for _, index, _ in reports)
        files.append(write_bytes(folder / INDEX, json.dumps(index).encode()))
        whole = replace(manifest, files=files)
        write_bytes(folder / MANIFEST, whole.to_bytes())
        self.before_publishing()
        self.store.publish(step)
        try:
            return whole.bytes, [path.name for path in self.store.retain(self.keep, step)]
        except OSError as error:  # the checkpoint is published even if old ones remain
            return whole.bytes, [f"not all of them: {error}"]

    def _failure(self, step: int, problem: str) -> RunStopped:
        """Remove the unfinished save; return the error to raise."""
        if self.rank == 0:
            with contextlib.suppress(OSError):
                self.store.sweep()
        newest = [path.name for path in self.store.all()][-1:]
        return RunStopped(
            ExitCode.CANNOT_SAVE,
            f"the checkpoint of step {step} could not be saved in {self.store.folder} ({problem}); "
            f"newest checkpoint: {newest[0] if newest else 'none'}. If the disk is full, free "
            f"space{' or lower save.keep' if self.keep.last > 1 else ''}",
        )
