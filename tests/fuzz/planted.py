"""Programs that break the rule, each in one way."""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main(argv: list[str]) -> int:
    """Break the rule as the first argument says; the second is what to create."""
    how, target = argv
    if how == "traceback":
        raise RuntimeError("planted")
    if how == "wait":
        time.sleep(3600)
    if how == "compute":
        while True:
            pass
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
    return 3 if how == "exit code" else 0
