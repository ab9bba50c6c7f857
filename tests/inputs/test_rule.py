"""Violations of the rule are detected."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.inputs.rule import Case, Inputs, Place, tried


def main(argv: list[str]) -> int:
    """Violate the rule as the first argument says; the second is the file to create."""
    how, target = argv
    if how == "raise":
        raise RuntimeError("planted")
    if how == "wait":
        time.sleep(3600)
    if how == "executed":
        Path(target).touch()
    if how == "written":
        Path("left behind").touch()
        print("cannot train: planted", file=sys.stderr)
        return 2
    if how == "leaked":
        Path("copy").write_bytes(Path("secret.txt").read_bytes())
    if how == "memory":
        return len([bytes(2**20) for _ in range(2**20)])
    if how == "last words":
        raise SystemExit("planted")
    return 3 if how == "code 3" else 2 if how == "refused" else 0


@pytest.mark.parametrize(
    ("how", "fault", "output"),
    [
        ("raise", "traceback", "RuntimeError: planted"),
        ("memory", "traceback", "MemoryError"),
        ("wait", "hang", "test_rule.py"),  # where it waited
        ("executed", "executed", ""),
        ("written", "written", "planted"),
        ("leaked", "leaked", ""),
        ("code 3", "exit code", ""),
        ("last words", "exit code", "planted"),
        ("refused", "not accepted", ""),
    ],
)
def test_a_broken_rule_is_reported(
    inputs: Inputs, tmp_path: Path, how: str, fault: str, output: str
) -> None:
    place = Place(tmp_path / "input", inputs.base)
    place.folder.mkdir()
    place.secret()
    argv = [how, str(place.marker)]
    case = Case(argv, how, main="tests.inputs.test_rule", valid=how == "refused")
    outcome, faults = tried(inputs.zygote, case, place, limit_s=4)
    assert [*faults] == [fault], outcome.output
    assert output in outcome.output
