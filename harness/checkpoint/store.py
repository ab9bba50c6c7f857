"""The checkpoints under one folder: their names, publishing, retention, removal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.manifest import Manifest, checkpoint_name, read_manifest
from harness.errors import Unusable

_NAME = re.compile(r"step-[0-9]{8}")
_UNFINISHED = ".unfinished-"
LATEST = "latest"


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep: the newest `last`, those at multiples of `every` steps (0: none)
    and, if `best`, the one of the lowest held-out loss.
    """

    last: int = 3
    every: int = 0
    best: bool = False


class Store:
    """One rank writes, moves and removes; everybody may look.

    A checkpoint is a folder `step-00000100` that appears by one rename after everything in it is on
    disk, its manifest last. `latest` names the newest one, for people and scripts; the
    harness does not read it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen_whole: dict[Path, int] = {}  # when what they hold last changed, in ns

    def all(self) -> list[Path]:
        """Return the folders that are named like checkpoints, oldest first; links are left out."""
        if not self.folder.is_dir():
            return []
        return sorted(
            path
            for path in self.folder.iterdir()
            if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        )

    def at(self, step: int) -> Path:
        """Return the path of a step's checkpoint, which need not exist."""
        return self.folder / checkpoint_name(step)

    def unfinished(self, step: int) -> Path:
        """Return the path of a step's checkpoint until it is published."""
        return self.folder / f"{_UNFINISHED}{self.at(step).name}"

    def make_unfinished(self, step: int) -> None:
        """Remove leftovers of killed saves, and make the folder of this one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sweep()
        self.unfinished(step).mkdir()

    def free_bytes(self) -> int:
        """Return the free bytes of the file system."""
        return shutil.disk_usage(self.folder).free

    def publish(self, step: int) -> Path:
        """Give a finished checkpoint its name, durably."""
        final, unfinished = self.at(step), self.unfinished(step)
        fsync(unfinished)
        if final.exists():  # a damaged one that the run fell back from
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

        The one of step `newest`, just published, always stays. One that lost a file is neither
        counted nor removed, nor is one of a later step: the run fell back from it.
        """
        whole: dict[Path, Manifest] = {}
        for path in self.all():
            if path > self.at(newest):
                break
            with contextlib.suppress(Unusable):
                # Files are looked at once, as there may be thousands; then a name that goes shows.
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
        self.sweep()  # a kill on the way leaves nothing that looks whole
        return removed

    def sweep(self) -> None:
        """Remove all unfinished checkpoints."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
