"""3D parallelism: a step rank by rank, each rank's place and groups, and its memory."""

from __future__ import annotations

from dataclasses import replace

from harness.layout.grid import Axis, Grid
from harness.layout.stages import layers_per_stage
from harness.plan.duration import step_time
from tools.layout.moments import moments
from tools.studio_app.figures import Drawing, Figure, Table, numbers
from tools.studio_app.page import Choice, Page, Slider, Values
from tools.studio_app.plans import (
    ACCUMULATION,
    CONTEXT,
    GPU,
    MICRO_BATCH,
    MODELS,
    PER_NODE,
    SEQ_LEN,
    VERDICTS,
    estimate_of,
    gib,
    memory_bars,
    planned,
)
from tools.studio_app.ranks import MOMENTS, moment_picture, places_picture
from tools.studio_app.svg import series
from tools.studio_pages.plan import spent

_CAPTIONS = {
    "passes": "Passes: each stage computes a micro-batch, forward or backward, or waits",
    "sums": "In each layer of them, ranks of a tensor group add up their parts (the bars)",
    "sends": "Hidden states go on to the next stage, gradients back; arrows: the rank's group",
    "gradients": "Data ranks add up the gradients of all micro-batches; the line: the rank's group",
    "optimizer": "Each rank's optimizer steps with its share of the states",
    "weights": "ZeRO 1: data ranks gather the stepped weights; the line: the rank's group",
}
_AXES: dict[Axis, str] = {
    "tensor": "ranks that hold shards of one matrix; they communicate twice in every layer "
    "and pass",
    "data": "ranks that read different samples; they add gradients once per step",
    "pipeline": "ranks that hold successive layers; they pass on activations",
}


def figures(values: Values) -> list[Figure]:
    """Return the ranks on their nodes, a rank's groups, and the memory of each stage."""
    stages, tensor, nodes = values["stages"], values["tensor"], values["nodes"]
    grid = Grid(nodes * PER_NODE, pipeline=stages, tensor=tensor)
    changes = (f"pipeline.stages={stages}", f"tensor_parallel.autotp_size={tensor}")
    plan = planned({**values, "json": "3d", "gpus": grid.world_size}, changes)
    assert plan.stages is not None, "at least two stages"
    estimate, step = estimate_of(plan), step_time(plan)
    assert step is not None, "every GPU of the page is known"
    waits = step.terms["bubble"] / step.seconds
    axis, rank = values["axis"], min(values["rank"], grid.world_size - 1)
    group = grid.group(axis, rank)
    turns = [*moments(grid, plan.grad_accum, estimate.inputs.zero.stage)]
    now = round(values["moment"] / 100 * (len(turns) - 1))
    turn = turns[now]
    when = f"tick {turn.tick + 1} of {turns[-1].tick + 1}" if any(turn.work) else "after the passes"
    verdict, peak = estimate.verdict, f"peak {gib(estimate.worst.peak)}"
    by_stage = {
        f"stage {n}: {count} layers": part.phase(part.peak_phase)
        for n, (count, part) in enumerate(
            zip(layers_per_stage(plan.stages), estimate.fullest, strict=True)
        )
    }
    return [
        numbers(
            ("Ranks", str(grid.world_size), f"{stages} x {grid.data} x {tensor}"),
            ("Verdict", verdict, peak, VERDICTS.get(verdict)),
            ("Rank", str(rank), grid.described(rank).strip(" ()")),
            (f"Its {axis} group", ", ".join(map(str, group)), _AXES[axis]),
            ("Moment", f"{now + 1} of {len(turns)}", when),
            ("A step", f"{step.seconds:,.2f} s", f"{waits:.0%} waiting"),
        ),
        Drawing(_CAPTIONS[turn.kind], moment_picture(grid, nodes, rank, turn), MOMENTS),
        spent(step),
        Drawing(
            f"{nodes} nodes of {PER_NODE} GPUs; framed: rank {rank} and its {axis} group",
            places_picture(grid, nodes, rank, group),
            [(series(stage), f"stage {stage}") for stage in range(stages)],
        ),
        memory_bars("The fullest GPU of each stage at its peak", by_stage, estimate.device_bytes),
        _groups(grid),
    ]


def crossing(grid: Grid, axis: Axis) -> int:
    """Return the number of groups along an axis that span several nodes."""
    return sum(len({rank // PER_NODE for rank in group}) > 1 for group in grid.groups(axis))


def _groups(grid: Grid) -> Table:
    rows = []
    for axis, says in _AXES.items():
        groups = grid.groups(axis)
        counts = (len(groups), len(groups[0]), crossing(grid, axis))
        rows.append((axis, *map(str, counts), says))
    head = "axis|groups|ranks in each|crossing nodes|who they are"
    return Table("Groups of ranks", head, rows)


PAGE = Page(
    "hybrid",
    (
        Choice("model", "Model", MODELS, "llama-65b"),
        GPU,
        Slider("nodes", "Nodes", (1, 2, 4, 8, 16), 4, "of 8 GPUs"),
        Slider("stages", "Pipeline stages", (2, 4, 8, 16), 4),
        Slider("tensor", "Tensor parallel", (1, 2, 4, 8), 4, "GPUs", "GPU"),
        replace(SEQ_LEN, default=2048),
        *(CONTEXT, MICRO_BATCH, ACCUMULATION),
        Choice("checkpointing", "Checkpointing", ("none", "selective", "full"), "full"),
        Choice("axis", "Frame the group of", tuple(_AXES), "tensor"),
        Slider("rank", "Rank", tuple(range(128)), 0),
        Slider("moment", "Place in the step", tuple(range(101)), 10, "%", plays=True),
    ),
    figures,
)
