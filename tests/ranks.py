"""Runs functions on several ranks: `@ranks(2)`.

The ranks are forked from a process that has imported everything. They join each other once and stay
for later calls, also from other test files.
"""

import atexit
import functools
import importlib
import inspect
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests.real_runs import REPOSITORY, start

LIMIT_S = 600.0  # per call, which may have to compile a DeepSpeed operator
_GRACE_S = 2.0  # for the other ranks after a failure: they may wait for it in a collective
_MOST_CALLS = 60  # per group: closed engines leave threads behind
after_calls: list[Callable[[], None]] = []  # run on each rank when a function has returned


def ranks(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the decorated function on `count` CPU ranks of one process group.

    A test runs there with the values of its fixtures, and fails if any rank does. Any other
    function returns a list of each rank's result; a call is made once and cached. Arguments and
    values are pickled. Raises AssertionError with the ranks' tracebacks.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        path = Path(function.__code__.co_filename).relative_to(REPOSITORY)
        module = ".".join(path.with_suffix("").parts)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> list[Any]:
            return _group(count).call(module, function.__name__, args, kwargs)

        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            call(*args, **kwargs)

        return test if function.__name__.startswith("test_") else functools.cache(call)

    return decorate


class _Group:
    """Ranks that wait for calls."""

    def __init__(self, count: int) -> None:
        self.calls = 0
        self._folder = folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        with Listener(str(folder / "socket")) as listener:
            command = [sys.executable, "-m", "tests.ranks", listener.address]
            self._processes = start(command, folder, count)
            connections = [listener.accept() for _ in range(count)]
        by_rank = {connection.recv(): connection for connection in connections}
        self._by_rank = [by_rank[rank] for rank in range(count)]

    def call(self, *call: Any) -> list[Any]:
        """Return the function's result on each rank. A failure ends the group."""
        self.calls += 1
        for connection in self._by_rank:
            connection.send_bytes(pickle.dumps(call))  # `send` would share tensors, not copy
        values: dict[Connection, Any] = {}
        errors: list[str] = []
        until = time.monotonic() + LIMIT_S
        while waiting := [c for c in self._by_rank if c not in values]:
            ready = wait(waiting, max(0.0, until - time.monotonic()))
            if not ready:
                errors.append(f"{len(waiting)} of {len(self._by_rank)} ranks never returned")
                break
            for connection in ready:
                rank = self._by_rank.index(connection)
                try:
                    error, values[connection] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    error, values[connection] = self._processes.logs[rank].read_text(), None
                if error:
                    errors.append(f"rank {rank}: {error}")
                    until = min(until, time.monotonic() + _GRACE_S)
        if errors:
            _forget(self)
            raise AssertionError("\n".join(errors))
        return [values[connection] for connection in self._by_rank]

    def close(self) -> None:
        """End the ranks, gently first."""
        for connection in self._by_rank:
            connection.close()
        self._processes.wait(_GRACE_S)
        shutil.rmtree(self._folder)


_groups: dict[int, _Group] = {}


def _group(count: int) -> _Group:
    group = _groups.get(count)
    if group and group.calls >= _MOST_CALLS:
        _forget(group)
    if count not in _groups:
        _groups[count] = _Group(count)
    return _groups[count]


def _forget(group: _Group) -> None:
    for count in [count for count, kept in _groups.items() if kept is group]:
        del _groups[count]
    group.close()


def close_all() -> None:
    """End all ranks that wait for calls."""
    for group in list(_groups.values()):
        _forget(group)


atexit.register(close_all)


def main(argv: list[str]) -> int:
    """Join the other ranks, and run the calls from the socket `argv[0]` until it is closed."""
    from harness.engine.processes import ending_together, join
    from harness.layout.world import World
    from tests.ranks import after_calls  # this module is __main__

    world = World.from_environ()
    join(world, hang_first_s=60.0)
    with Client(argv[0]) as connection, ending_together():
        connection.send(world.rank)
        while True:
            try:
                module, name, args, kwargs = connection.recv()
            except EOFError:
                return 0
            error, value = None, None
            try:
                function = getattr(importlib.import_module(module), name)
                value = inspect.unwrap(function)(*args, **kwargs)
                for tidy in after_calls:
                    tidy()
            except Exception:
                error = traceback.format_exc()
            connection.send_bytes(pickle.dumps((error, value)))
