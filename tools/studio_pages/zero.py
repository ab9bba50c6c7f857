"""ZeRO stages compared: memory of a GPU, and bytes sent in a step."""

from dataclasses import replace
from typing import NamedTuple

from harness.estimate.fit import with_stage
from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import GIB
from harness.estimate.step_time.exchanges import Reductions, reductions
from harness.estimate.step_time.machine import machine_of
from harness.estimate.timeline import Estimate, division_problems, estimate_memory
from harness.report.formatting import gib
from tools.memory.text import paper_bytes
from tools.studio_app import plans
from tools.studio_app.figures import Bars, Figure, Table, numbers
from tools.studio_app.page import Choice, Page, Slider, Values, powers_of_two

_ONE_BYTE_A_SECOND = replace(
    machine_of("h100-sxm", 8, "bf16"),
    **dict.fromkeys(("link_rate", "network_rate"), 1.0),
    **dict.fromkeys(("link_latency", "network_latency", "gathered_layer_seconds"), 0.0),
    host_link_rate=float("inf"),
)
_STAGES = {
    "ZeRO 0": "nothing (in bf16 and fp16, train.py runs it as stage 1)",
    "ZeRO 1": "optimizer states",
    "ZeRO 2": "gradients, too",
    "ZeRO 3": "weights, too",
}
"""The four stages, and what each divides."""


class Traffic(NamedTuple):
    """Bytes that one GPU sends in a step, or the seconds that they take."""

    gradients: float
    weights: float


def figures(values: Values) -> list[Figure]:
    """Return memory and traffic of the four stages, all else equal."""
    inputs, device = inputs_of(values)
    estimates = [_estimate(inputs, stage, device) for stage in range(4)]
    flows = [traffic(with_stage(inputs, stage)) for stage in range(4)]
    by_stage = list(zip(_STAGES.items(), estimates, strict=True))
    sent = {name: [getattr(flow, name) / GIB for flow in flows] for name in Traffic._fields}
    return [
        numbers(
            *(
                (
                    name,
                    gib(e.worst.peak),
                    f"divides {divided}; {e.verdict}",
                    plans.VERDICTS.get(e.verdict),
                )
                for (name, divided), e in by_stage
            )
        ),
        plans.memory_bars(
            f"The fullest of {inputs.grid.world_size} GPUs at its peak",
            {name: e.worst.phase(e.worst.peak_phase) for (name, _), e in by_stage},
            device,
            360,
        ),
        Bars(
            "Sent by each GPU in one step",
            "GiB",
            list(_STAGES),
            sent,
            {name: name for name in sent},
            height=300,
        ),
        _table(inputs, estimates, flows, values["gpu"]),
    ]


def traffic(inputs: Inputs) -> Traffic:
    """Return the bytes that each GPU sends per step (arXiv 1910.02054, section 7).

    They are the planner's seconds over links of 1 byte/s without latency.
    """
    one_node = replace(inputs, gpus_per_node=inputs.grid.world_size)
    return _each_step(one_node, reductions(one_node, _ONE_BYTE_A_SECOND))


def _each_step(inputs: Inputs, each: Reductions) -> Traffic:
    batches = inputs.grad_accum
    return Traffic(batches * each.gradients + each.last, batches * each.weights + each.updated)


def inputs_of(values: Values) -> tuple[Inputs, int]:
    """Return the inputs of the plan's estimate, and the device's bytes."""
    estimate = plans.estimate_of(plans.planned(values))
    return estimate.inputs, estimate.device_bytes or 0


def _estimate(inputs: Inputs, stage: int, device: int) -> Estimate:
    staged = with_stage(inputs, stage)
    if problems := division_problems(staged):
        raise ValueError("; ".join(problems))
    return estimate_memory(staged, device)


def _table(inputs: Inputs, estimates: list[Estimate], flows: list[Traffic], gpu: str) -> Table:
    machine = machine_of(gpu, inputs.gpus_per_node, inputs.products)
    rows = []
    for stage, (estimate, flow) in enumerate(zip(estimates, flows, strict=True)):
        staged = with_stage(inputs, stage)
        rows.append(
            (
                f"ZeRO {stage}",
                f"{paper_bytes(inputs.parameters, stage, inputs.shards) / GIB:,.2f}",
                f"{estimate.worst.peak / GIB:,.2f}",
                estimate.worst.peak_phase,
                f"{sum(flow) / GIB:,.2f}",
                f"{sum(flow) / sum(flows[1]):.2f} x" if sum(flows[1]) else "",
                f"{sum(_each_step(staged, reductions(staged, machine))):,.3f}",
            )
        )
    head = "stage|states by the paper|peak|in phase|sent per step|of stage 1's|s on links"
    return Table("All four, GiB", head, rows)


PAGE = Page(
    "zero",
    (
        Choice("model", "Model", plans.MODELS, "llama-13b"),
        plans.GPU,
        Slider("gpus", "GPUs", powers_of_two(1, 1024), 8),
        replace(plans.SEQ_LEN, default=2048),
        *(plans.CONTEXT, plans.MICRO_BATCH),
        *(replace(plans.ACCUMULATION, default=1), plans.CHECKPOINTING),
    ),
    figures,
)
