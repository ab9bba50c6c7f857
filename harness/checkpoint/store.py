"""The checkpoints of a run: publishes, verifies, finds and removes them."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness.checkpoint.collectives import broadcast_object, first_problem
from harness.checkpoint.manifest import (
    PROBE,
    Manifest,
    TrainState,
    check_index,
    check_size,
    checkpoint_name,
    read_index,
    read_manifest,
)
from harness.checkpoint.reader import Reader
from harness.checkpoint.tensor_file import TensorReader, sha256_of
from harness.config.run_config import run_and_step
from harness.errors import Unusable
from harness.runfolder import checkpoints_in

_UNFINISHED = ".unfinished-"
LATEST = "latest"


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep: the newest `last`, those at multiples of `every` steps (0: none)
    and, if `best`, the one with the lowest held-out loss.
    """

    last: int = 3
    every: int = 0
    best: bool = False


class Store:
    """The folder of a run's checkpoints. One rank writes, renames and removes; any process may
    read.

    A checkpoint is a folder `step-00000100`. It appears by a single rename after all its files are
    on disk, the manifest last. `latest` names the newest one, for people and scripts; the harness
    does not read it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen_whole: dict[Path, int] = {}  # folder mtime in ns when its files were checked

    def all(self) -> list[Path]:
        """Return the folders named like checkpoints, oldest first, without symlinks."""
        return checkpoints_in(self.folder)

    def at(self, step: int) -> Path:
        """Return the path of a step's checkpoint, which may not exist."""
        return self.folder / checkpoint_name(step)

    def unfinished(self, step: int) -> Path:
        """Return the path of a step's checkpoint until it is published."""
        return self.folder / f"{_UNFINISHED}{self.at(step).name}"

    def make_unfinished(self, step: int) -> None:
        """Remove leftovers of killed saves and create the folder of this one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sweep()
        self.unfinished(step).mkdir()

    def free_bytes(self) -> int:
        """Return the free bytes on the file system."""
        return shutil.disk_usage(self.folder).free

    def publish(self, step: int) -> Path:
        """Rename a finished checkpoint to its final name, durably."""
        final, unfinished = self.at(step), self.unfinished(step)
        fsync(unfinished)
        if final.exists():  # a damaged checkpoint that was skipped on resume
            final.rename(final.with_name(f"{_UNFINISHED}{final.name}-replaced"))
        unfinished.rename(final)
        fsync(self.folder)
        pointer = self.folder / f".{LATEST}"
        pointer.write_text(f"{final.name}\n")
        fsync(pointer)
        pointer.replace(self.folder / LATEST)
        return final

    def retain(self, keep: Retention, newest: int) -> list[Path]:
        """Remove checkpoints beyond `keep`, oldest first; return the removed ones.

        The one of step `newest`, just published, always stays. Damaged ones are neither counted nor
        removed, nor are those of later steps, which were skipped on resume.
        """
        whole: dict[Path, Manifest] = {}
        for path in self.all():
            if path > self.at(newest):
                break
            with contextlib.suppress(Unusable, OSError):
                # Thousands of files are checked once; later, a deleted file changes the mtime.
                changed = path.stat().st_mtime_ns
                is_seen = path == self.at(newest) or self._seen_whole.get(path) == changed
                whole[path] = read_manifest(path, check_sizes=not is_seen)
                self._seen_whole[path] = changed
        stay = {*list(whole)[-max(keep.last, 1) :]}
        if keep.every:
            stay |= {
                path for path, manifest in whole.items() if manifest.state.step % keep.every == 0
            }
        losses = {p: m.held_out_loss for p, m in whole.items() if m.held_out_loss is not None}
        if keep.best and losses:
            stay.add(min(losses, key=lambda path: (losses[path], path)))
        removed = [path for path in whole if path not in stay]
        for path in removed:
            path.rename(path.with_name(f"{_UNFINISHED}{path.name}-removed"))
        self.sweep()  # renamed first, so that a kill leaves nothing that looks complete
        return removed

    def sweep(self) -> None:
        """Remove all unfinished checkpoints."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)  # NFS keeps files that someone has open


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_IGNORED = -100  # label of tokens without loss
_PROBE_KEYS = ("input_ids", "labels", "position_ids", "goes_on")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files match its manifest."""

    path: Path
    manifest: Manifest

    @property
    def state(self) -> TrainState:
        """The progress of the run at the save."""
        return self.manifest.state

    def reader(self) -> Reader:
        """Return a reader of its tensors. Raises Unusable if the index cannot be read."""
        return Reader(self.path, read_index(self.path))

    def probe(self) -> dict[str, torch.Tensor]:
        """Return its probe batch: input_ids, labels, and optionally position_ids and goes_on.

        Each is (samples, seq_len) int64, except goes_on, which is (samples,): 1 if the sample
        continues the text of the previous one. Raises Unusable if they are not a batch of this
        model.
        """
        path = self.path / PROBE
        reader = TensorReader(path)
        keys = [*_PROBE_KEYS[:2], *(key for key in _PROBE_KEYS[2:] if key in reader)]
        tensors = {}
        for key in keys:
            dtype, shape = reader.dtype(key), reader.shape(key)
            wanted = reader.shape(keys[0])
            wanted = wanted[:1] if key == "goes_on" else wanted
            fits = len(reader.shape(keys[0])) == 2 and 0 not in shape and shape == wanted
            if dtype != torch.int64 or not fits:
                raise Unusable(f"{path} holds {key} as {dtype} {list(shape)}, not a batch")
            tensors[key] = torch.empty(shape, dtype=dtype)
            reader.read(key, 0, tensors[key].view(-1))
        vocabulary = self.manifest.model_config.get("vocab_size")
        for key, tensor in tensors.items():
            ids = tensor[tensor != _IGNORED] if key == "labels" else tensor
            end = {"position_ids": tensor.shape[-1], "goes_on": 2}.get(key, vocabulary)
            if not ids.numel() or not isinstance(end, int):
                continue
            if not 0 <= int(ids.min()) <= int(ids.max()) < end:
                raise Unusable(f"{path} holds {key} outside the range 0 to {end - 1}")
        return tensors


def newest_usable(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that verifies, and the problems of newer ones. Collective.

    The ranks share the reading of files. Rank 0 lists the checkpoints, as ranks may see different
    folder contents.
    """
    problems: list[str] = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for path in reversed(broadcast_object(Store(folder).all() if rank == 0 else [])):
        try:
            return verified(path), problems
        except Unusable as error:
            problems.append(str(error))
    return None, problems


