"""Workers: their errors arrive complete, and none outlives its parent."""

import os
import signal
import time
from typing import BinaryIO

import pytest

from harness.errors import ConfigError
from tools import workers
from tools.workers import Progress, WorkerFailed, run_workers


def nothing(_: object) -> None:
    pass


def test_an_error_larger_than_a_pipe_arrives() -> None:
    def fail(item: int, progress: Progress) -> None:
        raise ConfigError([f"{item}: {'x' * 1_000_000}"])

    with pytest.raises(ConfigError) as raised:
        run_workers(fail, range(4), 4, nothing)
    assert len(raised.value.problems[0]) > 1_000_000


def test_a_worker_that_is_killed_while_it_reports_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(error: Exception, file: BinaryIO) -> None:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(item: int, progress: Progress) -> None:
        if item:
            time.sleep(60)
        raise ConfigError("torn")

    monkeypatch.setattr(workers.pickle, "dump", write_half)
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        run_workers(fail, range(2), 2, nothing)


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_worker_is_named_not_those_ended_with_it(killed: int) -> None:
    def work(item: int, progress: Progress) -> None:
        if item == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(WorkerFailed, match=r"SIGKILL .*lower --workers"):
        run_workers(work, range(2), 2, nothing)
