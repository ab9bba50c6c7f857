"""Traces which tests execute a line: coverage.py, a context per test, also in its processes.

As a plugin of pytest, this module names the running test to coverage.py: in this process, in ranks
that wait for calls, and in those of the fork server. Other processes read it from the environment.
"""

import importlib
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from coverage import Coverage, CoverageData

_SETTINGS = Path(__file__).with_name("coverage.ini").read_text()
# Contexts are joined: "the test that started the process (call)|the test that calls it".
_AROUND = re.compile(r"^.*\|(?=tests/)| \((setup|call|teardown)\)$")


def trace(tree: Path, home: Path, files: list[str]) -> dict[str, float]:
    """Run test files, and add the lines that each test executes to `home`/traced. Return the
    seconds of each test; infinity if it fails.
    """
    folder = home / "tracing"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    settings, plugins = folder / "settings", ["-p", __name__, "-p", "no:cacheprovider"]
    settings.write_text(_SETTINGS.format(folder=folder, tree=tree))
    code = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", *plugins, *files],
        cwd=tree,
        env={**os.environ, "COVERAGE_PROCESS_START": str(settings)},
        stdout=(folder / "output").open("w"),
        stderr=subprocess.STDOUT,
    ).returncode
    if code not in (0, 1, 5):  # passed, failed, none chosen
        sys.exit(f"pytest ended with exit code {code}: {folder}/output")
    command = [sys.executable, "-m", "coverage", "combine", "--quiet", "--append"]
    subprocess.run([*command, f"--data-file={home}/traced", str(folder)], cwd=home, check=True)
    seconds: dict[str, float] = json.loads((folder / "seconds").read_text())
    return seconds


def tests_by_line(path: Path, home: Path) -> dict[int, set[str]]:
    """Return the tests that execute each line of a file."""
    data = CoverageData(f"{home}/traced")
    data.read()
    lines = data.contexts_by_lineno(str(path))
    return {line: {_AROUND.sub("", name) for name in names} for line, names in lines.items()}


# The plugin. Every forked rank imports it, and would wait for an import of pytest.

_seconds = Counter[str]()


def pytest_runtest_logstart(nodeid: str) -> None:
    """Name the test that executes the next lines of this process, and those of its forks."""
    if tracing := Coverage.current():
        tracing.switch_context(nodeid)
        tracing.set_option("run:context", nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    _seconds[report.nodeid] += report.duration if report.passed else math.inf


def pytest_sessionfinish() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers' reports arrive here, too
        path = Path(os.environ["COVERAGE_PROCESS_START"]).with_name("seconds")
        path.write_text(json.dumps(_seconds))


def pytest_configure() -> None:
    """Tell ranks which test runs."""
    from harness.launch.fork_server import Zygote
    from tests.ranks import _Group

    call, ask = _Group.call, Zygote._ask

    def ask_in_context(zygote: Zygote, job: dict[str, Any]) -> Any:
        if "main" in job:
            asked = [os.environ.get("PYTEST_CURRENT_TEST", ""), job["fault"], job.get("planter")]
            job = {**job, "planter": __name__, "fault": asked}
        return ask(zygote, job)

    def call_in_context(group: _Group, *asked: Any) -> list[Any]:
        return call(group, __name__, "in_context", (os.environ["PYTEST_CURRENT_TEST"], *asked), {})

    Zygote._ask, _Group.call = ask_in_context, call_in_context


def plant(asked: tuple[str, Any, str], rank: int) -> None:
    """Name the test in a rank of the fork server, and plant its fault."""
    test, fault, planter = asked
    pytest_runtest_logstart(test)
    if fault:
        importlib.import_module(planter).plant(fault, rank)


def in_context(test: str, module: str, name: str, args: Any, kwargs: Any) -> Any:
    """Name the test in a rank that waits for calls, and call a function."""
    pytest_runtest_logstart(test)
    return inspect.unwrap(getattr(importlib.import_module(module), name))(*args, **kwargs)
