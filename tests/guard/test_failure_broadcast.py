"""The first failure of any rank ends all ranks; the failed one and the store's host end last."""

from __future__ import annotations

import sys

import pytest
from torch.distributed import HashStore

from harness.guard import failure_broadcast
from harness.guard.failure_broadcast import Failure, FailureBroadcast


def test_all_ranks_exit_with_the_code_of_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []

    def exit_thread(code: int) -> None:
        codes.append(code)
        sys.exit(code)

    monkeypatch.setattr(failure_broadcast, "exit_now", exit_thread)
    store = HashStore()
    ranks = [FailureBroadcast(store, rank, world_size=3) for rank in range(3)]
    for rank in ranks:
        rank.start()
    with pytest.raises(SystemExit):
        ranks[1].end(Failure(1, 70, "the disk is full"), report=lambda _: None)
    for rank in ranks:
        rank.join(60)
    assert codes == [70, 70, 70]
    assert [rank.first.rank for rank in ranks if rank.first] == [1, 1, 1]
    assert store.add(failure_broadcast._ENDING, 0) == 3, "each rank once, the failed one last"
