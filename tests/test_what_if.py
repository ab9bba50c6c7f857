"""The cluster planner's what-ifs: the largest micro-batch, and other numbers of GPUs."""

from __future__ import annotations

from tests.test_plan_cluster import arguments
from tools.cluster.ask import question_of
from tools.cluster.search import count_all
from tools.cluster.what_if import Spent, front_of, largest_micro_batch

ONE_CARD = (
    *("--model", "llama-1b", "--gpus", 1, "--gpu", "rtx-4090", "--seq-len", 2048),
    *("--global-batch", 32, "--host-memory", 64),
)


def test_the_largest_micro_batch_fits_and_none_that_is_larger_does() -> None:
    args = arguments(*ONE_CARD)
    counted = count_all(args, question_of(args))
    most = max(each.layout.micro_batch for each in counted if each.decide())
    assert largest_micro_batch(counted).startswith(f"{most} ")


def test_numbers_of_gpus_that_are_slower_and_dearer_are_left_out() -> None:
    cheap, quick = Spent(8, 10, 100, "a"), Spent(32, 3, 120, "b")
    worse = Spent(16, 11, 110, "c")
    assert front_of([quick, worse, cheap]) == [cheap, quick]
