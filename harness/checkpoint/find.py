"""Finds the checkpoint to resume: the newest one that verifies byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness.checkpoint.files import sha256_of
from harness.checkpoint.manifest import (
    PROBE,
    Manifest,
    TrainState,
    check_index,
    check_size,
    read_index,
    read_manifest,
)
from harness.checkpoint.meeting import first_problem, told
from harness.checkpoint.reader import Reader
from harness.checkpoint.store import Store
from harness.checkpoint.tensor_file import TensorReader
from harness.config.run_config import run_and_step
from harness.errors import Unusable

_IGNORED = -100  # among labels
_PROBE_KEYS = ("input_ids", "labels", "position_ids", "goes_on")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with files that match its manifest."""

    path: Path
    manifest: Manifest

    @property
    def state(self) -> TrainState:
        """The progress of the run when it was saved."""
        return self.manifest.state

    def reader(self) -> Reader:
        """Return a reader of its tensors. Raises Unusable if its index cannot be read."""
        return Reader(self.path, read_index(self.path))

    def probe(self) -> dict[str, torch.Tensor]:
        """Return its probe batch: input_ids, labels, perhaps position_ids, perhaps goes_on.

        Each is (samples, seq_len) int64; goes_on (samples,): 1 where the text of the sample before
        goes on. Raises Unusable if they are no batch of this model.
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
                raise Unusable(f"{path} holds {key} as {dtype} {list(shape)}, which is no batch")
            tensors[key] = torch.empty(shape, dtype=dtype)
            reader.read(key, 0, tensors[key].view(-1))
        vocabulary = self.manifest.model_config.get("vocab_size")
        for key, tensor in tensors.items():
            ids = tensor[tensor != _IGNORED] if key == "labels" else tensor
            end = {"position_ids": tensor.shape[-1], "goes_on": 2}.get(key, vocabulary)
            if not ids.numel() or not isinstance(end, int):
                continue
            if not 0 <= int(ids.min()) <= int(ids.max()) < end:
                raise Unusable(f"{path} holds {key} that are not all from 0 to {end - 1}")
        return tensors


def newest_usable(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that verifies, and the problems of newer ones. Collective.

    The files are read by all ranks, each its share; rank 0 names them, as folders may be seen
    differently.
    """
    problems: list[str] = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for path in reversed(told(Store(folder).all() if rank == 0 else [])):
        try:
            return verified(path), problems
        except Unusable as error:
            problems.append(str(error))
    return None, problems


def verified(path: Path) -> Checkpoint:
    """Return the checkpoint at `path` after checking sizes, hashes, index and probe. Collective.

    Rank 0 reads the manifest for all; each rank looks at the files of its number alone, however
    many there are. Raises Unusable on all of them.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    manifest, problem = told(_read(path) if rank == 0 else (None, None))
    if manifest is None:
        raise Unusable(problem)
    try:
        mine = [file for file in manifest.files if _writer(file.name) % ranks == rank]
        for file in mine:
            check_size(path, file)
        for file in mine:
            if sha256_of(path / file.name) != file.sha256:
                raise Unusable(f"{path / file.name} is damaged: its SHA-256 is not the manifest's")
        if rank == 0:
            check_index(path, manifest)
            if any(file.name == PROBE for file in mine):
                Checkpoint(path, manifest).probe()
    except (Unusable, OSError) as error:
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
    """Return True if RUN or RUN@STEP names a folder with checkpoints of the harness."""
    return bool(text) and bool(Store(run_and_step(text)[0] / "checkpoints").all())


def checkpoint_of(text: str) -> Checkpoint:
    """Return the checkpoint that RUN or RUN@STEP names. Raises Unusable. Collective."""
    run, step = run_and_step(text)
    store = Store(run / "checkpoints")
    if step is not None:
        if not store.at(step).is_dir() and (others := [path.name for path in store.all()]):
            raise Unusable(f"{store.folder} holds no step {step}, but {', '.join(others[-9:])}")
        return verified(store.at(step))
    checkpoint, problems = newest_usable(store.folder)
    if checkpoint is None:
        raise Unusable("; ".join(problems) or f"{store.folder} holds no checkpoint")
    return checkpoint


def _writer(name: str) -> int:
    """Return the rank that wrote a file, which checks it, too: on the same layout it reads the file
    next, and its node then has it in memory.
    """
    return int(name[5:10]) if name.startswith("rank-") else 0
