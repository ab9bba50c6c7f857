"""Run the gates, and print one table of results.

    python -m tests.gates                  # all; if stopped, it continues where it was
    python -m tests.gates faults slurm     # only these
    python -m tests.gates --again parity   # even if a result is kept

A result is kept in build/gates as long as nothing that it depends on changes.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from harness.terminal import HelpFormatter

REPOSITORY = Path(__file__).resolve().parents[2]
KEPT = REPOSITORY / "build" / "gates"
ALWAYS = ("harness", "ds_configs", "tests", "pyproject.toml")
PACKAGES = ("torch", "deepspeed", "transformers")
NOTHING_LEFT = 5  # pytest's exit code if no test was selected


@dataclass(frozen=True)
class Gate:
    """A row of gates.toml."""

    name: str
    purpose: str
    tests: list[str]
    depends: list[str] = field(default_factory=list)

    def record(self) -> Path:
        """Return the path of the record of tests that passed with the code as it is now."""
        digest = hashlib.sha256("".join(map(version, PACKAGES)).encode())
        listed = ["git", "ls-files", "-z", "-co", "--exclude-standard", *ALWAYS, *self.depends]
        names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, check=True, text=True)
        for name in sorted({*names.stdout.split("\0")} - {""}):
            path = REPOSITORY / name
            if path.is_file():  # a deleted file is listed until the deletion is committed
                digest.update(f"\0{name}\0".encode() + path.read_bytes())
        return KEPT / f"{self.name}-{digest.hexdigest()[:16]}.txt"


@dataclass(frozen=True)
class Result:
    """Number of tests of a gate by outcome."""

    gate: str
    passed: int
    kept: int
    skipped: int
    failed: int
    seconds: float
    is_green: bool


def run_gate(gate: Gate, again: bool, workers: int = 2) -> Result:
    """Run the tests of a gate that have not passed yet; with `again`, all of them."""
    record = gate.record()
    for stale in KEPT.glob(f"{gate.name}-*.txt"):
        if again or stale != record:
            stale.unlink()
    kept = len(record.read_text().splitlines()) if record.exists() else 0
    print(f"\n{gate.name}: {gate.purpose}" + (f" ({kept} kept)" if kept else ""), flush=True)
    report = KEPT / f"{gate.name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", f"-n{workers}", f"--gate={gate.name}"]
    command += [f"--record={record}", f"--junitxml={report}", *gate.tests]
    began = time.monotonic()
    code = exit_code_of(command)
    seconds = time.monotonic() - began
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    if report.exists():
        suite = ElementTree.parse(report).getroot()[0]
        counts = {name: int(suite.attrib[name]) for name in counts}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    is_green = code == 0 or (code == NOTHING_LEFT and kept > 0)
    return Result(gate.name, passed, kept, counts["skipped"], failed, seconds, is_green)


def exit_code_of(command: list[str]) -> int:
    """Run pytest. After Ctrl-C, which it received, too, wait until its fixtures have cleaned up."""
    process = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def table(results: list[Result]) -> str:
    """Return a table with a line per gate."""
    lines = [f"{'gate':12} {'passed':>7} {'kept':>6} {'skipped':>8} {'failed':>7} {'time':>7}"]
    for result in results:
        minutes, seconds = divmod(round(result.seconds), 60)
        line = f"{result.gate:12} {result.passed:7} {result.kept:6} {result.skipped:8}"
        line += f" {result.failed:7} {minutes:4}:{seconds:02}"
        lines.append(line + ("" if result.is_green else "  FAILED"))
    return "\n".join(lines)


def main() -> int:
    """Run the command; return its exit code."""
    rows = tomllib.loads(Path(__file__).with_name("gates.toml").read_text())
    gates = {name: Gate(name, **row) for name, row in rows.items()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("gates", nargs="*", metavar="GATE", help=f"one of {', '.join(gates)}")
    parser.add_argument("--again", action="store_true", help="also what has passed already")
    args = parser.parse_args()
    if unknown := [name for name in args.gates if name not in gates]:
        parser.error(f"no such gate: {', '.join(unknown)}; there are {', '.join(gates)}")
    KEPT.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    try:
        for name in args.gates or gates:
            results.append(run_gate(gates[name], args.again))
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here")
        return 130
    finally:
        print(f"\n{table(results)}")
    return 0 if all(result.is_green for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
