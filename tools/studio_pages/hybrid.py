"""The page of 3D parallelism: a step rank by rank, each rank's place and groups, and its memory."""

from __future__ import annotations

from dataclasses import replace

from harness.estimate.held import GIB
from harness.estimate.step_time.step import TERMS, StepTime
from harness.layout.grid import Axis as GridAxis
from harness.layout.grid import Grid
from harness.layout.stages import layers_per_stage
from harness.plan.duration import step_time
from tools.layout.moments import Moment, moments
from tools.look.palette import COMPONENTS
from tools.studio_app.charts import Axis, series_colour, stacked
from tools.studio_app.memory import VERDICTS, gib, grouped_gib
from tools.studio_app.page import (
    Chart,
    Choice,
    Drawing,
    Figure,
    Number,
    Numbers,
    Page,
    Slider,
    Table,
    Values,
)
from tools.studio_app.plans import (
    ACCUMULATION,
    CONTEXT,
    GPU,
    MICRO_BATCH,
    MODELS,
    PER_NODE,
    SEQ_LEN,
    estimate_of,
    planned,
    settings_of,
)
from tools.studio_app.ranks import CELL, MOMENTS, moment_picture, nodes_picture

_AXES: tuple[GridAxis, ...] = ("tensor", "data", "pipeline")
_CAPTIONS = {
    "passes": "Passes: each stage computes a micro-batch, forward or backward, or waits",
    "sums": "In each layer of them, ranks of a tensor group add up their parts (the bars)",
    "sends": "Hidden states go on to the next stage, gradients back; arrows: the rank's group",
    "gradients": "Data ranks add up the gradients of all micro-batches; the line: the rank's group",
    "optimizer": "Each rank's optimizer steps with its share of the states",
    "weights": "ZeRO 1: data ranks gather the stepped weights; the line: the rank's group",
}
_SAYS = {
    "tensor": "ranks that hold the parts of one matrix; they talk twice in every layer and pass",
    "data": "ranks that read other samples; they add gradients once a step",
    "pipeline": "ranks that hold successive layers; they hand activations on",
}


def figures(values: Values) -> list[Figure]:
    """Return the ranks on their nodes, a rank's groups, and the memory of each stage."""
    stages, tensor, nodes = values["stages"], values["tensor"], values["nodes"]
    grid = Grid(nodes * PER_NODE, pipeline=stages, tensor=tensor)
    plan = planned(
        model=values["model"],
        ds_json="3d",
        gpu=values["gpu"],
        gpus=grid.world_size,
        seq_len=values["seq_len"],
        micro_batch=values["micro_batch"],
        accumulation=values["accumulation"],
        settings=settings_of(values),
        changes=(f"pipeline.stages={stages}", f"tensor_parallel.autotp_size={tensor}"),
    )
    rank = min(values["rank"], grid.world_size - 1)
    axis = values["axis"]
    estimate, group = estimate_of(plan), grid.group(axis, rank)
    peaks = [grouped_gib(part.phase(part.peak_phase)) for part in estimate.fullest]
    assert plan.stages is not None, "two stages at least"
    step = step_time(plan)
    assert step is not None, "every GPU of the page is known"
    turns = [*moments(grid, plan.grad_accum, estimate.inputs.zero.stage)]
    now = round(values["moment"] / 100 * (len(turns) - 1))
    layers = layers_per_stage(plan.stages)
    device = estimate.device_bytes or 0
    return [
        Numbers(
            [
                Number("Ranks", str(grid.world_size), f"{stages} x {grid.data} x {tensor}"),
                Number(
                    "Verdict",
                    estimate.verdict,
                    f"peak {gib(estimate.worst.peak)}",
                    VERDICTS.get(estimate.verdict),
                ),
                Number("Rank", str(rank), grid.described(rank).strip(" ()")),
                Number(f"Its {axis} group", ", ".join(map(str, group)), _SAYS[axis]),
                Number("Moment", f"{now + 1} of {len(turns)}", _place(turns[now], turns)),
                Number("A step", f"{step.seconds:,.2f} s", f"{_waits(step):.0%} waiting"),
            ]
        ),
        Drawing(_CAPTIONS[turns[now].kind], moment_picture(grid, nodes, rank, turns[now]), MOMENTS),
        Chart("Where a step's time goes, seconds", _spent(step), 240),
        Drawing(
            f"{nodes} nodes of {PER_NODE} GPUs; framed: rank {rank} and its {axis} group",
            _picture(grid, nodes, rank, set(group)),
            [(series_colour(stage % 8), f"stage {stage}") for stage in range(stages)],
        ),
        Chart(
            "The fullest GPU of each stage at its peak, GiB",
            stacked(
                [f"stage {n}: {count} layers" for n, count in enumerate(layers)],
                {name: [peak[name] for peak in peaks] for name in COMPONENTS},
                Axis("GiB"),
                colours={name: name for name in COMPONENTS},
                limits={f"device, {gib(device)}": device / GIB},
            ),
        ),
        _groups(grid),
    ]


