"""Run the gates in one session of tests, and print one table of results.

    python -m tests.gates                  # all but those run only by name; continues where stopped
    python -m tests.gates faults slurm     # only these
    python -m tests.gates --again parity   # even if a result is kept

A result is kept in build/gates as long as nothing that it depends on changes.
"""

import argparse
import os
import signal
import subprocess
import sys
from functools import partial

from harness.launch.ranks import follow
from harness.terminal import HelpFormatter
from tests.gates.records import KEPT, REPOSITORY, Gate, all_gates, passed_tests

# On two cores: one computes while another waits, for Slurm or for a watchdog.
WORKERS = 3


def run_gates(gates: list[Gate], again: bool = False, workers: int = WORKERS) -> int:
    """Run the tests of gates that have not passed yet; with `again`, all. Return the exit code."""
    records = {gate.name: gate.record() for gate in gates}
    for name, record in records.items():
        for stale in record.parent.glob(f"{name}-*.txt"):
            if again or stale != record:
                stale.unlink()
    for gate in gates:
        print(f"{gate.name:12} {gate.purpose}", flush=True)
    options = [f"--gate={name}={record}" for name, record in records.items()]
    files = dict.fromkeys(path for gate in gates for path in gate.tests)
    code = exit_code_of([sys.executable, "-m", "pytest", "-q", f"-n{workers}", *options, *files])
    nothing_left = code == 5 and all(map(passed_tests, records.values()))
    return 0 if nothing_left else code


def exit_code_of(command: list[str]) -> int:
    """Run pytest. After Ctrl-C, which it received, too, wait until its fixtures have cleaned up."""
    killed = partial(follow, os.getpid(), signal.SIGINT)  # if this process is, pytest cleans up
    process = subprocess.Popen(command, cwd=REPOSITORY, preexec_fn=killed)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def main() -> int:
    """Run the command; return its exit code."""
    gates = all_gates()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("gates", nargs="*", metavar="GATE", help=f"one of {', '.join(gates)}")
    parser.add_argument("--again", action="store_true", help="also what has passed already")
    args = parser.parse_args()
    if unknown := [name for name in args.gates if name not in gates]:
        parser.error(f"no such gate: {', '.join(unknown)}; there are {', '.join(gates)}")
    KEPT.mkdir(parents=True, exist_ok=True)
    chosen = args.gates or [name for name, gate in gates.items() if not gate.only_by_name]
    try:
        return run_gates([gates[name] for name in chosen], args.again)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here")
        return 130


if __name__ == "__main__":
    sys.exit(main())
