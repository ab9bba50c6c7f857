"""Make small changes to harness/ and tools/, one at a time, and see whether a test fails.

    python -m tests.gates.mutants              # continues where it stopped
    python -m tests.gates.mutants --survivors  # those that survived run again
    python -m tests.gates.mutants --rooms harness/data tools/cluster

The changes are made in a copy, build/mutants/tree. The tests that execute the changed line run,
those of its folder first, until one fails. A survivor needs a test, or a row of equivalent.toml
that states why nobody could notice. The exit code is 1 below 90 % caught, or 80 % in a room.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import tomllib
import zlib
from collections import Counter
from itertools import islice, zip_longest
from pathlib import Path

import pytest
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult
from sqlalchemy.exc import IntegrityError

from tests.gates.mutants.covering import Tests, trace
from tests.gates.mutants.draw import Room, draw, quotas, rooms

REPOSITORY = Path(__file__).resolve().parents[3]
HOME = REPOSITORY / "build" / "mutants"
TREE = HOME / "tree"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
GOAL, ROOM_GOAL = 0.9, 0.8
# Seconds of tests per change, as they took when traced; the longer ones are left out.
MOST_TEST_S = 60.0
LIMIT_S = 300  # a change that never ends counts as caught
_MOST_BYTES = 8 * 2**30


def _listed(folder: Path, *patterns: str) -> list[str]:
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=folder, capture_output=True, check=True, text=True)
    return [name for name in listed.stdout.split("\0") if name and (folder / name).is_file()]


def refresh_tree() -> set[str]:
    """Bring the copy up to date with the checkout, and return the files that changed."""
    TREE.mkdir(parents=True, exist_ok=True)
    wanted, changed = _listed(REPOSITORY), set()
    if not (TREE / ".git").exists():
        subprocess.run(["git", "init", "--quiet"], cwd=TREE, check=True)
    if not (TREE / ".venv").exists() and (REPOSITORY / ".venv").exists():
        (TREE / ".venv").symlink_to((REPOSITORY / ".venv").resolve())
    for name in {*_listed(TREE)} - {*wanted, ".venv"}:
        (TREE / name).unlink()
        changed.add(name)
    for name in wanted:
        source, copy = REPOSITORY / name, TREE / name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
            changed.add(name)
    for arguments in (["add", "-A"], ["commit", "--quiet", "--allow-empty", "-m", "copy"]):
        author = ["-c", "user.name=mutants", "-c", "user.email=mutants@localhost"]
        subprocess.run(["git", *author, *arguments], cwd=TREE, check=True)
    return changed


def trace_tests(changed: set[str]) -> Tests:
    """Trace the folders of tests that have not been traced yet, and test files that changed."""
    files = _listed(TREE, "tests/**/test_*.py", "tests/test_*.py")
    folders: dict[str, list[str]] = {}
    for file in files:
        folders.setdefault(Path(file).parts[1] if file.count("/") > 1 else "tests", []).append(file)
    for name, members in folders.items():
        if not (HOME / "traced" / name / "traced").exists():
            trace(TREE, HOME / "traced" / name, members)
        else:
            for file in changed & {*members}:
                trace(TREE, HOME / "traced" / file.replace("/", "+"), [file])
    return Tests(TREE, HOME / "traced")


def tests_of(change: MutationSpec, tests: Tests) -> list[str]:
    """Return the tests to run, nearest first: those that execute the line; for a line that runs
    during imports, those that execute a line of the file; else the files that name the module.
    """
    file = str(change.module_path.relative_to(TREE))
    lines = tests.of(file)
    chosen = {
        t for line in range(change.start_pos[0], change.end_pos[0] + 1) for t in lines.get(line, ())
    }
    if not chosen:
        chosen = {test for executed in lines.values() for test in executed}
    near = [f"tests/{part}/" for part in Path(file).parts[1:-1]] + [
        f"test_{change.module_path.stem}"
    ]
    if not chosen or not any(part in test for part in near for test in chosen):
        chosen |= {name for name in _naming(file) if name not in tests.files}
    kept: list[str] = []
    spent = 0.0
    order = lambda test: (not any(part in test for part in near), tests.seconds.get(test, 1.0))  # noqa: E731
    for test in sorted(chosen, key=order):
        spent += tests.seconds.get(test, 10.0)
        if spent > MOST_TEST_S and kept:
            break
        kept.append(test)
    return kept


def _naming(file: str) -> list[str]:
    """Return the test files that name a module."""
    parts = Path(file).with_suffix("").parts
    package, module = r"[./]".join(parts[:-1]), parts[-1]
    named = re.compile(rf"{package}[./]{module}\b|from {package} import .*\b{module}\b")
    files = _listed(TREE, "tests/**/test_*.py", "tests/test_*.py")
    return [name for name in files if named.search((TREE / name).read_text(encoding="utf-8"))]


class _Chosen:
    """A plugin: runs the chosen tests, in their order."""

    def __init__(self, tests: list[str]) -> None:
        self.place = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        places = [
            min(
                self.place.get(name, len(self.place))
                for name in (i.nodeid, i.nodeid.split("::")[0])
            )
            for i in items
        ]
        pairs = sorted(zip(places, range(len(items)), strict=True))
        items[:] = [items[index] for place, index in pairs if place < len(self.place)]
        items[:] = [i for i in items if not i.get_closest_marker("slow")]


def run_tests(tests: list[str], output: Path) -> int | None:
    """Run tests in a fork of this process, which has imported the large packages; return pytest's
    exit code, or None after LIMIT_S.
    """
    scratch = HOME / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(TREE)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # DeepSpeed rebuilds its operators for every path of an environment.
        operators = {"TORCH_EXTENSIONS_DIR": str(HOME / "operators")}
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(scratch), **operators}
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
        for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "harness", "tools")]:
            del sys.modules[name]
        sys.path = [str(TREE), *(path for path in sys.path if path not in ("", str(REPOSITORY)))]
        options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=short", f"--basetemp={scratch}/base"]
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        code = 3
        try:
            code = int(pytest.main([*options, *files], plugins=[_Chosen(tests)]))
        finally:
            sys.stdout.flush()
            os._exit(code)
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def try_change(change: MutationSpec, tests: Tests) -> WorkResult:
    """Make a change, run its tests, and undo it."""
    chosen, output = tests_of(change, tests), HOME / "output"
    operator = get_operator(change.operator_name)()
    with use_mutation(change.module_path, operator, change.occurrence) as (before, after):
        old, new = (text.splitlines() for text in (before, after))
        first = next(i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])
        diff = f"{old[first].strip()} -> {new[first].strip()}"
        code = run_tests(chosen, output) if chosen else 0
    text = output.read_text(errors="replace")[-3000:] if chosen else ""
    caught = TestOutcome.SURVIVED if code in (0, 5) else TestOutcome.KILLED
    said = f"{len(chosen)} tests, exit code {code}\n{text}"
    return WorkResult(WorkerOutcome.NORMAL, said, caught, diff)


def equivalents() -> set[tuple[str, str]]:
    """Return the changes that nobody can notice: file, and line before -> after."""
    rows = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))
    return {(file, change) for file, changes in rows.items() for change in changes}


def run(chosen: list[Room], share: dict[str, int], seed: int) -> dict[str, WorkResult]:
    """Try the drawn changes, a few of each room in turn; return the results by change."""
    tests = trace_tests(refresh_tree())
    drawn = {room.name: list(islice(draw(TREE, room, seed), share[room.name])) for room in chosen}
    turns = [change for turn in zip_longest(*drawn.values()) for change in turn if change]
    results: dict[str, WorkResult] = {}
    with contextlib.closing(WorkDB(HOME / "session.sqlite", WorkDB.Mode.create)) as session:
        done = {item.job_id: result for item, result in session.completed_work_items}
        for change in turns:
            name = name_of(change)
            result = done.get(name)
            if not result:
                began = time.monotonic()
                with contextlib.suppress(IntegrityError):  # stopped before its result
                    session.add_work_item(WorkItem.single(name, change))
                result = try_change(change, tests)
                session.set_result(name, result)
                word = "caught" if result.is_killed else "SURVIVED"
                print(
                    f"{time.monotonic() - began:4.0f} s {word:8} {name} | {result.diff}", flush=True
                )
            results[name] = result
    return results


def name_of(change: MutationSpec) -> str:
    """Return a change's name, which contains a checksum of its file."""
    checksum = zlib.crc32(change.module_path.read_bytes())
    file = change.module_path.relative_to(TREE)
    operator = change.operator_name.split("/")[1]
    return f"{file}:{change.start_pos[0]} {operator} {change.occurrence} {checksum:08x}"


