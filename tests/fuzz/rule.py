"""The rule that every input is held to, whatever is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.errors import ExitCode
from tests.fuzz.case import SECRET, Case, Place
from tools.proofs.zygote import OVERRAN, Outcome

TRACEBACK, HANG, EXECUTED = "traceback", "hang", "executed"
CODE, WRITTEN, LEAKED, NOT_ACCEPTED = "exit code", "written", "leaked", "not accepted"
NOT_MADE = "not made"
_SIGNS = (
    "Traceback (most recent call last)",
    "Fatal Python error",
    "Exception ignored in",
    "panicked at",
    "terminate called",
)
# What may be filled before an input turns out to be wrong.
_CACHES = ("cache", "home", ".cache", "new cache")

Files = dict[str, tuple[int, int, int]]
"""By path within an input's folder: mode, size and time of change; of folders the mode alone."""


@dataclass(frozen=True)
class Fault:
    """A fault in the end of an input. `kind`: one of the names above."""

    kind: str
    message: str


def files_in(folder: Path) -> Files:
    """All files and folders of an input, links not followed."""
    table = {}
    for path in folder.rglob("*"):
        about = path.lstat()
        is_folder = path.is_dir() and not path.is_symlink()
        size, time = (0, 0) if is_folder else (about.st_size, about.st_mtime_ns)
        table[str(path.relative_to(folder))] = (about.st_mode, size, time)
    return table


def faults_of(case: Case, place: Place, before: Files, outcome: Outcome) -> list[Fault]:
    """Everything that the rule forbids."""
    (code,) = outcome.codes
    faults = []
    after = files_in(place.folder)
    if code in (None, -OVERRAN):
        faults.append(Fault(HANG, f"not ended after {outcome.seconds[0]:.0f} s"))
    elif signs := [sign for sign in _SIGNS if sign in outcome.output]:
        faults.append(Fault(TRACEBACK, f"code {code}, {signs[0]}: {_last_line(outcome.output)}"))
    elif code not in {*ExitCode}:
        faults.append(Fault(CODE, f"code {code}: {_last_line(outcome.output)}"))
    elif case.valid and code != 0:
        faults.append(Fault(NOT_ACCEPTED, f"code {code}: {_last_line(outcome.output)}"))
    if place.marker.exists():
        faults.append(Fault(EXECUTED, f"{place.marker.name} was created"))
    changed = sorted(
        path
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path) and not path.startswith(_CACHES)
    )
    if changed and (code == ExitCode.BAD_CONFIG or (code == 0 and "--dry-run" in case.argv)):
        faults.append(Fault(WRITTEN, f"code {code}, but {', '.join(changed[:3])}"))
    if leaks := [path for path in changed if _holds_secret(place.folder / path)]:
        faults.append(Fault(LEAKED, f"{leaks[0]} has what only {place.folder.name} should hold"))
    return faults


def _holds_secret(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes()


def _last_line(output: str) -> str:
    lines = output.strip().splitlines() or [""]
    return lines[-1][:300]
