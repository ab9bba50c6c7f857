"""Splits compared with brute force, the schedule with DeepSpeed's own."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

from harness.layout.shape import Shape, flops_per_token, flops_per_unit, num_parameters
from harness.layout.stages import (
    Bounds,
    Work,
    balanced,
    bounds_of,
    bubble,
    in_flight,
    layers_per_stage,
    schedule,
    split,
    split_evenly,
    stage_parameters,
    stage_shape,
)
from harness.plan.model_config import find_model_config
from tests.tables import beside

LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 96, "hidden_size": 48}
LLAMA |= {"intermediate_size": 80, "num_hidden_layers": 6, "num_attention_heads": 6}
LLAMA |= {"max_position_embeddings": 64}


def llama(**changes: Any) -> Shape:
    return Shape.from_hf({**LLAMA, **changes})


def every_split(num_layers: int, stages: int) -> Iterator[Bounds]:
    for cuts in itertools.combinations(range(2, num_layers + 1), stages - 1):
        yield 0, *cuts, num_layers + 2


def random_costs(num_layers: int, stages: int, seed: int) -> list[list[int]]:
    """Return the cost of each unit on each stage; few distinct values, so that splits tie."""
    draw = random.Random(seed)
    return [[draw.randrange(4) for _ in range(num_layers + 2)] for _ in range(stages)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("num_layers", "stages"), [(1, 1), (4, 1), (4, 4), (6, 2), (8, 3), (9, 5)])
def test_a_split_is_the_best_of_all(num_layers: int, stages: int, seed: int) -> None:
    costs = random_costs(num_layers, stages, seed)

    def cost(stage: int, begin: int, end: int) -> int:
        return sum(costs[stage][begin:end])

    def rank(bounds: Bounds) -> tuple[int, int, Bounds]:
        sums = [cost(stage, *bounds[stage : stage + 2]) for stage in range(stages)]
        return max(sums), sum(each * each for each in sums), bounds

    assert balanced(num_layers, stages, cost) == min(every_split(num_layers, stages), key=rank)


def test_a_head_as_long_as_two_layers_takes_two_layers_away() -> None:
    """One layer: 4 h^2 + 3 h f weights, 12 h T for attention; the head has V h weights."""
    hidden, width, tokens = 48, 80, 32
    layer = 6 * (4 * hidden**2 + 3 * hidden * width) + 12 * hidden * tokens
    shape = llama(vocab_size=2 * layer // (6 * hidden))
    assert flops_per_unit(shape, tokens) == [0, *[layer] * 6, pytest.approx(2 * layer, rel=1e-3)]
    assert layers_per_stage(split(shape, 2, tokens)) == (4, 2)
    # Layers that run forward twice cost a third more; the head does not.
    larger = llama(vocab_size=16 * layer // (30 * hidden))
    assert layers_per_stage(split(larger, 2, tokens)) == (5, 1)
    assert layers_per_stage(split(larger, 2, tokens, "full")) == (4, 2)
    assert layers_per_stage(split(larger, 2, tokens, mlp_tiles=8)) == (4, 2)


def test_units_cost_what_the_model_costs() -> None:
    for shape in (llama(), llama(tie_word_embeddings=True)):
        assert sum(flops_per_unit(shape, 16)) == flops_per_token(shape, 16)


def test_stage_split_of_a_published_model() -> None:
    """Llama-3-8B's head has 525,336,576 weights, each of its layers 218,112,000."""
    shape = Shape.from_hf(find_model_config("llama-3-8b")[0])
    bounds = split(shape, 4, 4096)
    assert layers_per_stage(bounds) == (8, 9, 9, 6)
    layer, embedding = 218_112_000, 525_336_576
    ends = embedding + 8 * layer, 6 * layer + 4096 + embedding
    assert stage_parameters(shape, bounds) == (ends[0], 9 * layer, 9 * layer, ends[1])


@pytest.mark.parametrize(
    ("num_layers", "stages", "expected"), beside(__file__, "stages.toml")["even"]
)
def test_equal_layers_split_evenly(num_layers: int, stages: int, expected: list[int]) -> None:
    assert [*layers_per_stage(split_evenly(num_layers, stages))] == expected