def print_score(results: dict[str, WorkResult], chosen: list[Room]) -> bool:
    """Print the table of rooms and the survivors; return True if enough are caught."""
    known, counts = equivalents(), {room.name: Counter[str]() for room in chosen}
    for name, result in results.items():
        file = name.partition(":")[0]
        room = next(room.name for room in chosen if file in room.files)
        equivalent = (file, result.diff) in known and not result.is_killed
        word = "caught" if result.is_killed else "equivalent" if equivalent else "survived"
        counts[room][word] += 1
        if word == "survived":
            print(
                f"survived: {name}\n    {result.diff}\n    {(result.output or '').splitlines()[0]}"
            )
    print(f"\n{'':24} drawn caught equivalent survived")
    good = True
    for room, row in [*counts.items(), ("all", sum(counts.values(), Counter[str]()))]:
        caught, survived = row["caught"], row["survived"]
        goal = GOAL if room == "all" else ROOM_GOAL
        enough = caught >= goal * (caught + survived)
        good &= enough
        print(
            f"{room:24} {row.total():5} {caught:6} {row['equivalent']:10} {survived:8} "
            f"{caught / max(1, caught + survived):5.0%}{'' if enough else '  too few'}"
        )
    return good


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rooms", nargs="+", metavar="ROOM", help="only these, as harness/data")
    parser.add_argument(
        "--count", type=int, default=300, help="changes of all rooms; at least 6 of each"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--survivors", action="store_true", help="try those that survived again")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    every = rooms(REPOSITORY, _listed(REPOSITORY, "harness/*.py", "tools/*.py"))
    chosen = [room for room in every if not args.rooms or room.name in args.rooms]
    session = HOME / "session.sqlite"
    if args.survivors and session.exists():
        with contextlib.closing(sqlite3.connect(session)) as opened, opened:
            opened.execute("delete from work_results where test_outcome = 'SURVIVED'")
    for module in ("torch", "transformers", "hypothesis", "pydantic"):  # inherited by the forks
        importlib.import_module(module)
    return 0 if print_score(run(chosen, quotas(every, args.count), args.seed), chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
