"""Runs work in many processes of this machine; none of them outlive the tool.

Workers are no ranks, but forks of the tool, so that they share the data that it has loaded.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from tqdm import tqdm  # type: ignore[import-untyped]

from harness import terminal
from harness.errors import ConfigError
from harness.launch.ranks import forked

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""
_TOLD = 3  # a worker's exit code when it has written its error
_LINE_EVERY_S = 30.0  # seconds between lines if no terminal shows a changing one


class Stopped(Exception):
    """Raised by Ctrl-C or SIGTERM."""


class WorkerFailed(Exception):
    """A worker raised or was killed; the message has the details."""


Progress = Callable[[int], None]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_workers(
    work: Callable[[int, Progress], None],
    items: Sequence[int],
    workers: int,
    watch: Callable[[dict[int, int]], None],
) -> None:
    """Call `work(item, progress)` for every item, in forked processes that share loaded data.

    `watch` is called often with each worker's last `progress` value, by item. Raises a worker's
    ConfigError or OSError, or WorkerFailed, after ending the other workers.
    """
    context = multiprocessing.get_context("fork")
    following = context.Value("q", 0)
    done = context.Array("q", max(1, len(items)), lock=False)
    count = min(workers, len(items))

    def loop() -> None:
        while True:
            with following.get_lock():
                place = following.value
                following.value += 1
            if place >= len(items):
                return

            def progress(count: int, place: int = place) -> None:
                done[place] = count

            work(items[place], progress)

    with contextlib.ExitStack() as stack:
        # In memory, because the error may be that the disk is full.
        opened = (os.fdopen(os.memfd_create("error"), "r+b") for _ in range(count))
        errors = [stack.enter_context(file) for file in opened]

        def worker(number: int) -> int:
            try:
                loop()
            except Exception as error:
                is_expected = isinstance(error, ConfigError | OSError)
                told = error if is_expected else WorkerFailed(traceback.format_exc())
                pickle.dump(told, errors[number])
                errors[number].flush()
                return _TOLD
            return 0

        group = forked(worker, count)
        stack.callback(group.end)
        ended = group.wait(
            meanwhile=lambda: watch(dict(zip(items, done, strict=False))), patience_s=0.0
        )
        for code, error in zip(ended.codes, errors, strict=True):
            if code == _TOLD:
                error.seek(0)
                raise pickle.load(error)
            if code:
                raise WorkerFailed(_how(code))


def _how(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        of_memory = " (the kernel does that when memory runs out: lower --workers)" * (code == -9)
        return f"a worker was ended by {name}{of_memory}"
    return f"a worker ended with code {code}"


def as_ctrl_c(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal as Ctrl-C is handled."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Raise Stopped on Ctrl-C and SIGTERM."""

    def stop(name: str) -> None:
        raise Stopped(name)

    with on_stop(stop):
        yield


@contextlib.contextmanager
def on_stop(stop: Callable[[str], None]) -> Iterator[None]:
    """Call a function with the signal's name on Ctrl-C and SIGTERM."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Bar(tqdm):  # type: ignore[misc]
    """tqdm without its thread and its lock between processes: workers are forked beside a bar."""

    monitor_interval = 0
    _lock = threading.RLock()


class _Lines:
    """A log, in which each update is a line."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(verb: str, total_bytes: int, done_bytes: int = 0) -> tqdm:
    """Return progress on standard error: a line that changes and then goes on a terminal, elsewhere
    one more line every 30 s.
    """
    is_terminal = terminal.columns(sys.stderr) is not None
    return _Bar(
        desc=verb,
        total=total_bytes,
        initial=done_bytes,
        unit="B",
        unit_scale=True,
        mininterval=0.5 if is_terminal else _LINE_EVERY_S,
        delay=0 if is_terminal else _LINE_EVERY_S,
        file=None if is_terminal else _Lines(),
        leave=False,
        bar_format="{desc} {percentage:.0f}% of {total_fmt}B, {rate_fmt}, {remaining} left",
    )
