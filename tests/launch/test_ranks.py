"""The processes of a group end together, and none outlives whoever started them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from unittest import mock

import psutil
import pytest

from harness.launch import fork_server, ranks
from harness.launch.fork_server import Zygote
from harness.launch.ranks import Ranks, ending, started
from tests.gates import jobs
from tests.real_runs import environment, imported, wait_for
from tests.tables import beside

TABLES = beside(__file__, "ranks.toml")
SCRIPTS, USERS = TABLES["scripts"], TABLES["users"]


@pytest.mark.parametrize("failing", [0, 1])
def test_whichever_rank_fails_the_other_does_not_outlive_it(failing: int) -> None:
    """Nor does it wait for a rank that waits for the failed one."""
    with started([sys.executable, "-c", SCRIPTS["one_fails"], str(failing)], 2) as group:
        ended = group.wait(limit_s=120.0, patience_s=0.1)
    assert (ended.codes[failing], ended.codes[1 - failing]) == (7, None)
    assert max(ended.seconds) < 120.0
    assert group.processes[1 - failing].returncode == -signal.SIGTERM


def test_signals_during_a_start_are_handled_after_it() -> None:
    before = signal.signal(signal.SIGUSR1, come := mock.Mock())
    try:
        with ranks.deferred(signal.SIGUSR1):
            signal.raise_signal(signal.SIGUSR1)
            assert not come.called
        assert come.called
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_process_that_outlives_its_ranks_is_listed(zygote: Zygote, tmp_path: Path) -> None:
    sleeping = "__import__('subprocess').Popen(['sleep', '60'])"
    assert zygote.run(["-n1", "-r1", sleeping], tmp_path, ranks=1, main="timeit").codes == [0]
    (left,) = zygote.left
    zygote.left.clear()
    assert left.endswith(f": sleep 60 ({tmp_path})")


_STARTS_ANOTHER = "read line; sleep 1000 & echo $!; wait"
_FORKED = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"


@pytest.fixture
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a program that hangs with a child, and writes both pids to the file `pids`."""
    monkeypatch.setattr(ranks, "ENDING_S", 0.3)
    program = tmp_path / "hangs"
    program.write_text(SCRIPTS["hangs"].format(pids=tmp_path / "pids"))
    program.chmod(0o755)
    (tmp_path / "forked.py").write_text(_FORKED)
    return program


def forked(program: Path) -> AbstractContextManager[Ranks]:
    """Run a program as a rank that is forked from a process that has imported everything."""
    script, logs, (zygote, _) = program.with_name("forked.py"), program.parent, imported()
    return ending(partial(zygote.start, str(script), [str(program)], 1, None, logs, environment()))


WAYS: dict[str, Callable[[Path], AbstractContextManager[Ranks]]] = {
    "rank": lambda program: started([str(program)], 1, logs=program.parent),
    "helper": lambda program: started([str(program)], None, logs=program.parent),
    "forked": forked,
}


def pids_of(program: Path) -> list[int]:
    """Wait until a program that hangs has started; return the pids of all its processes."""
    pids = program.with_name("pids")
    wait_for(lambda: pids.exists() and pids.read_text().endswith("\n"), "a program that hangs", 120)
    return [int(pid) for pid in pids.read_text().split()]


def running(pids: list[int]) -> list[int]:
    """Return the processes that have not ended."""
    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() not in ended
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ["limit", "kill", "Ctrl-C"])
def test_nothing_outlives_its_block(way: str, end: str, hangs: Path) -> None:
    """Even in another session; what runs beside the block goes on, also if it starts meanwhile."""
    pipe = subprocess.PIPE
    beside = subprocess.Popen(["sh", "-c", _STARTS_ANOTHER], stdin=pipe, stdout=pipe, text=True)
    assert beside.stdin
    assert beside.stdout
    with suppress(KeyboardInterrupt), WAYS[way](hangs) as group:
        first, _ = pids = pids_of(hangs)
        assert running(pids) == pids
        print(file=beside.stdin, flush=True)
        meanwhile = int(beside.stdout.readline())
        if end == "Ctrl-C":
            raise KeyboardInterrupt
        if end == "kill":
            os.kill(first, signal.SIGKILL)
        began = time.monotonic()
        ended = group.wait(limit_s=60.0 if end == "kill" else 0.1)
        assert ended.codes == [-signal.SIGKILL if end == "kill" else None]
        assert ended.seconds[0] <= time.monotonic() - began
    assert group.processes[0].returncode == -signal.SIGKILL
    assert (running([*pids, meanwhile]), beside.poll()) == ([meanwhile], None)
    os.kill(meanwhile, signal.SIGKILL)
    beside.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("user", USERS)
def test_processes_end_with_their_user(
    user: str, number: signal.Signals, hangs: Path, tmp_path: Path
) -> None:
    """After SIGKILL, which leaves no time for more, only those that it started itself."""
    (here := tmp_path / "here").mkdir()
    (script := tmp_path / "user.py").write_text(SCRIPTS["user"] + USERS[user]["script"])
    zygote, _ = imported()
    variables = environment(TMPDIR=str(tmp_path))
    words = [str(hangs), str(here)]
    with ending(partial(zygote.start, str(script), words, 1, None, tmp_path, variables)) as group:
        pids = pids_of(hangs)
        group.processes[0].send_signal(number)
        codes = group.wait(60.0).codes
        wait_for(lambda: not running(pids[:1] if number == signal.SIGKILL else pids), "its end", 60)
    if number == signal.SIGKILL:
        assert codes == [-signal.SIGKILL]
    else:
        errors = (tmp_path / "err").read_text()
        said = USERS[user].get("said")
        assert (said or "KeyboardInterrupt") in errors
        assert codes == [130 if said else 1], errors
        assert not list(here.iterdir())


@pytest.mark.parametrize(("parent", "is_dead"), [(1, False), (4711, True)])
def test_a_process_whose_parent_is_dead_ends(parent: int, is_dead: bool, monkeypatch) -> None:
    """The parent may be process 1, as in a container."""
    monkeypatch.setattr(ranks, "ctypes", mock.Mock())
    system = mock.Mock(getppid=lambda: 1)
    monkeypatch.setattr(ranks, "os", system)
    ranks.follow(parent)
    assert system._exit.called == is_dead


@pytest.mark.parametrize("fails", [False, True])
def test_the_fork_server_ends_with_its_block(fails: bool) -> None:
    """An error kills it, which ends its ranks."""
    popen = mock.patch.object(fork_server.subprocess, "Popen")
    with popen as process, suppress(ZeroDivisionError), fork_server.Zygote():
        assert 1 / (not fails)
    assert process().kill.called == fails
    process().wait.assert_called_once()


@pytest.mark.parametrize("error", ["", "no memory"])
def test_a_gate_whose_rank_fails_ends_with_its_error(error: str, tmp_path, monkeypatch) -> None:
    """Errors of an earlier start do not count."""
    (tmp_path / "1.error").write_text("stale")
    fails = tmp_path / "fails"
    fails.write_text(f"#!/bin/sh\nprintf '{error}' > {tmp_path}/0.error; exit 1")
    fails.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fails))
    with pytest.raises(SystemExit) as raised:
        jobs._launch(None, [], tmp_path, 1, {})
    assert raised.value.code == (error or "the process group ended with [1]")
