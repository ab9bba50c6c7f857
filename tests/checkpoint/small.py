"""Checkpoints of one process, without an engine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from harness.checkpoint import save as saving
from harness.checkpoint.index import to_index
from harness.checkpoint.manifest import Manifest, TrainState
from harness.checkpoint.save import Saved, Saver
from harness.checkpoint.store import Retention, Store
from harness.checkpoint.tensor_file import Fragment, write_fragments
from harness.layout.box import Part

PROBE = {"input_ids": torch.arange(4).view(1, 4), "labels": torch.full((1, 4), -100)}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return parameters of awkward sizes."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"embed": (13, 7), "norm": (7,), "scale": ()}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def fragments(seed: int = 0) -> list[Fragment]:
    """Return the whole of every parameter, with a moment."""
    return [
        Fragment(name, Part.of(t.shape), 0, {"weight": t.view(-1), "exp_avg": 2 * t.view(-1)})
        for name, t in weights(seed).items()
    ]


def put(content: dict[str, Any], key: str, value: object) -> None:
    """Set the value of a dotted key; numbers index lists."""
    place: Any = content
    *way, last = [int(word) if word.isdigit() else word for word in key.split(".")]
    for word in way:
        place = place[word]
    place[last] = value


def manifest(step: int, held_out_loss: float | None = None) -> Manifest:
    return Manifest(
        state=TrainState(step, 8 * step, 64 * step),
        precision="fp32",
        model_config={"model_type": "llama", "vocab_size": 8},
        data_fingerprint="abc",
        engine={"counters": {"skipped_steps": 1}, "loss_scaling": {}, "optimizer": {"step": 3.0}},
        probe_loss=1.5,
        held_out_loss=held_out_loss,
        about={"world_size": 1},
    )


def save(
    folder: Path,
    step: int,
    keep: Retention | None = None,
    held_out_loss: float | None = None,
    before_publishing: Callable[[], None] = lambda: None,
) -> Saved:
    """Save a checkpoint of `fragments(step)`."""
    saver = Saver(Store(folder), 0, keep or Retention(), before_publishing)
    saver.start(manifest(step, held_out_loss), fragments(step), PROBE, background=False)
    return saver.finish()


def save_of_ranks(folder: Path, step: int, by_rank: Sequence[Fragment]) -> Path:
    """Save a checkpoint to which each rank contributes a fragment."""
    saver, reports = Saver(Store(folder), 0, Retention()), []
    saver.start(manifest(step), by_rank[:1], PROBE, background=False)
    for rank, fragment in enumerate(by_rank[1:], 1):
        files, entries = write_fragments(saver.store.unfinished(step), rank, [fragment])
        reports.append((files, to_index(entries), None))
    with mock.patch.object(saving, "gather_objects", lambda own: [own, *reports]):
        return saver.finish().path