def verified(path: Path) -> Checkpoint:
    """Return the checkpoint at `path` after checking sizes, hashes, index and probe. Collective.

    Rank 0 reads the manifest for all ranks; each rank checks its share of the files. Raises
    Unusable on all ranks, and OSError on a rank that cannot read an existing file: the failure may
    be transient, and falling back to an older checkpoint would silently discard steps.
    """
    try:
        return _verified(path)
    except OSError as error:
        again = "start again, and if this comes back, move the checkpoint elsewhere"
        raise OSError(error.errno, f"{error.strerror}: {again}", str(path)) from error


def _verified(path: Path) -> Checkpoint:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    manifest, problem = broadcast_object(_read(path) if rank == 0 else (None, None))
    if manifest is None:
        raise Unusable(problem)
    try:
        mine = [file for file in manifest.files if _writer(file.name) % ranks == rank]
        for file in mine:
            check_size(path, file)
        for file in mine:
            if sha256_of(path / file.name) != file.sha256:
                raise Unusable(f"{path / file.name} is damaged: its SHA-256 has changed")
        if rank == 0:
            check_index(path, manifest)
            if any(file.name == PROBE for file in mine):
                Checkpoint(path, manifest).probe()
    except (Unusable, FileNotFoundError) as error:
        problem = str(error)
    if (problem := first_problem(problem)) is not None:
        raise Unusable(problem)
    return Checkpoint(path, manifest)


def _read(path: Path) -> tuple[Manifest | None, str | None]:
    try:
        return read_manifest(path, check_sizes=False), None
    except Unusable as error:
        return None, str(error)


def is_run(text: str) -> bool:
    """Return True if RUN or RUN@STEP names a folder that contains checkpoints."""
    return bool(text) and bool(Store(run_and_step(text)[0] / "checkpoints").all())


def checkpoint_of(text: str) -> Checkpoint:
    """Return the checkpoint named by RUN or RUN@STEP. Raises Unusable. Collective."""
    run, step = run_and_step(text)
    store = Store(run / "checkpoints")
    if step is not None:
        if not store.at(step).is_dir() and (others := [path.name for path in store.all()]):
            raise Unusable(f"{store.folder} has no step {step}, only {', '.join(others[-9:])}")
        return verified(store.at(step))
    checkpoint, problems = newest_usable(store.folder)
    if checkpoint is None:
        raise Unusable("; ".join(problems) or f"{store.folder} has no checkpoint")
    return checkpoint


def _writer(name: str) -> int:
    """Return the rank that wrote a file. That rank also checks it, because in the same layout it is
    the next to read the file, and then finds it in its node's page cache.
    """
    return int(name[5:10]) if name.startswith("rank-") else 0
