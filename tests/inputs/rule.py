"""The rule for every input: its exit code is in the table, there is no traceback, it ends in
bounded time and memory, nothing in it is executed, leaks or is left behind.

Inputs run in this process and in the current folder.
"""

import contextlib
import faulthandler
import importlib
import inspect
import io
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from harness.errors import ExitCode
from harness.guard.failure_broadcast import FailureBroadcast

GATE = pytest.mark.gate("inputs")
MANY = pytest.mark.parametrize("count", [20, pytest.param(400, marks=GATE, id="all")])
MARKER = "executed"  # a file that planted payloads create
SECRET = "what-only-this-machine-should-hold"
_SIGNS = ("Traceback (most recent call last)", "Exception ignored in", "panicked at")
# Folders that may be filled before an input turns out to be invalid.
_CACHES = ("cache", "new-cache", ".cache")


class Hang(BaseException):
    """The time of an input is over."""


class _Output(io.BytesIO):
    def close(self) -> None:
        """Stay open: handlers of loggers keep their streams."""

    def fileno(self) -> int:
        """Return the descriptor of stderr, which faulthandler needs."""
        return 2


def tried(main: str, argv: list[str], limit_s: float = 60) -> tuple[int | None, str, list[str]]:
    """Call main(argv) of a module; return its exit code, output and violations of the rule."""
    before, code, output, faults, here = _files(), None, _Output(), list[str](), os.getpid()
    command: Callable[..., Any] = importlib.import_module(main).main
    end_process: Callable[[int], object] = os._exit

    def leave(code: int) -> None:
        (sys.exit if os.getpid() == here else end_process)(code)

    out = io.TextIOWrapper(output, "utf-8", write_through=True)
    err = io.TextIOWrapper(output, "utf-8", "backslashreplace", write_through=True)
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(os, "_exit", leave)
        # The process group is joined once, but each run has its own alarm.
        patch.setattr("harness.engine.processes.leave", lambda: None)
        patch.setattr("harness.engine.processes._alarm", FailureBroadcast(None, 0, 1))
        patch.setattr(sys, "argv", [main, *argv])
        try:
            with _bounded(limit_s):
                has_parameters = inspect.signature(command).parameters
                code = int((command(argv) if has_parameters else command()) or 0)
        except SystemExit as end:
            code = 1 if isinstance(end.code, str) else int(end.code or 0)
        except Hang:
            faults.append(f"hang: {traceback.format_exc()[-1000:]}")
        except BaseException:
            traceback.print_exc()
    text = output.getvalue().decode(errors="replace")
    if signs := [sign for sign in _SIGNS if sign in text]:
        faults.append(f"traceback: {signs[0]}")
    elif not faults and code not in {*ExitCode}:
        faults.append(f"exit code: {code}")
    after = _files()
    names = sorted(before.keys() | after.keys())
    changed = [n for n in names if before.get(n) != after.get(n) and not n.startswith(_CACHES)]
    if MARKER in after:
        faults.append("executed")
    elif changed and (
        (code == ExitCode.BAD_CONFIG and "\nstep " not in text)  # a run leaves its records
        or (code in (ExitCode.DONE, ExitCode.DOES_NOT_FIT) and "--dry-run" in argv)
    ):
        faults.append(f"written: {', '.join(changed[:3])}")
    if leaks := [name for name in changed if _holds_secret(Path(name))]:
        faults.append(f"leaked: {leaks[0]}")
    return code, text, faults


def keeps_the_rule(main: str, argv: list[str], note: object = "", limit_s: float = 60) -> int:
    """Try an input and fail if it violates the rule; return its exit code."""
    code, output, faults = tried(main, argv, limit_s)
    assert not faults, f"{note}: {faults}\n{main} {argv!r:.2000}\n{output[-5000:]}"
    assert code is not None
    return code


@contextlib.contextmanager
def _bounded(limit_s: float) -> Iterator[None]:
    """Raise Hang after a time; end this process if native code hangs. Bound memory and files."""

    def over(*_: object) -> NoReturn:
        raise Hang

    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limits = {resource.RLIMIT_DATA: (pages << 12) + (4 << 30), resource.RLIMIT_FSIZE: 1 << 30}
    kept = {limit: resource.getrlimit(limit) for limit in limits}
    environ, handler = dict(os.environ), signal.signal(signal.SIGALRM, over)
    os.environ["HOME"] = str(Path.cwd())
    try:
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, kept[limit][1]))
        faulthandler.dump_traceback_later(4 * limit_s, exit=True, file=sys.__stderr__)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        faulthandler.cancel_dump_traceback_later()
        for limit, values in kept.items():
            resource.setrlimit(limit, values)
        os.environ.clear()
        os.environ.update(environ)


def _files() -> dict[str, tuple[int, int, int]]:
    """Return mode, size and time of all files, and the mode of folders, without following links."""
    table = {}
    for folder, folders, names in os.walk("."):
        for name in (*folders, *names):
            about, is_file = Path(folder, name).lstat(), name in names
            key = os.path.relpath(os.path.join(folder, name))  # noqa: PTH118
            table[key] = (about.st_mode, about.st_size * is_file, about.st_mtime_ns * is_file)
    return table


def _holds_secret(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes()


def each(count: int, strategy: SearchStrategy[Any], test: Callable[[Any], object]) -> None:
    """Try drawn values, always the same unless INPUTS_SEED is set. A few, which take long, are not
    shrunk.
    """
    options: dict[str, Any] = {"derandomize": "INPUTS_SEED" not in os.environ, "database": None}
    options |= {"deadline": None, "suppress_health_check": list(HealthCheck)}
    options["phases"] = [Phase.generate, *([Phase.shrink] if count > 100 else [])]
    seeded = seed(int(os.environ.get("INPUTS_SEED", "0")))(given(strategy)(test))
    settings(max_examples=count, **options)(seeded)()
