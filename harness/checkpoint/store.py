"""The checkpoints of a run: publishes, verifies, finds and removes them."""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.collectives import broadcast_object, first_problem, rank_and_ranks
from harness.checkpoint.manifest import (
    PROBE,
    Checkpoint,
    Manifest,
    check_index,
    check_size,
    checkpoint_name,
    read_manifest,
    sha256_of,
)
from harness.config.run_config import run_and_step, run_instead
from harness.errors import Unusable
from harness.files.paths import near_path, script
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


def newest_usable(folder: Path, in_full: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that verifies (`verified`), and the problems of newer ones.
    Collective.

    The ranks share the reading of files. Rank 0 lists the checkpoints, as ranks may see different
    folder contents.
    """
    problems: list[str] = []
    is_first = rank_and_ranks()[0] == 0
    for path in reversed(broadcast_object(Store(folder).all() if is_first else [])):
        try:
            return verified(path, in_full), problems
        except Unusable as error:
            problems.append(str(error))
    return None, problems


def verified(path: Path, in_full: bool = True) -> Checkpoint:
    """Return the checkpoint at `path` after checking sizes and index and, if `in_full`, hashes and
    probe, for which all files are read. Collective.

    Rank 0 reads the manifest for all ranks; each rank checks its share of the files. Raises
    Unusable on all ranks, and OSError on a rank that cannot read an existing file: the failure may
    be transient, and falling back to an older checkpoint would silently discard steps.
    """
    try:
        return _verified(path, in_full)
    except OSError as error:
        again = "start again, and if this comes back, move the checkpoint elsewhere"
        raise OSError(error.errno, f"{error.strerror}: {again}", str(path)) from error


def _verified(path: Path, in_full: bool) -> Checkpoint:
    rank, ranks = rank_and_ranks()
    manifest, problem = broadcast_object(_read(path) if rank == 0 else (None, None))
    if manifest is None:
        raise Unusable(problem)
    try:
        mine = [file for file in manifest.files if _writer(file.name) % ranks == rank]
        for file in mine:
            check_size(path, file)
        for file in mine if in_full else ():
            if sha256_of(path / file.name) != file.sha256:
                raise Unusable(f"{path / file.name} is damaged: its SHA-256 has changed")
        if rank == 0:
            check_index(path, manifest)
            if in_full and any(file.name == PROBE for file in mine):
                from harness.checkpoint.reader import read_probe  # imports torch

                read_probe(Checkpoint(path, manifest))
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


def checkpoint_of(text: str, in_full: bool = True) -> Checkpoint:
    """Return the checkpoint named by RUN or RUN@STEP, verified. Raises Unusable. Collective."""
    run, step = run_and_step(text)
    store = Store(run / "checkpoints")
    is_first = rank_and_ranks()[0] == 0
    if problem := broadcast_object(_not_there(run, step, store) if is_first else None):
        raise Unusable(problem)
    if step is not None:
        return verified(store.at(step), in_full)
    checkpoint, problems = newest_usable(store.folder, in_full)
    if checkpoint is None:
        raise Unusable(f"{'; '.join(problems)}: {RESTORE}")
    return checkpoint


RESTORE = "none of its checkpoints is whole: restore the files of one from a copy"


def _not_there(run: Path, step: int | None, store: Store) -> str | None:
    """Return why a run has no such checkpoint and what to write instead; None if it has one."""
    saved = store.all()
    if step is not None and store.at(step).is_dir():
        return None
    if saved:
        names = ", ".join(path.name for path in saved[-9:])
        newest = int(saved[-1].name.removeprefix("step-"))
        missing = f"{store.folder} has no step {step}, only {names}: write {run}@{newest}"
        return missing if step is not None else None
    problem = f"{store.folder} has no checkpoint"
    if instead := run_instead(run):
        return f"{problem}: write {instead}"
    if not run.is_dir():
        near = near_path(run)
        hint = f"; did you mean {near}?" if near is not None and near.is_dir() else ""
        return f"{problem}: there is no folder {run}{hint}"
    if any(any(run.glob(name)) for name in ("global_step*", "checkpoint-*", "*_states.pt")):
        command = f"python {script('tools/import_checkpoint.py')} {run} --out runs/NEW"
        model = "" if any(run.rglob("config.json")) else " --model MODEL"
        return f"{problem} of this harness: import it, {command}{model}, and write runs/NEW"
    if (run / "config.json").is_file():
        return f"{problem}, but weights: set model.init_from={run} to start a new run with them"
    return problem


def _writer(name: str) -> int:
    """Return the rank that wrote a file. That rank also checks it, because in the same layout it is
    the next to read the file, and then finds it in its node's page cache.
    """
    return int(name[5:10]) if name.startswith("rank-") else 0
