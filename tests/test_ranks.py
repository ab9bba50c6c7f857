"""`@ranks`: values by rank, failures with their tracebacks, and new ranks after a failure."""

import os
import signal

import pytest

from tests.ranks import ranks


@ranks(2)
def place(factor: int) -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_rank() * factor, dist.get_world_size()


@ranks(2)
def fails_on_the_second() -> None:
    import torch.distributed as dist

    assert dist.get_rank() == 0, "planted"
    dist.barrier()


@ranks(2)
def dies() -> None:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_function_returns_its_value_from_each_rank() -> None:
    assert place(3) == [(0, 2), (3, 2)]


def test_a_failure_is_told_and_the_next_call_has_fresh_ranks() -> None:
    with pytest.raises(AssertionError, match=r"rank 1:(?s:.)*planted"):
        fails_on_the_second()
    with pytest.raises(AssertionError, match="last words"):
        dies()
    assert place(4) == [(0, 2), (4, 2)]


@ranks(2)
def test_a_test_runs_on_ranks_with_its_fixtures(tmp_path) -> None:
    import torch.distributed as dist

    dist.barrier()
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2
