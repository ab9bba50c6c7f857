"""Which tests execute a line: coverage.py, a context per test, in its subprocesses and ranks, too.

Tests are traced a folder at a time (`trace`), and a finished folder is kept. As a plugin of pytest,
this module names the running test: to coverage.py in this process, and in ranks that wait for
calls. The lines of other processes belong to the test during which they ended.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage, CoverageData

_LOG = "MUTANTS_LOG"  # the file of a test's name, begin, end and outcome
_SETTINGS = """[run]
data_file = {folder}/data
parallel = true
include = {tree}/harness/*, {tree}/tools/*
patch = fork, _exit
disable_warnings = no-data-collected, module-not-measured, no-sysmon
"""


class Tests:
    """The tests that execute a line, and how long each takes."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree, self.folder = tree, folder
        self.seconds: dict[str, float] = {}  # of tests that pass
        done = [path for path in folder.glob("*/traced") if path.with_name("log").exists()]
        for log in sorted(
            (path.with_name("log") for path in done), key=lambda path: path.stat().st_mtime
        ):
            for name, began, ended, passed in map(json.loads, log.read_text().splitlines()):
                if passed:
                    self.seconds[name] = ended - began
        self.files = {name.partition("::")[0] for name in self.seconds}

    @cached_property
    def _traced(self) -> list[CoverageData]:
        files = [CoverageData(str(path)) for path in self.folder.glob("*/traced")]
        for file in files:
            file.read()
        return files

    def of(self, file: str) -> dict[int, set[str]]:
        """Return the tests that execute each line of `file`."""
        lines: dict[int, set[str]] = {}
        for data in self._traced:
            for line, tests in data.contexts_by_lineno(str(self.tree / file)).items():
                lines.setdefault(line, set()).update(self.seconds.keys() & tests)
        return lines


def trace(tree: Path, folder: Path, tests: list[str]) -> None:
    """Run `tests`, and write which lines of `tree` each executes to `folder`/traced."""
    subprocess.run(["rm", "-rf", folder], check=True)
    folder.mkdir(parents=True)
    settings = folder / "settings"
    settings.write_text(_SETTINGS.format(folder=folder, tree=tree))
    command = [
        sys.executable,
        "-m",
        "coverage",
        "run",
        f"--rcfile={settings}",
        "-m",
        "pytest",
        "-q",
    ]
    environ = {"COVERAGE_PROCESS_START": str(settings), _LOG: str(folder / "log")}
    subprocess.run(
        [*command, "-p", __name__, "-p", "no:cacheprovider", "-m", "not slow", *tests],
        cwd=tree,
        env={**os.environ, **environ},
        stdout=(folder / "output").open("w"),
        stderr=subprocess.STDOUT,
        check=False,
    )
    _combine(folder)


def _combine(folder: Path) -> None:
    """Combine the data of all processes; a test that fails without a change catches nothing."""
    runs = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    together = CoverageData(str(folder / "combining"))
    for path in sorted(folder.glob("data.*")):
        ended = path.stat().st_mtime
        during = [name for name, began, until, _ in runs if began <= ended <= until]
        data = CoverageData(str(path))
        data.read()
        together.update(data)
        if during:  # another process
            data.set_query_context("")
            lines = {file: data.lines(file) or [] for file in data.measured_files()}
            together.set_context(during[0])
            together.add_lines({file: numbers for file, numbers in lines.items() if numbers})
        data.close()
        path.unlink()
    together.write()
    together.close()
    (folder / "combining").rename(folder / "traced")


# The plugin.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Trace everything until the test is torn down under its name."""
    tracing = Coverage.current()
    assert tracing is not None
    began, item.config.stash[_failed] = time.time(), False
    tracing.switch_context(item.nodeid)
    result = yield
    tracing.switch_context("")
    with Path(os.environ[_LOG]).open("a") as log:
        row = [item.nodeid, began, time.time(), not item.config.stash[_failed]]
        log.write(json.dumps(row) + "\n")
    return result


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note a test that does not pass."""
    report: Any = yield
    item.config.stash[_failed] |= not report.passed
    return report


def pytest_configure() -> None:
    """Tell ranks that wait for calls which test calls."""
    from tests.ranks import _Group

    call = _Group.call

    def call_in_context(group: _Group, *asked: Any) -> list[Any]:
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
        return call(group, __name__, "in_context", (test, *asked), {})

    _Group.call = call_in_context


def in_context(test: str, module: str, name: str, args: Any, kwargs: Any) -> Any:
    """Call a function in a rank, traced under the name of a test."""
    tracing = Coverage.current()
    assert tracing is not None
    tracing.switch_context(test)
    try:
        return inspect.unwrap(getattr(importlib.import_module(module), name))(*args, **kwargs)
    finally:
        tracing.switch_context("")