@pytest.mark.parametrize("layers", [[5], [1, 4], [9, 7], [3, 1, 2, 1]])
def test_layers_per_stage_and_bounds_are_inverse(layers: list[int]) -> None:
    bounds = bounds_of(layers, sum(layers), len(layers))
    assert bounds[0] == 0
    assert bounds[-1] == sum(layers) + 2
    assert list(layers_per_stage(bounds)) == layers


def test_what_is_no_split_says_why() -> None:
    with pytest.raises(ValueError, match=r"\[9, 7\] holds 16 decoder layers of 17"):
        bounds_of([9, 7], 17, 2)
    with pytest.raises(ValueError, match=r"\[9, 7\] lists 2 stages of 4"):
        bounds_of([9, 7], 16, 4)
    for partition in ([9, 0], [9, "7"], [9, 7.5], [9, True]):
        with pytest.raises(ValueError, match="a whole number of decoder layers, at least 1"):
            bounds_of(partition, 9, 2)
    for divide in (
        lambda: split(llama(), 7, 32),
        lambda: split_evenly(6, 7),
        lambda: balanced(6, 7, lambda *_: 0),
    ):
        with pytest.raises(ValueError, match="7 pipeline stages for 6 decoder layers"):
            divide()


@pytest.mark.parametrize("tied", [False, True])
def test_the_parts_of_a_model_are_the_model(tied: bool) -> None:
    shape = llama(tie_word_embeddings=tied)
    bounds = (0, 2, 5, 8)
    parts = [stage_shape(shape, bounds, stage) for stage in range(3)]
    assert [part.num_layers for part in parts] == [1, 3, 2]
    assert [len(part.sliding_windows) for part in parts] == [1, 3, 2]
    copied = 96 * 48 if tied else 0
    assert sum(stage_parameters(shape, bounds)) == num_parameters(shape) + copied
    first, middle, last = ([tensor.name for tensor in part.tensors()] for part in parts)
    assert first[0] == "model.embed_tokens.weight"
    layers = shape.body.layers[1:4]
    assert num_parameters(parts[1]) == sum(tensor.numel for layer in layers for tensor in layer)
    assert all(name.startswith("model.layers.") for name in middle)
    assert last[-1] == (first[0] if tied else "lm_head.weight")


def test_only_the_tied_weight_is_copied() -> None:
    """GPT-2 ties its token embedding; only the first stage has that of positions."""
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "vocab_size": 96}
    shape = Shape.from_hf({"model_type": "gpt2", **sizes})
    assert stage_shape(shape, (0, 4), 0) == shape
    last = [tensor.name for tensor in stage_shape(shape, (0, 2, 4), 1).tensors()]
    assert "transformer.wte.weight" in last
    assert "transformer.wpe.weight" not in last


def deepspeeds_row(stages: int, micro_batches: int, stage: int) -> tuple[Work, ...]:
    """Return the same from DeepSpeed, whose instructions name buffers instead of micro-batches."""
    done = {ForwardPass: 0, BackwardPass: 0}
    words = {ForwardPass: "forward", BackwardPass: "backward"}
    row: list[Work] = []
    for instructions in TrainSchedule(micro_batches, stages, stage).steps():
        computing = [type(each) for each in instructions if type(each) in done]
        row.append((words[computing[0]], done[computing[0]]) if computing else None)
        for kind in computing:
            done[kind] += 1
    return tuple(row)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
def test_the_schedule_is_deepspeeds(stages: int, micro_batches: int) -> None:
    rows = schedule(stages, micro_batches)
    theirs = [deepspeeds_row(stages, micro_batches, stage) for stage in range(stages)]
    assert list(rows) == theirs
    idle = sum(work is None for row in rows for work in row)
    assert idle / (stages * len(rows[0])) == pytest.approx(bubble(stages, micro_batches))
    for stage, row in enumerate(rows):
        steps = [0 if work is None else 1 if work[0] == "forward" else -1 for work in row]
        most = max(itertools.accumulate(steps))
        assert most == in_flight(stages, stage, micro_batches)
        assert TrainSchedule(micro_batches, stages, stage).num_pipe_buffers() == max(2, most)