def _place(turn: Moment, turns: list[Moment]) -> str:
    ticks = turns[-1].tick + 1
    return f"tick {turn.tick + 1} of {ticks}" if any(turn.work) else "after the passes"


def _waits(step: StepTime) -> float:
    return step.terms["bubble"] / step.seconds


def _spent(step: StepTime) -> dict[str, object]:
    return stacked(
        [""], {TERMS[key]: [value] for key, value in step.terms.items() if value > 0}, Axis("s")
    )


def crossing(grid: Grid, axis: GridAxis) -> int:
    """Return the number of groups along an axis whose ranks are on more than one node."""
    nodes = [{rank // PER_NODE for rank in group} for group in grid.groups(axis)]
    return sum(len(places) > 1 for places in nodes)


def _groups(grid: Grid) -> Table:
    rows = []
    for axis in _AXES:
        groups = grid.groups(axis)
        rows.append(
            (axis, str(len(groups)), str(len(groups[0])), str(crossing(grid, axis)), _SAYS[axis])
        )
    head = ("axis", "groups", "ranks in each", "crossing nodes", "who they are")
    return Table("Groups of ranks", head, rows)


def _picture(grid: Grid, nodes: int, rank: int, group: set[int]) -> str:
    picture, cells = nodes_picture(nodes, f"{grid.world_size} ranks on {nodes} nodes")
    for number, cell in enumerate(cells):
        here = grid.coords(number)
        if number in group:
            picture.rect(cell.x - 1, cell.y - 2, cell.width + 2, CELL + 4, "ink", radius=6)
        inset = 2 if number in group else 0
        colour = series_colour(here.pipeline % 8)
        title = f"rank {number}: pipeline {here.pipeline}, data {here.data}, tensor {here.tensor}"
        cell.fill(picture, colour, title, inset)
        lines = (f"rank {number}", f"data {here.data}", f"tensor {here.tensor}")
        cell.write(picture, lines, bold=number == rank)
    return str(picture)


PAGE = Page(
    slug="hybrid",
    title="3D parallelism",
    controls=(
        Choice("model", "Model", MODELS, "llama-65b"),
        GPU,
        Slider("nodes", "Nodes", (1, 2, 4, 8, 16), 4, "of 8 GPUs"),
        Slider("stages", "Pipeline stages", (2, 4, 8, 16), 4),
        Slider("tensor", "Tensor parallel", (1, 2, 4, 8), 4, "GPUs", "GPU"),
        replace(SEQ_LEN, default=2048),
        CONTEXT,
        MICRO_BATCH,
        ACCUMULATION,
        Choice("checkpointing", "Checkpointing", ("none", "selective", "full"), "full"),
        Choice("axis", "Frame the group of", _AXES, "tensor"),
        Slider("rank", "Rank", tuple(range(128)), 0),
        Slider("moment", "Place in the step", tuple(range(101)), 10, "%", plays=True),
    ),
    figures=figures,
    computed_by=(
        "harness.layout.grid.Grid",
        "harness.layout.stages.schedule",
        "harness.plan.duration.step_time",
        "harness.plan.make.make_plan",
        "harness.estimate.timeline.estimate_memory",
        "tools.studio_pages.hybrid.crossing",
    ),
    formula="rank = (pipeline x data ranks + data) x tensor ranks + tensor: ranks that talk most, "
    "those of a tensor group, are neighbours on one node. GPUs = pipeline x data x tensor. "
    "A step: DeepSpeed's 1F1B schedule, whose ticks count forward and backward pass alike; seconds "
    "are the planner's.",
    sources=(
        ("Narayanan et al., arXiv 2104.04473", "https://arxiv.org/abs/2104.04473"),
        ("LLaMA-65B, arXiv 2302.13971, table 2", "https://arxiv.org/abs/2302.13971"),
    ),
)
