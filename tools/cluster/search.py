"""Counts every layout of a job from parts that many layouts share.

A rank's states do not depend on the micro-batch, its activations do not depend on ZeRO, and a
stage's seconds are made of two such parts. Each part is therefore counted once, by the rules of
harness/estimate, and a layout is a sum of parts. tests/test_plan_cluster.py checks the sums against
estimates of whole layouts.
"""

from __future__ import annotations

import argparse
import gc
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from operator import add
from typing import Any, TypeVar

from harness.errors import ConfigError
from harness.estimate.activations import attention_copies
from harness.estimate.host import driver_bytes
from harness.estimate.inputs import Inputs
from harness.estimate.layer_bytes import Layer, layer_activations
from harness.estimate.memory_item import Interval
from harness.estimate.step_time.layer import Passes, layer_passes
from harness.estimate.step_time.machine import Machine
from harness.estimate.step_time.step import (
    Computed,
    Synchronised,
    computed,
    step_terms,
    synchronised,
)
from harness.estimate.timeline import (
    Totals,
    batch_parts,
    fullest_node,
    shards_that_differ,
    state_parts,
)
from harness.layout.recompute import REVERSIBLE
from harness.layout.stages import in_flight
from tools.cluster.choose import Answer, answer_of
from tools.cluster.count import Counted, Question, Rank
from tools.cluster.layouts import KEYS, Layout, bounds_of, layouts

_T = TypeVar("_T")
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
        counted = [*Search(question).count(one for one in every if one.state in question.base)]
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


class Search:
    """Counts the layouts of one question, with a cache of shared parts."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._layer_kinds = _layer_kinds(question.some)
        self._stage_kinds: dict[_Key, int] = {}
        self._parts: defaultdict[str, dict[_Key, Any]] = defaultdict(dict)

    def count(self, layouts: Iterable[Layout]) -> Iterator[Counted]:
        """Yield each layout with its memory and time."""
        return map(self._count, layouts)

    def _count(self, layout: Layout) -> Counted:
        whole = _Whole(self._question, layout)
        kinds = self._kinds_of(whole)
        ranks: list[Rank] = []
        copies: list[int] = []
        hosts: dict[_Key, int] = {}
        seconds: dict[int, tuple[Computed, Synchronised]] = {}
        # If stages share a node, their offloaded activations add up on its host.
        apart = self._question.gpus // layout.pipeline
        adds_up = layout.activation_offload and apart % whole.base.gpus_per_node != 0
        by_stage = []
        for stage, kind in enumerate(kinds):
            flying = in_flight(layout.pipeline, stage, whole.grad_accum)
            accumulates = whole.grad_accum > flying
            # Of stages that hold the same, the first has the most micro-batches in flight. No later
            # one needs more memory, unless it also accumulates gradients.
            alike = (kind, accumulates, flying if adds_up else 0)
            if alike not in hosts:
                batch, copied = self._batch(whole, stage, kind, flying)
                states = self._states_of(whole, stage, kind, accumulates)
                here = [Rank(stage, each, batch) for each in states]
                ranks += here
                copies += [copied] * len(here)
                hosts[alike] = max(max(map(add, each.host, batch.host)) for each in states)
            by_stage.append(hosts[alike])
            if kind not in seconds:
                seconds[kind] = self._seconds(whole, stage, kind)
        peaks = [rank.peak for rank in ranks]
        worst = peaks.index(max(peaks))
        return Counted(
            layout=layout,
            question=self._question,
            worst=ranks[worst],
            driver=self._driver(whole),
            host_bytes_per_node=fullest_node(
                by_stage, self._question.gpus, whole.base.gpus_per_node
            ),
            terms=step_terms(
                [seconds[kind] for kind in kinds],
                whole.grad_accum,
                whole.base.zero.overlap_comm,
                self._question.machine,
            ),
            copies=copies[worst],
        )

    def _once(self, name: str, key: _Key, count: Callable[[], _T]) -> _T:
        """Return the part with this name and key; it is counted only the first time."""
        parts = self._parts[name]
        if key not in parts:
            parts[key] = count()
        return parts[key]

    def _kinds_of(self, whole: _Whole) -> list[int]:
        """Return a number for each pipeline stage, equal for stages that hold the same."""
        numbers = self._stage_kinds

        def kinds() -> list[int]:
            stages = _stages(whole, self._layer_kinds)
            return [numbers.setdefault(each, len(numbers)) for each in stages]

        layout = whole.layout
        return self._once("kinds", (layout.pipeline, layout.checkpointing, layout.mlp_tiles), kinds)

    def _layer_key(self, inputs: Inputs, index: int) -> _Key:
        """Return what a layer's cost depends on, which excludes stages, ZeRO and checkpointing."""
        grid = inputs.grid
        kind = self._layer_kinds[inputs.first_layer + index]
        sizes = grid.tensor, grid.sequence, grid.expert, inputs.micro_batch, inputs.mlp_tiles
        return kind, *sizes, inputs.divides_residuals, inputs.liger, inputs.compiled

    def _layer(self, inputs: Inputs, index: int) -> Layer:
        key = self._layer_key(inputs, index)
        return self._once("layer", key, lambda: layer_activations(inputs, index))

    def _passes_of(self, inputs: Inputs, index: int, machine: Machine) -> Passes:
        key = self._layer_key(inputs, index)
        return self._once("passes", key, lambda: layer_passes(inputs, index, machine))

    def _states_of(self, whole: _Whole, stage: int, kind: int, accumulates: bool) -> list[Totals]:
        layout = whole.layout
        key = (
            *(*layout.state, layout.tensor, layout.expert, layout.pipeline),
            *(kind, accumulates, whole.grad_accum > 1, layout.mlp_tiles, whole.inputs.compiled),
        )

        def states() -> list[Totals]:
            # ZeRO treats sequence-parallel ranks as data ranks.
            inputs = replace(whole.inputs, grid=replace(whole.inputs.grid, sequence=1))
            shards = shards_that_differ(inputs.of_stage(stage))
            return [Totals(tuple(state_parts(inputs, stage, shard))) for shard in shards]

        return self._once("states", key, states)

    def _batch(self, whole: _Whole, stage: int, kind: int, flying: int) -> tuple[Totals, int]:
        key: _Key = (*whole.axes, kind)
        if whole.layout.pipeline > 1:
            key += (flying, whole.grad_accum > 1)

        def batch() -> tuple[Totals, int]:
            here = whole.stage(stage)
            copies = Totals((attention_copies(here),)).unshared
            return Totals(tuple(batch_parts(here, self._layer))), copies

        return self._once("batch", key, batch)

    def _seconds(self, whole: _Whole, stage: int, kind: int) -> tuple[Computed, Synchronised]:
        layout, machine = whole.layout, self._question.machine
        key = (*layout.state, layout.tensor, layout.expert, layout.pipeline, kind)

        def work() -> Computed:
            return computed(whole.stage(stage), machine, self._passes_of)

        return (
            self._once("computed", (*whole.axes, kind), work),
            self._once("synchronised", key, lambda: synchronised(whole.stage(stage), machine)),
        )

    def _driver(self, whole: _Whole) -> Interval:
        layout, base = whole.layout, whole.base
        key = (layout.pipeline, layout.tensor, layout.sequence, layout.expert, layout.hpz)
        ranks = base.zero.secondary_ranks
        return self._once("driver", key, lambda: driver_bytes(whole.inputs.grid, base.gpu, ranks))


