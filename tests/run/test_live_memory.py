from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.config.run_config import RunConfig
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.run import live_memory
from harness.run.live_memory import Compared, MemoryCheck, is_out_of_memory, live_storages


def test_live_storages_count_each_storage_once() -> None:
    before = live_storages()
    tensor = torch.zeros(1000)
    view = tensor[10:]
    new = {key: found for key, found in live_storages().items() if key not in before}
    assert [storage.nbytes() for storage, _ in new.values()] == [4000]
    del tensor, view


def test_a_gradient_is_live_and_what_lies_on_meta_is_not() -> None:
    before = live_storages()
    weight = torch.zeros(10, requires_grad=True)
    weight.sum().backward()
    empty = torch.empty(10**9, device="meta")
    new = {key: found for key, found in live_storages().items() if key not in before}
    assert sorted(storage.nbytes() for storage, _ in new.values()) == [40, 40]
    del empty


def test_running_out_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


@pytest.mark.parametrize(("measured", "warns"), [(100, False), (91, False), (90, True)])
def test_more_than_a_tenth_off_is_marked(measured: int, warns: bool) -> None:
    assert ("(!)" in str(Compared("peak", 100, measured))) is warns


def test_what_rounds_to_nothing_has_no_sign() -> None:
    assert str(Compared("built", 99_999, 100_000)) == "built 0.000 GiB, predicted +0.0%"


def test_without_an_estimate_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(make_plan(RunConfig(), {}, World()), estimate=None)
    monkeypatch.setattr(live_memory, "live_storages", lambda: pytest.fail("walked the heap"))
    check = MemoryCheck(plan, torch.device("cpu"))
    for _ in range(4):
        check.step_done()
    assert check.compared == []


def test_a_sparse_tensor_is_passed_over() -> None:
    before = live_storages()
    both = torch.eye(3).to_sparse(), torch.ones(2)
    assert len(live_storages().keys() - before.keys()) == 1, both
