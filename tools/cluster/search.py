"""Counts every layout of a job."""

import argparse
import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from harness.errors import ConfigError
from harness.estimate.inputs import Inputs
from harness.estimate.layer_bytes import layer_activations
from harness.estimate.step_time.layer import layer_passes
from harness.estimate.step_time.step import computed, estimate_time, synchronised
from harness.estimate.timeline import batch, estimate_memory, states_that_differ
from harness.layout.recompute import REVERSIBLE
from harness.layout.stages import in_flight
from tools.cluster.choose import Answer, answer_of
from tools.cluster.count import Counted, Question
from tools.cluster.layouts import KEYS, Layout, layouts

_Key = tuple[Hashable, ...]


def answer(args: argparse.Namespace, question: Question) -> Answer:
    """Return all layouts of a job, with the recommended one."""
    return answer_of(count_all(args, question))


def count_all(args: argparse.Namespace, question: Question) -> list[Counted]:
    """Return all layouts of a job, counted. Raises ConfigError if there is none."""
    per_node, run = question.machine.gpus_per_node, question.run
    fixed = {name: run.get(key) for name, key in KEYS.items() if run.is_set(key)}
    if question.some.checkpointing == REVERSIBLE:
        fixed["checkpointing"] = REVERSIBLE
    every = layouts(
        *(question.some.shape, args.gpus, per_node, args.seq_len, args.global_batch),
        lora=bool(args.lora),
        quantized=bool(args.quantize),
        fixed=fixed,
    )
    gc.disable()  # it takes a fifth of the time, and there are no cycles to collect
    try:
        counted = [*count(question, (one for one in every if one.state in question.base))]
    finally:
        gc.enable()
    if not counted and "micro_batch" in fixed:
        raise ConfigError(
            f"train.micro_batch={fixed['micro_batch']} on any number of data ranks of {args.gpus} "
            f"GPUs does not divide --global-batch {args.global_batch}: leave it out"
        )
    if not counted:
        raise ConfigError(
            f"--global-batch {args.global_batch} is not divisible by any number of data ranks of "
            f"{args.gpus} GPUs: use a multiple of {args.gpus}"
        )
    return counted


def count(question: Question, layouts: Iterable[Layout]) -> Iterator[Counted]:
    """Yield each layout with its memory and time."""
    memo = Memo(question.some)
    for layout in layouts:
        inputs = question.inputs(layout)
        memory = estimate_memory(inputs, question.device_bytes, memo)
        yield Counted(layout, question, memory, estimate_time(inputs, question.machine, memo))


class Memo:
    """Remembers parts that layouts of one question share, by what they depend on.

    A rank's states do not depend on the micro-batch, its activations do not depend on ZeRO, and a
    stage's seconds are made of two such parts.
    """

    def __init__(self, some: Inputs) -> None:
        """`some`: the inputs of any layout; all have its model."""
        self.parts: dict[_Key, Any] = {}
        numbers: dict[_Key, int] = {}
        layers = some.shape.body.layers
        traced = some.trace.layers if some.trace else (None,) * len(layers)
        kinds = zip(map(id, layers), some.shape.sliding_windows, traced, strict=True)
        self._layers = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        self._keys: dict[Callable[..., Any], Callable[[Inputs, int], _Key]] = {
            **dict.fromkeys((layer_activations, layer_passes), self._of_layer),
            **dict.fromkeys((states_that_differ, synchronised), self._of_states),
            **dict.fromkeys((batch, computed), self._of_batch),
        }

    def __call__(self, part: Callable[..., Any], run: Inputs, place: int, *rest: object) -> Any:
        """Return part(run, place, *rest); `place`: a pipeline stage, or a layer of one."""
        key = part, *self._keys[part](run, place)
        if key not in self.parts:
            self.parts[key] = part(run, place, *rest)
        return self.parts[key]

    def _of_layer(self, stage: Inputs, index: int) -> _Key:
        """Return what a layer's cost depends on, which excludes stages, ZeRO and checkpointing."""
        grid, kind = stage.grid, self._layers[stage.first_layer + index]
        sizes = grid.tensor, grid.sequence, grid.expert, stage.micro_batch, stage.mlp_tiles
        return kind, *sizes, stage.divides_residuals, stage.liger, stage.compiled

    def _of_states(self, run: Inputs, stage: int) -> _Key:
        grid = run.grid  # ZeRO treats sequence-parallel ranks as data ranks
        axes = grid.pipeline, grid.tensor, grid.expert, run.mlp_tiles, run.compiled
        return run.zero, *axes, run.grad_accum > 1, *self._held(run, stage)

    def _of_batch(self, run: Inputs, stage: int) -> _Key:
        way = run.checkpointing, run.activation_offload, run.mlp_tiles, run.liger, run.compiled
        # If stages share a node, their offloaded activations add up on its host.
        adds_up = (
            run.activation_offload and run.grid.world_size // run.grid.pipeline % run.gpus_per_node
        )
        apart = stage if adds_up else 0
        return run.grid, run.micro_batch, *way, apart, *self._held(run, stage)

    def _held(self, run: Inputs, stage: int) -> _Key:
        """Return what a pipeline stage holds. Of stages that hold the same, the first has the most
        micro-batches in flight: no later one needs more memory, unless it also accumulates
        gradients.
        """
        if run.bounds is None:
            return ()
        begin, end = (max(bound, 1) - 1 for bound in run.bounds[stage : stage + 2])
        every = run.checkpointing
        offset = begin % every if isinstance(every, int) else 0
        # Rules match parameter names, which contain the layer's index.
        place = stage if run.rules else (stage == 0, stage == run.grid.pipeline - 1)
        accumulates = run.grad_accum > in_flight(run.grid.pipeline, stage, run.grad_accum)
        return *self._layers[begin:end], offset, place, accumulates