class _Whole:
    """A layout with the inputs of its parts, made on demand."""

    def __init__(self, question: Question, layout: Layout) -> None:
        self.layout, self._question = layout, question
        self._stages: dict[int, Inputs] = {}
        self.base: Inputs = question.base[layout.state]
        replica = layout.pipeline * layout.tensor * layout.sequence
        data = question.gpus // replica
        self.grad_accum = question.global_batch // data // layout.micro_batch
        self.axes = (
            *(layout.pipeline, layout.tensor, layout.sequence, layout.expert, layout.micro_batch),
            *(layout.checkpointing, layout.activation_offload, layout.mlp_tiles),
        )

    @cached_property
    def inputs(self) -> Inputs:
        """Inputs of the layout's estimates."""
        return self._question.inputs(self.layout)

    def stage(self, stage: int) -> Inputs:
        """Return the inputs of one pipeline stage."""
        if stage not in self._stages:
            self._stages[stage] = self.inputs.of_stage(stage)
        return self._stages[stage]


def _layer_kinds(inputs: Inputs) -> list[int]:
    """Return a number for each layer of the model, equal for equal layers."""
    layers = inputs.shape.body.layers
    windows = inputs.shape.sliding_windows
    traced = inputs.trace.layers if inputs.trace else (None,) * len(layers)
    numbers: dict[_Key, int] = {}
    kinds = zip(map(id, layers), windows, traced, strict=True)
    return [numbers.setdefault(kind, len(numbers)) for kind in kinds]


def _stages(whole: _Whole, layer_kinds: list[int]) -> Iterator[_Key]:
    """Yield, for each pipeline stage, the key that its bytes and seconds depend on."""
    layout, base = whole.layout, whole.base
    shape, rules = base.shape, base.rules
    bounds = bounds_of(shape, layout.pipeline, base.seq_len, layout.checkpointing, layout.mlp_tiles)
    if bounds is None:
        yield ("all",)
        return
    for stage in range(layout.pipeline):
        begin, end = max(bounds[stage], 1) - 1, min(bounds[stage + 1], shape.num_layers + 1) - 1
        # Rules match parameter names, which contain the layer's index.
        place = stage if rules else (stage == 0, stage == layout.pipeline - 1)
        every = layout.checkpointing
        offset = begin % every if isinstance(every, int) else 0
        yield end - begin, _short(layer_kinds[begin:end]), place, offset


def _short(values: Iterable[Hashable]) -> _Key:
    """Return the values, or just one of them if all are equal."""
    listed = tuple(values)
    return listed[:1] if len({*listed}) == 1 else listed
