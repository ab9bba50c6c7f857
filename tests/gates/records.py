"""Gates, and their records: the tests that passed, until something they depend on changes."""

from __future__ import annotations

import hashlib
import subprocess
import time
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
KEPT = REPOSITORY / "build" / "gates"
ALWAYS = ("harness", "ds_configs", "tests", "pyproject.toml")
PACKAGES = ("torch", "deepspeed", "transformers")


@dataclass(frozen=True)
class Gate:
    """A row of gates.toml."""

    name: str
    purpose: str
    tests: list[str]
    depends: list[str] = field(default_factory=list)
    only_by_name: bool = False

    def record(self) -> Path:
        """Return the path of the list of tests that passed with the code as it is now."""
        digest = hashlib.sha256("".join(map(version, PACKAGES)).encode())
        listed = ["git", "ls-files", "-z", "-co", "--exclude-standard", *ALWAYS, *self.depends]
        names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, check=True, text=True)
        for name in sorted({*names.stdout.split("\0")} - {""}):
            path = REPOSITORY / name
            if path.is_file():  # a deleted file is listed until the deletion is committed
                digest.update(f"\0{name}\0".encode() + path.read_bytes())
        return KEPT / f"{self.name}-{digest.hexdigest()[:16]}.txt"


def all_gates() -> dict[str, Gate]:
    """Return the gates by name, in the order of gates.toml."""
    rows = tomllib.loads(Path(__file__).with_name("gates.toml").read_text())
    return {name: Gate(name, **row) for name, row in rows.items()}


def passed_tests(record: Path | None) -> set[str]:
    """Return the ids of the tests that a record lists."""
    return {*record.read_text().splitlines()} if record and record.exists() else set()


class Recorder:
    """A pytest plugin. It appends each passed test to the record of its gate, so that interrupted
    gates continue from there, and prints a line per gate.

    Every test carries its gate as the user property "gate".
    """

    def __init__(self, records: dict[str, Path]) -> None:
        self._records = records
        self._kept = {gate: len(passed_tests(record)) for gate, record in records.items()}
        self._phases: dict[str, list[str]] = defaultdict(list)
        self._counts: dict[str, Counter[str]] = {gate: Counter() for gate in records}
        self._seconds: Counter[str] = Counter()
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        gate = dict(report.user_properties).get("gate")
        if gate not in self._records:  # the report of a worker that died names no gate
            return
        phases = self._phases[report.nodeid]
        phases.append(report.outcome)
        self._seconds[gate] += report.duration
        if report.when == "teardown":
            outcome = next((o for o in ("failed", "skipped") if o in phases), "passed")
            self._counts[gate][outcome] += 1
            if outcome == "passed":
                with self._records[gate].open("a") as file:
                    file.write(f"{report.nodeid}\n")
            if outcome == "failed":  # its traceback comes at the end, which may be an hour away
                print(f"\nFAILED {report.nodeid}", flush=True)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        whole = time.monotonic() - self._began
        terminalreporter.write_line(f"\n{self.table()}\n{'in all':45} {_minutes(whole)}")

    def table(self) -> str:
        """Return a table with a line per gate. Workers share the time of the tests."""
        outcomes = ("passed", "kept", "skipped", "failed")
        lines = [f"{'gate':12}" + "".join(f"{o:>8}" for o in outcomes) + "   test time"]
        for gate, counts in self._counts.items():
            numbers = {**counts, "kept": self._kept[gate]}
            line = f"{gate:12}" + "".join(f"{numbers.get(o, 0):8}" for o in outcomes)
            line += f"   {_minutes(self._seconds[gate]):>9}"
            lines.append(line + ("  FAILED" if counts["failed"] else ""))
        return "\n".join(lines)


def _minutes(seconds: float) -> str:
    return "{}:{:02}".format(*divmod(round(seconds), 60))
