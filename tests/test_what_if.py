"""The cluster planner's what-ifs: the largest micro-batch and model, and numbers of GPUs."""

from __future__ import annotations

import pytest

from harness.layout.shape import Shape
from harness.plan.model_config import find_model_config
from tests.test_plan_cluster import arguments
from tools.cluster.ask import question_of, scaled
from tools.cluster.search import count_all
from tools.cluster.what_if import Spent, _any_that_fits, _scaled, front_of, largest_micro_batch

ONE_CARD = (
    *("--model", "llama-1b", "--gpus", 1, "--gpu", "rtx-4090", "--seq-len", 2048),
    *("--global-batch", 32, "--host-memory", 64),
)


@pytest.mark.parametrize("model", ["llama-3-8b", "gpt2-124m", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_relatives_of_a_model_grow_with_the_third_power(model: str) -> None:
    config = find_model_config(model)[0]
    shape = Shape.from_hf(config)
    assert Shape.from_hf({**config, **scaled(config, 1.0)}).parameters == shape.parameters
    large = Shape.from_hf({**config, **scaled(config, 2.0)})
    layers = shape.parameters - 2 * shape.vocab_size * shape.hidden_size
    assert 5 * layers < large.parameters < 9 * shape.parameters
    assert (large.num_kv_heads < large.num_heads) == (shape.num_kv_heads < shape.num_heads)
    half = Shape.from_hf({**config, **scaled(config, 1.25)})
    assert shape.parameters < half.parameters < large.parameters


def test_the_largest_micro_batch_fits_and_none_that_is_larger_does() -> None:
    args = arguments(*ONE_CARD)
    counted = count_all(args, question_of(args))
    most = max(each.layout.micro_batch for each in counted if each.decide())
    assert largest_micro_batch(counted).startswith(f"{most} ")


def test_a_larger_relative_fits_until_it_does_not() -> None:
    args = arguments(*ONE_CARD)
    config = find_model_config("llama-1b")[0]
    assert _any_that_fits(_scaled(args, scaled(config, 1.0))) is not None
    assert _any_that_fits(_scaled(args, scaled(config, 8.0))) is None


def test_numbers_of_gpus_that_are_slower_and_dearer_are_left_out() -> None:
    cheap, quick = Spent(8, 10, 100, "a"), Spent(32, 3, 120, "b")
    worse = Spent(16, 11, 110, "c")
    assert front_of([quick, worse, cheap]) == [cheap, quick]
