"""Make small changes to harness/ and tools/, one at a time, and see whether a test fails.

    python -m tests.gates.mutants              # continues where it stopped
    python -m tests.gates.mutants --survivors  # those that survived run again
    python -m tests.gates.mutants --rooms harness/data tools/cluster

The changes are made in build/mutants/tree, a copy of the last commit. The tests that execute the
changed line run, those of its folder first, until one fails. A survivor needs a test, or a row of
equivalent.toml that states why nobody could notice. The exit code is 1 below 90 % caught, or 80 %
in a room.
"""

import argparse
import contextlib
import importlib
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from itertools import accumulate, islice, zip_longest
from pathlib import Path

import pytest
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

from tests.gates.mutants.covering import tests_by_line, trace
from tests.gates.mutants.draw import draw, quotas, room_of, rooms

REPOSITORY = Path(__file__).resolve().parents[3]
HOME = REPOSITORY / "build" / "mutants"
TREE, SCRATCH, OUTPUT, TRACED = (HOME / name for name in ("tree", "tmp", "output", "traced.json"))
EQUIVALENT = "tests/gates/mutants/equivalent.toml"
GOAL, ROOM_GOAL = 0.9, 0.8
# Seconds of tests per change, as they took when traced; the longer ones are left out.
MOST_TEST_S = 60.0
LIMIT_S = 300.0  # a change that never ends counts as caught
_MOST_BYTES = 8 * 2**30


def git(*arguments: str, folder: Path = REPOSITORY) -> list[str]:
    """Return the lines that a git command prints."""
    return subprocess.check_output(["git", *arguments], cwd=folder, text=True).splitlines()


def enter_copy() -> None:
    """Check out the last commit in the copy, and work there from now on."""
    if not TREE.exists():
        git("clone", "--quiet", "--shared", "--no-checkout", ".", str(TREE))
        (TREE / ".venv").symlink_to((REPOSITORY / ".venv").resolve())
    git("checkout", "--quiet", "--force", "--detach", *git("rev-parse", "HEAD"), folder=TREE)
    git("clean", "--quiet", "-d", "--force", folder=TREE)
    os.chdir(TREE)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(SCRATCH)}
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # the gate's own test
    SCRATCH.mkdir(exist_ok=True)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(TREE), *(path for path in sys.path if path not in ("", str(REPOSITORY)))]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]


def trace_tests() -> dict[str, float]:
    """Trace the test files that are new or have changed since they were traced, a folder at a time.
    Return the seconds of each test that passes.
    """
    # By file, as git lists it with its checksum.
    traced: dict[str, dict[str, float]] = json.loads(TRACED.read_text()) if TRACED.exists() else {}
    files = git("ls-files", "-s", "tests/*/test_*.py", "tests/test_*.py", folder=TREE)
    folders: dict[str, dict[str, str]] = defaultdict(dict)
    for file in files:
        name = file.partition("\t")[2]
        if file not in traced:
            folders[room_of(name)][name] = file
    for number, (folder, names) in enumerate(folders.items(), 1):
        print(f"tracing {number}/{len(folders)}: {len(names)} files of {folder}", flush=True)
        seconds = trace(TREE, HOME, [*names])
        for name, file in names.items():
            traced[file] = {t: s for t, s in seconds.items() if t.partition("::")[0] == name}
        TRACED.write_text(json.dumps(traced))
    return {test: s for file in files for test, s in traced[file].items() if s < math.inf}


def tests_of(change: MutationSpec, seconds: dict[str, float]) -> list[str]:
    """Return the tests to run, nearest first: those that execute the line; for a line that runs
    during imports, those that execute a line of the file.
    """
    file = change.module_path.relative_to(TREE)
    near = [*(f"tests/{part}/" for part in file.parts[1:-1]), f"test_{file.stem}"]
    lines = tests_by_line(change.module_path, HOME)
    executed = [lines.get(n, set()) for n in range(change.start_pos[0], change.end_pos[0] + 1)]
    chosen = set().union(*executed) & seconds.keys() or set().union(*lines.values())
    tests = sorted(
        chosen & seconds.keys(), key=lambda t: (not any(n in t for n in near), seconds[t], t)
    )
    spent = [*accumulate(seconds[test] for test in tests)]
    return tests[: max(1, sum(total <= MOST_TEST_S for total in spent))]


def run_tests(tests: list[str], limit_s: float) -> int | None:
    """Run tests in a fork of this process, which has imported the large packages. Return pytest's
    exit code, or None after `limit_s`. Not by harness/launch: the change may be in it.
    """
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(exist_ok=True)  # a process of the last change may still write
    options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=short", f"--basetemp={SCRATCH}/base"]
    place = {test: place for place, test in enumerate(tests)}

    class Chosen:
        """A plugin: the chosen tests, in their order."""

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = [item for item in items if item.nodeid in place]
            items.sort(key=lambda item: place[item.nodeid])

    def run_pytest() -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
        with OUTPUT.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        code = pytest.main([*options, *files], plugins=[Chosen()])
        sys.stdout.flush()
        os._exit(code)  # its threads may run on

    fork = multiprocessing.get_context("fork").Process(target=run_pytest)
    fork.start()
    try:
        fork.join(limit_s)
        return fork.exitcode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(fork.pid, signal.SIGKILL)
        fork.join()


