"""Splits decoder layers over pipeline stages; the pipeline schedule.

A pipelined model is a list of units in forward order (`Body.units`): unit 0 is everything before
the decoder layers, units 1 to L are the layers, and unit L + 1 is everything after them. A split is
a tuple of stages + 1 bounds: stage s holds units [bounds[s], bounds[s + 1]). For example, (0, 9,
18) splits 16 layers into 8 and 8. Every stage holds at least one decoder layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Literal

from harness.layout.recompute import Checkpointing, flops_again
from harness.layout.shape import Body, Shape, flops_per_unit, num_parameters

Bounds = tuple[int, ...]
Work = tuple[Literal["forward", "backward"], int] | None
"""A pass and its micro-batch; None while a stage is idle."""


def split(
    shape: Shape,
    stages: int,
    seq_len: int,
    checkpointing: Checkpointing = "none",
    mlp_tiles: int = 1,
) -> Bounds:
    """Return the split that minimises the FLOPs of the slowest stage, including recomputation.
    Raises ValueError if there are more stages than decoder layers.
    """
    again = flops_again(shape, seq_len, checkpointing, mlp_tiles)
    flops = map(sum, zip(flops_per_unit(shape, seq_len), again, strict=True))
    return _balanced_sums(tuple(accumulate(flops, initial=0)), stages)


@lru_cache(maxsize=256)
def _balanced_sums(ends: tuple[int, ...], stages: int) -> Bounds:
    layers = len(ends) - 3
    return balanced(layers, stages, lambda _stage, begin, end: ends[end] - ends[begin])


def balanced(num_layers: int, stages: int, cost: Callable[[int, int, int], int]) -> Bounds:
    """Return the split that minimises the highest `cost(stage, begin, end)` of units [begin, end).

    Exact: dynamic programming over stages. Ties are broken by the least sum of squares, then by
    fewer layers on earlier stages, which keep more micro-batches in flight. Raises ValueError if
    there are more stages than layers.
    """
    _check_each_has_a_layer(num_layers, stages)

    def search(most: int, squares: bool) -> tuple[int, Bounds]:
        """Minimise the largest cost or the sum of squares; no stage may cost more than `most`."""
        best: dict[int, tuple[int, Bounds]] = {0: (0, (0,))}  # by next unit
        for stage in range(stages):
            # Later stages need at least one layer each.
            ends = range(stage + 2, num_layers - stages + stage + 3)
            options: dict[int, tuple[int, Bounds]] = {}
            for end in ends if stage < stages - 1 else (num_layers + 2,):
                for begin, (value, bounds) in best.items():
                    stage_cost = cost(stage, begin, end) if begin < end else None
                    if stage_cost is None or stage_cost > most:
                        continue
                    total = value + stage_cost * stage_cost if squares else max(value, stage_cost)
                    option = (total, (*bounds, end))
                    options[end] = min(option, options.get(end, option))
            best = options
        return best[num_layers + 2]

    even = split_evenly(num_layers, stages)
    largest, _ = search(max(cost(n, *ends) for n, ends in enumerate(pairwise(even))), False)
    return search(largest, True)[1]


def split_evenly(num_layers: int, stages: int) -> Bounds:
    """Return a split with equal numbers of layers, for models of which nothing else is known.

    Extra layers go to the middle stages first, because the first stage has the embedding and the
    last has the head. Raises ValueError if there are more stages than layers.
    """
    _check_each_has_a_layer(num_layers, stages)
    each, left = divmod(num_layers, stages)
    fuller = [*range(1, stages - 1), 0][:left]
    layers = [each + (stage in fuller) for stage in range(stages)]
    return bounds_of(layers, num_layers, stages)


def bounds_of(layers_per_stage: Sequence[Any], num_layers: int, stages: int) -> Bounds:
    """Return the split with these numbers of decoder layers per stage.

    Raises ValueError if they do not form a split.
    """
    layers = list(layers_per_stage)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in layers):
        raise ValueError(
            f"{layers}: every stage holds a whole number of decoder layers, at least 1"
        )
    if len(layers) != stages:
        raise ValueError(f"{layers} lists {len(layers)} stages of {stages}")
    if sum(layers) != num_layers:
        raise ValueError(f"{layers} holds {sum(layers)} decoder layers of {num_layers}")
    ends = [1 + end for end in accumulate(layers)]
    return 0, *ends[:-1], num_layers + 2


def layers_per_stage(bounds: Bounds) -> tuple[int, ...]:
    """Return the number of decoder layers on each stage; the inverse of `bounds_of`."""
    ends = [1, *bounds[1:-1], bounds[-1] - 1]
    return tuple(end - begin for begin, end in pairwise(ends))


@lru_cache(maxsize=4096)
def stage_shape(shape: Shape, bounds: Bounds, stage: int) -> Shape:
    """Return the shape of one stage's part of a model.

    A tied embedding is on the first stage and, as the head, on the last; each keeps a copy.
    """
    begin, end, last = bounds[stage], bounds[stage + 1], bounds[-1] - 1
    layers = slice(max(begin, 1) - 1, min(end, last) - 1)
    body, after = shape.body, shape.body.after if end > last else ()
    if stage and end > last and shape.tied:
        after += body.before[:1]
    before = () if stage else body.before
    part = Body(before, body.layer_prefix, body.layers[layers], after, layers.start)
    windows = shape.sliding_windows[layers]
    return replace(shape, num_layers=len(part.layers), sliding_windows=windows, body=part)


def stage_parameters(shape: Shape, bounds: Bounds) -> tuple[int, ...]:
    """Return the number of parameters on each stage; a tied embedding counts on both ends."""
    return tuple(
        num_parameters(stage_shape(shape, bounds, stage)) for stage in range(len(bounds) - 1)
    )


def in_flight(stages: int, stage: int, micro_batches: int) -> int:
    """Return the largest number of micro-batches that a stage has run forward but not yet backward.

    The warm-up of 1F1B (PipeDream-Flush, arXiv 2006.09503); DeepSpeed's num_pipe_buffers.
    """
    return min(stages - stage, micro_batches)


def bubble(stages: int, micro_batches: int) -> float:
    """Return the fraction of a step for which each stage is idle if all stages are equally fast.

    (p - 1) / (m + p - 1): GPipe, arXiv 1811.06965, section 2.3; the same for 1F1B.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def schedule(stages: int, micro_batches: int) -> tuple[tuple[Work, ...], ...]:
    """Return the work of each stage at each tick of a step: DeepSpeed's TrainSchedule, 1F1B.

    Forward and backward passes take one tick each; adjacent stages are offset by one tick.
    """
    rows: list[list[Work]] = []
    for stage in range(stages):
        row: list[Work] = [None] * (2 * (micro_batches + stages - 1))
        for batch in range(micro_batches):
            row[2 * batch + stage] = ("forward", batch)
            row[2 * batch + 2 * stages - 1 - stage] = ("backward", batch)
        rows.append(row)
    return tuple(map(tuple, rows))


def _check_each_has_a_layer(num_layers: int, stages: int) -> None:
    if stages > num_layers:
        raise ValueError(
            f"{stages} pipeline stages for {num_layers} decoder layers: every stage needs one"
        )
