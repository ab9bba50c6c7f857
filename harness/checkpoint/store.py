"""Checkpoints of one run folder: written beside, renamed when whole, found again, swept."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STATE_FILE = "state.json"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class TrainState:
    """How far a run is. Everything else about the next step follows from it and the plan."""

    step: int = 0  # optimizer steps taken, skipped ones included
    samples: int = 0  # samples consumed, over all ranks
    tokens: int = 0  # the same in tokens

    def after(self, samples: int, seq_len: int) -> TrainState:
        """The state after one more step on `samples` sequences of `seq_len` tokens."""
        return TrainState(self.step + 1, self.samples + samples, self.tokens + samples * seq_len)


class CheckpointStore:
    """The checkpoints under one folder. Every rank makes one; rank 0 alone moves and removes.

    A checkpoint is a folder `step-00000100` that appears by one rename after everything in it is
    on disk: what has that name is whole.
    """

    def __init__(
        self, folder: Path, rank: int, barrier: Callable[[], None], layout: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.barrier = barrier
        self.layout = layout  # what a resumed run must have in common with the saved one

    def save(self, state: TrainState, save_engine: Callable[[str], None], keep: int) -> Path:
        """Save at a step boundary; collective. Keeps the newest `keep` checkpoints."""
        final = self.folder / f"step-{state.step:08d}"
        unfinished = self.folder / f".unfinished-{final.name}"
        if self.rank == 0:
            self._sweep()
            unfinished.mkdir(parents=True)
        self.barrier()
        save_engine(str(unfinished))
        self.barrier()
        if self.rank == 0:
            content = {"state": asdict(state), "layout": self.layout}
            (unfinished / STATE_FILE).write_text(json.dumps(content, indent=1))
            _flush_to_disk(unfinished)
            if final.exists():
                shutil.rmtree(final)
            unfinished.rename(final)
            _fsync(self.folder)
            for old in self.all()[:-keep]:
                shutil.rmtree(old)
        self.barrier()
        return final

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def newest(self) -> tuple[Path, TrainState] | None:
        """The newest checkpoint and its state, None when there is none.

        Raises ValueError when it was saved on another layout.
        """
        found = self.all()
        if not found:
            return None
        content = json.loads((found[-1] / STATE_FILE).read_text())
        differing = [
            f"{key} was {content['layout'].get(key)}, is {value}"
            for key, value in self.layout.items()
            if content["layout"].get(key) != value
        ]
        if differing:
            raise ValueError(
                f"{found[-1]} was saved on another layout ({'; '.join(differing)}); "
                "resume it on the layout that it was saved on"
            )
        return found[-1], TrainState(**content["state"])

    def _sweep(self) -> None:
        """Remove what killed saves left behind."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(".unfinished-*"):
            shutil.rmtree(path)


def _flush_to_disk(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
