"""Reads the runs below one folder. It never writes, and follows no link out of the folder."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from harness.report.lines import number
from harness.report.run_record import RunRecord, read, values_of

_DEPTH = 3
"""Depth of folders below the root; deep enough for the trials of sweeps."""
_MOST_RUNS = 500
_MOST_FOLDERS = 5_000
_RECORDS = ("plan.json", "status.json", "metrics.jsonl", "events.jsonl")
_LOGS = (".log", ".out", ".err", ".txt")
_LOG_BYTES = 6_000
_MOST_LOGS = 24
_roots = [Path("runs")]


def read_runs_of(root: Path) -> None:
    """Set the folder whose runs are read."""
    _roots[0] = root


def names() -> list[str]:
    """Return the runs' paths below the root, newest first."""
    aged = [(_age(folder), str(folder.relative_to(_roots[0]))) for folder in _folders()]
    return [name for _, name in sorted(aged)[:_MOST_RUNS]]


def _folders() -> Iterator[Path]:
    """Yield the folders below the root that contain records of a run; follow no links."""
    waiting, seen = [(_roots[0], 0)], 0
    while waiting:
        folder, depth = waiting.pop()
        try:
            inside = sorted(path for path in folder.iterdir() if path.is_dir())
        except OSError:
            continue
        for path in inside:
            seen += 1
            if seen > _MOST_FOLDERS:
                return
            if path.is_symlink() or path.name.startswith("."):
                continue
            if any((path / name).exists() for name in _RECORDS):
                yield path
            elif depth + 1 < _DEPTH:
                waiting.append((path, depth + 1))


def _age(folder: Path) -> float:
    """Return the seconds since a record of a run last changed."""
    return time.time() - max(_stamp(folder / name)[0] for name in _RECORDS) / 1e9


@dataclass(frozen=True)
class Run:
    """One run: its path below the root, its records, and the seconds since they last changed."""

    name: str
    records: RunRecord
    age_s: float

    def values(self, key: str) -> list[float]:
        """Return the finite values of a metric."""
        return [value for _, value in values_of(self.records.lines, key)]

    def last(self, key: str) -> float | None:
        """Return the last finite value of a metric."""
        values = (number(line.get(key)) for line in reversed(self.records.lines))
        return next((value for value in values if value is not None), None)


def read_run(name: str) -> Run | None:
    """Return the run with this name; None if it is not one of `names`."""
    if name not in names():
        return None
    path = _roots[0] / name
    stamps = tuple(_stamp(path / record) for record in _RECORDS)
    return Run(name, _read(path.resolve(), _roots[0].resolve(), stamps), _age(path))


def _stamp(path: Path) -> tuple[int, int]:
    """Return the time of a file's last change, in ns, and its size; both 0 if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=64)
def _read(path: Path, root: Path, _stamps: object) -> RunRecord:
    """Return the records of a run; if a link leads out of the root, only a problem that says so."""
    leaving = [name for name in _RECORDS if not (path / name).resolve().is_relative_to(root)]
    if leaving:
        why = "is a link that leads out of the folder of runs"
        return RunRecord(path, path.name, problems=[f"{name} {why}" for name in leaving])
    run = read(path)
    run.problems = [problem.replace(f"{root}/", "") for problem in run.problems]
    return run


def logs(name: str) -> list[tuple[str, str]]:
    """Return (file, end of its text) for a run's logs and heartbeats; empty if not in `names`."""
    if name not in names():
        return []
    folder, root = _roots[0] / name, _roots[0].resolve()
    texts = []
    files = [*folder.glob("*"), *folder.glob("logs/*"), *folder.glob("heartbeats/*")]
    for path in sorted(files):
        is_log = path.suffix in _LOGS or path.parent.name == "heartbeats"
        if not is_log or not path.is_file() or not path.resolve().is_relative_to(root):
            continue
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LOG_BYTES))
                text = file.read(_LOG_BYTES).decode("utf-8", "replace")
        except OSError:
            continue
        texts.append((str(path.relative_to(folder)), text))
    return texts[:_MOST_LOGS]
