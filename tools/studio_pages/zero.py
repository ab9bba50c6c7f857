"""The page of ZeRO's stages: memory of a GPU, and traffic of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.estimate.dividable import division_problems
from harness.estimate.fit import with_stage
from harness.estimate.held import GIB
from harness.estimate.inputs import Inputs
from harness.estimate.step_time.exchanges import Reductions, reductions
from harness.estimate.step_time.machine import machine_of
from harness.estimate.timeline import Estimate, estimate_memory
from tools.look.palette import COMPONENTS
from tools.memory.text import paper_bytes
from tools.studio_app.charts import Axis, stacked
from tools.studio_app.memory import VERDICTS, gib, grouped_gib
from tools.studio_app.page import (
    Chart,
    Choice,
    Figure,
    Number,
    Numbers,
    Page,
    Slider,
    Table,
    Values,
    powers_of_two,
)
from tools.studio_app.plans import (
    ACCUMULATION,
    CHECKPOINTING,
    CONTEXT,
    GPU,
    MICRO_BATCH,
    MODELS,
    SEQ_LEN,
    estimate_of,
    planned,
    settings_of,
)

_ONE_BYTE_A_SECOND = replace(
    machine_of("h100-sxm", 8, "bf16"),
    **dict.fromkeys(("link_rate", "network_rate"), 1.0),
    **dict.fromkeys(("link_latency", "network_latency", "gathered_layer_seconds"), 0.0),
    host_link_rate=float("inf"),
)
_STAGES = range(4)
_DIVIDES = ("nothing", "optimizer states", "gradients, too", "weights, too")


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU sends in a step, or seconds that it sends."""

    gradients: float
    weights: float

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.gradients + self.weights


def figures(values: Values) -> list[Figure]:
    """Return memory and traffic of the four stages, all else equal."""
    inputs, device = _inputs(values)
    estimates = [_estimate(inputs, stage, device) for stage in _STAGES]
    flows = [traffic(with_stage(inputs, stage)) for stage in _STAGES]
    names = [f"ZeRO {stage}" for stage in _STAGES]
    peaks = [grouped_gib(e.worst.phase(e.worst.peak_phase)) for e in estimates]
    return [
        Numbers(
            [
                Number(
                    name,
                    gib(estimate.worst.peak),
                    f"divides {_DIVIDES[stage]}; {estimate.verdict}",
                    VERDICTS.get(estimate.verdict),
                )
                for stage, (name, estimate) in enumerate(zip(names, estimates, strict=True))
            ]
        ),
        Chart(
            f"The fullest of {inputs.grid.world_size} GPUs at its peak, GiB",
            stacked(
                names,
                {group: [peak[group] for peak in peaks] for group in COMPONENTS},
                Axis("GiB"),
                colours={group: group for group in COMPONENTS},
                limits={f"device, {gib(device)}": device / GIB},
            ),
            360,
        ),
        Chart(
            "Sent by each GPU in one step, GiB",
            stacked(
                names,
                {
                    "gradients": [flow.gradients / GIB for flow in flows],
                    "weights": [flow.weights / GIB for flow in flows],
                },
                Axis("GiB"),
                colours={"gradients": "gradients", "weights": "weights"},
            ),
            300,
        ),
        _table(inputs, estimates, flows, values["gpu"]),
    ]


def traffic(inputs: Inputs) -> Traffic:
    """Return the bytes that each GPU sends in a step: the seconds of the planner's collectives over
    links of one byte a second that answer at once (arXiv 1910.02054, section 7).
    """
    one_node = replace(inputs, gpus_per_node=inputs.grid.world_size)
    return Traffic(*_each_step(one_node, reductions(one_node, _ONE_BYTE_A_SECOND)))


def _each_step(inputs: Inputs, each: Reductions) -> tuple[float, float]:
    """Of gradients and of weights, in a step."""
    batches = inputs.grad_accum
    return batches * each.gradients + each.last, batches * each.weights + each.updated


def _inputs(values: Values) -> tuple[Inputs, int]:
    plan = planned(
        model=values["model"],
        ds_json="zero1",
        gpu=values["gpu"],
        gpus=values["gpus"],
        seq_len=values["seq_len"],
        micro_batch=values["micro_batch"],
        accumulation=values["accumulation"],
        settings=settings_of(values),
    )
    estimate = estimate_of(plan)
    return estimate.inputs, estimate.device_bytes or 0


def _estimate(inputs: Inputs, stage: int, device: int) -> Estimate:
    staged = with_stage(inputs, stage)
    if problems := division_problems(staged):
        raise ValueError("; ".join(problems))
    return estimate_memory(staged, device)


def _table(inputs: Inputs, estimates: list[Estimate], flows: list[Traffic], gpu: str) -> Table:
    machine = machine_of(gpu, inputs.gpus_per_node, inputs.precision)
    seconds = []
    for stage in _STAGES:
        staged = with_stage(inputs, stage)
        seconds.append(Traffic(*_each_step(staged, reductions(staged, machine))).total)
    rows = [
        (
            f"ZeRO {stage}",
            f"{paper_bytes(inputs.parameters, stage, inputs.shards) / GIB:,.2f}",
            f"{estimate.worst.peak / GIB:,.2f}",
            estimate.worst.peak_phase,
            f"{flow.total / GIB:,.2f}",
            f"{flow.total / flows[1].total:.2f} x" if flows[1].total else "",
            f"{seconds[stage]:,.3f}",
        )
        for stage, (estimate, flow) in enumerate(zip(estimates, flows, strict=True))
    ]
    head = (
        "stage",
        "states by the paper",
        "peak",
        "in phase",
        "sent a step",
        "of stage 1's",
        "s on links",
    )
    return Table("All four, GiB", head, rows)


PAGE = Page(
    slug="zero",
    title="ZeRO stages compared",
    controls=(
        Choice("model", "Model", MODELS, "llama-13b"),
        GPU,
        Slider("gpus", "GPUs", powers_of_two(1, 1024), 8),
        replace(SEQ_LEN, default=2048),
        CONTEXT,
        MICRO_BATCH,
        ACCUMULATION,
        CHECKPOINTING,
    ),
    figures=figures,
    computed_by=(
        "harness.estimate.timeline.estimate_memory",
        "harness.estimate.fit.with_stage",
        "harness.estimate.step_time.exchanges.reductions",
        "tools.memory.text.paper_bytes",
    ),
    formula="States by the paper: parameters x (2 weights + 2 gradients + 12 optimizer) bytes, "
    "each part divided by the ranks from stages 3, 2 and 1 on. Sent by a GPU: (r - 1) / r x "
    "parameters x bytes for every reduce-scatter and all-gather; with one micro-batch 2 of "
    "them in stage 0, and 3 from stage 1 on: 1 and 2 add up whole gradients, as DeepSpeed does "
    "unless told otherwise, where the paper counts a reduce-scatter; stage 3 keeps models below "
    "half a billion weights between its passes and gathers them once. Seconds on links: all of "
    "them, though computation hides most. Stage 0 in bf16 or fp16 is run as stage 1.",
    sources=(("ZeRO, arXiv 1910.02054, sections 5 and 7", "https://arxiv.org/abs/1910.02054"),),
)