def try_change(change: MutationSpec, seconds: dict[str, float]) -> WorkResult:
    """Make a change, run its tests, and undo it."""
    tests, operator = tests_of(change, seconds), get_operator(change.operator_name)()
    limit_s = min(LIMIT_S, 60 + 3 * sum(seconds[test] for test in tests))
    OUTPUT.write_text("")
    with use_mutation(change.module_path, operator, change.occurrence) as texts:
        pairs = zip(*(text.splitlines() for text in texts), strict=False)
        diff = next(f"{old.strip()} -> {new.strip()}" for old, new in pairs if old != new)
        code = run_tests(tests, limit_s) if tests else 0
    outcome = TestOutcome.SURVIVED if code in (0, 5) else TestOutcome.KILLED
    output = f"{len(tests)} tests, exit code {code}\n{OUTPUT.read_text(errors='replace')[-3000:]}"
    return WorkResult(WorkerOutcome.NORMAL, output, outcome, diff)


def run(items: list[WorkItem], seconds: dict[str, float], again: bool) -> dict[str, WorkResult]:
    """Try the changes without a result, and those that survived `again`; return all results."""
    with use_db(HOME / "session.sqlite") as session:
        begun = {item.job_id for item in session.work_items}
        session.add_work_items(item for item in items if item.job_id not in begun)
        results = {item.job_id: result for item, result in session.completed_work_items}
        for number, item in enumerate(items, 1):
            name, began = item.job_id, time.monotonic()
            if name in results and (results[name].is_killed or not again):
                continue
            results[name] = result = try_change(item.mutations[0], seconds)
            session.set_result(name, result)
            word, taken = ("SURVIVED", "caught")[result.is_killed], time.monotonic() - began
            place = f"{number}/{len(items)}"
            print(f"{place:>7} {taken:4.0f} s {word:8} {name} | {result.diff}", flush=True)
    return {item.job_id: results[item.job_id] for item in items}


def print_score(results: dict[str, WorkResult]) -> bool:
    """Print the survivors and the table of rooms; return True if enough are caught."""
    equivalent = tomllib.loads((REPOSITORY / EQUIVALENT).read_text(encoding="utf-8"))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, result in results.items():
        file = name.partition(":")[0]
        word = "equivalent" if result.diff in equivalent.get(file, {}) else "survived"
        word = "caught" if result.is_killed else word
        counts[room_of(file)][word] += 1
        counts["~all"][word] += 1  # the last row
        if word == "survived":
            summary = result.output.partition("\n")[0]
            print(f"survived: {name}\n    {result.diff}\n    {summary}")
    print(f"\n{'':24} drawn caught equivalent survived")
    good = True
    for room, row in sorted(counts.items()):
        caught, survived = row["caught"], row["survived"]
        enough = caught >= (GOAL if room == "~all" else ROOM_GOAL) * (caught + survived)
        good &= enough
        print(
            f"{room.strip('~'):24} {row.total():5} {caught:6} {row['equivalent']:10} {survived:8} "
            f"{caught / max(1, caught + survived):5.0%}{'' if enough else '  too few'}"
        )
    return good


def main() -> int:
    """Run the command; return its exit code."""
    every = rooms(REPOSITORY, git("ls-files", "harness/*.py", "tools/*.py"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--rooms", nargs="+", metavar="ROOM", choices=every, help="only these, as harness/data")
    add("--count", type=int, default=300, help="changes of all rooms; at least 6 of each")
    add("--seed", type=int, default=0, help="of the draw")
    add("--survivors", action="store_true", help="try those that survived again")
    args = parser.parse_args()
    sources = ("harness", "tools", "tests", "ds_configs", "pyproject.toml", f":!{EQUIVALENT}")
    if uncommitted := git("status", "--short", *sources):
        parser.error("\n".join(["commit these first, the copy is of HEAD:", *uncommitted]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        enter_copy()
        seconds = trace_tests()
        share = quotas(every, args.count)
        chosen = [room for room in every if room in (args.rooms or every)]
        drawn = [islice(draw(TREE, room, every[room], args.seed), share[room]) for room in chosen]
        turns = [item for turn in zip_longest(*drawn) for item in turn if item]
        for module in ("torch", "transformers", "hypothesis", "pydantic"):  # for the forks
            importlib.import_module(module)
        results = run(turns, seconds, args.survivors)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues", file=sys.stderr)
        return 130
    return 0 if print_score(results) else 1


if __name__ == "__main__":
    sys.exit(main())
