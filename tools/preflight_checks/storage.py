"""The run folder's file system: is it the same everywhere, how much is free, how fast is it?"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.store import Store
from harness.estimate.fit import RUNS
from harness.estimate.held import GIB
from harness.plan.plan import Plan
from harness.runfolder import RunFolder
from tools.preflight_checks.report import Row, Verdict, count, slow, span, who

_MIB = 2**20
_WRITTEN_MIB = 64
_SEEN_WITHIN_S = 10.0  # network file systems show new files late
_SLOW_SAVE_S = 300.0


@dataclass(frozen=True)
class Storage:
    """One rank's view of the file system of the run folder."""

    folder: str
    """The run folder, or the nearest folder above it that exists."""
    sees_token: bool = False
    """True if the file that rank 0 made is visible here."""
    free_bytes: int | None = None
    checkpoints: int = 0
    """Those that the run has already."""
    written_bytes_per_s: float | None = None
    """With fsync, while the first ranks of all other nodes write too; None on other ranks."""
    problem: str | None = None


def nearest_folder(plan: Plan) -> Path:
    """Return the run folder, or the folder where it will be made."""
    wished = Path(plan.config.run.dir or RUNS).expanduser().absolute()
    return next(path for path in (wished, *wished.parents) if path.is_dir())


@contextmanager
def token(folder: Path) -> Iterator[str]:
    """A file that all ranks must see; gone afterwards. Its path is told although it cannot be made:
    then nobody sees it, rank 0 neither.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-") as file:
            yield file.name
    except OSError:
        yield str(folder / ".preflight-could-not-be-made")


def measure_storage(plan: Plan, token_path: str, writes: bool) -> Storage:
    """Look at the run folder from this rank; `writes`: whether it also times a file."""
    folder = nearest_folder(plan)
    sees = _appears(Path(token_path))
    run_dir = plan.config.run.dir
    store = Store(RunFolder(run_dir).checkpoints_dir) if run_dir else None
    free, rate, problem = None, None, None
    try:
        free = shutil.disk_usage(folder).free
        # The better of two: what others write in that moment is not the storage's fault.
        rate = max(_write_rate(folder) for _ in range(2)) if writes else None
    except OSError as error:
        problem = f"{folder}: {error.strerror or error}"
    checkpoints = len(store.all()) if store else 0
    return Storage(str(folder), sees, free, checkpoints, rate, problem)


def _appears(path: Path) -> bool:
    until = time.monotonic() + _SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > until or path.name.endswith("could-not-be-made"):
            return False
        time.sleep(0.2)
    return True


def _write_rate(folder: Path) -> float:
    """Bytes a second of a file that no name leads to: nothing is left of it, whatever happens."""
    blocks = [os.urandom(_MIB) for _ in range(8)]  # not to be compressed
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for number in range(_WRITTEN_MIB):
            file.write(blocks[number % len(blocks)])
        file.flush()
        os.fsync(file.fileno())
        return _WRITTEN_MIB * _MIB / (time.perf_counter() - began)


# --- judged on rank 0 ---


def storage_rows(plan: Plan, seen: dict[int, Storage], hosts: Sequence[str]) -> list[Row]:
    """The checks of the run folder; `seen` by rank."""
    return [_same(seen, hosts), _room(plan, seen, hosts), *_writing(plan, seen, hosts)]


def _same(seen: dict[int, Storage], hosts: Sequence[str]) -> Row:
    blind = [rank for rank, storage in seen.items() if not storage.sees_token]
    folder = seen[min(seen)].folder
    if not blind:
        return Row("run folder", "ok", f"{folder} is the same on all nodes")
    if min(seen) in blind:
        text = f"{who([min(seen)], hosts)} cannot make a file in {folder}"
        return Row("run folder", "FAIL", text, "choose a run.dir that this user may write")
    return Row(
        "run folder",
        "FAIL",
        f"what {who([min(seen)], hosts)} wrote in {folder} is not seen on {who(blind, hosts)}",
        "set run.dir to a path on storage that all nodes mount: checkpoints are written by all",
    )


def _room(plan: Plan, seen: dict[int, Storage], hosts: Sequence[str]) -> Row:
    free = {r: s.free_bytes / GIB for r, s in seen.items() if s.free_bytes is not None}
    if not free:
        return Row("room", "warn", "cannot be told", "see what the storage says of its quota")
    text = span(free.values(), "GiB free", ".2f")
    if plan.estimate is None:
        return Row("room", "ok", f"{text}; a checkpoint's size is not known here")
    size = plan.estimate.checkpoint_bytes / GIB
    due = _due(plan, seen[min(seen)].checkpoints)
    text += f"; room is needed for {count(due, 'checkpoint')} of {size:.2f} GiB: {due * size:.2f}"
    few = [rank for rank, room in free.items() if room < due * size]
    if not few:
        return Row("room", "ok", text)
    todo = (
        f"make room, choose another run.dir, or lower save.keep (now {plan.config.save.keep}): a "
        "save writes the new checkpoint before it removes an old one"
    )
    verdict: Verdict = "warn" if plan.config.plan.force else "FAIL"
    return Row("room", verdict, f"{text}; too little for {who(few, hosts)}", todo)


def _due(plan: Plan, there: int) -> int:
    """Checkpoints that the run adds to those that are `there`: what is kept and one more, since a
    save writes the new one before it removes an old one; never more than it saves.
    """
    save = plan.config.save
    most = save.keep + save.keep_best + 1
    if plan.steps is not None:
        most += plan.steps // save.keep_every if save.keep_every else 0
        most = min(most, there + (math.ceil(plan.steps / save.every) if save.every else 1))
    return max(1, most - there)


def _writing(plan: Plan, seen: dict[int, Storage], hosts: Sequence[str]) -> list[Row]:
    problems = {rank: s.problem for rank, s in seen.items() if s.problem}
    if problems:
        listed = "; ".join(dict.fromkeys(problems.values()))
        todo = "make room there, or choose another run.dir: 64 MiB could not be written"
        return [Row("write speed", "FAIL", f"{listed} ({who(problems, hosts)})", todo)]
    rates = {r: s.written_bytes_per_s / _MIB for r, s in seen.items() if s.written_bytes_per_s}
    if not rates:
        return []
    text = span(rates.values(), "MiB/s from each node, all at once", ".0f")
    late = slow(rates)
    if plan.estimate is not None:
        # Each node writes what its ranks hold; the slowest is waited for.
        share = plan.estimate.checkpoint_bytes / len(rates) / _MIB
        seconds = share / min(rates.values())
        text += f": about {seconds:.1f} s for a checkpoint"
        if seconds > _SLOW_SAVE_S and not late:
            todo = "save less often (save.every), in the background (save.async=true), or elsewhere"
            return [Row("write speed", "warn", text, todo)]
    if not late:
        return [Row("write speed", "ok", text)]
    todo = "look at the mount and its network there: every save waits for the slowest node"
    return [Row("write speed", "warn", f"{text}; slow: {who(late, hosts)}", todo)]
