"""The page of 3D parallelism: each rank's place on nodes, its groups, and its memory."""

from __future__ import annotations

from harness.estimate.inputs import GIB
from harness.layout.grid import Axis as GridAxis
from harness.layout.grid import Grid
from harness.layout.stages import layers_per_stage
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
    GPU,
    LLAMA_65B,
    MICRO_BATCH,
    MODELS,
    PER_NODE,
    SEQ_LEN,
    estimate_of,
    planned,
    settings_of,
)
from tools.studio_app.svg import Svg

_AXES: tuple[GridAxis, ...] = ("tensor", "data", "pipeline")
_LLAMA_65B = "llama-65b"
_WIDTH, _NODE = 760.0, 96.0
_SAYS = {
    "tensor": "ranks that hold the parts of one matrix; they talk twice in every layer and pass",
    "data": "ranks that read other samples; they add gradients once a step",
    "pipeline": "ranks that hold successive layers; they hand activations on",
}


def figures(values: Values) -> list[Figure]:
    """Return the ranks on their nodes, a rank's groups, and the memory of each stage."""
    stages, tensor, nodes = values["stages"], values["tensor"], values["nodes"]
    grid = Grid(nodes * PER_NODE, pipeline=stages, tensor=tensor)
    is_llama = values["model"] == _LLAMA_65B
    overrides = {"overrides": LLAMA_65B} if is_llama else {}
    plan = planned(
        model="llama-3-70b" if is_llama else values["model"],
        ds_json="3d",
        gpu=values["gpu"],
        gpus=grid.world_size,
        seq_len=values["seq_len"],
        micro_batch=values["micro_batch"],
        accumulation=values["accumulation"],
        settings={**overrides, **settings_of(values)},
        changes=(f"pipeline.stages={stages}", f"tensor_parallel.autotp_size={tensor}"),
    )
    rank = min(values["rank"], grid.world_size - 1)
    axis = values["axis"]
    estimate, group = estimate_of(plan), grid.group(axis, rank)
    peaks = [grouped_gib(part.phase(part.peak_phase)) for part in estimate.fullest]
    assert plan.stages is not None, "two stages at least"
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
            ]
        ),
        Drawing(
            f"{nodes} nodes of {PER_NODE} GPUs: colours are pipeline stages, numbers are ranks; "
            f"framed: rank {rank} and its {axis} group",
            _picture(grid, nodes, rank, set(group)),
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
    columns = 2 if nodes > 1 else 1
    lines = -(-nodes // columns)
    width = _WIDTH / columns
    picture = Svg(_WIDTH, lines * _NODE, f"{grid.world_size} ranks on {nodes} nodes")
    for node in range(nodes):
        left, top = node % columns * width, node // columns * _NODE
        picture.rect(left + 3, top + 2, width - 6, _NODE - 8, "page", stroke="grid", radius=8)
        picture.text(left + 12, top + 15, f"node {node}", size=11, fill="muted")
        cell = (width - 24) / PER_NODE
        for place in range(PER_NODE):
            number = node * PER_NODE + place
            here = grid.coords(number)
            x, y = left + 12 + place * cell, top + 26
            colour = series_colour(here.pipeline % 8)
            title = (
                f"rank {number}: pipeline {here.pipeline}, data {here.data}, tensor {here.tensor}"
            )
            if number in group:
                picture.rect(x - 1, y - 2, cell - 2, 56, "ink", radius=6)
            inset = 2 if number in group else 0
            picture.rect(
                x + inset, y + inset, cell - 4 - 2 * inset, 52 - 2 * inset, colour, title=title
            )
            middle = x + cell / 2 - 2
            bold = number == rank
            picture.text(middle, y + 18, str(number), fill="on-colour", anchor="middle", bold=bold)
            text = f"d{here.data} t{here.tensor}"
            picture.text(middle, y + 37, text, fill="on-colour", anchor="middle", size=10)
    return str(picture)


PAGE = Page(
    slug="hybrid",
    title="3D parallelism",
    group="Parallelism",
    sees="Where each rank of a job sits, which part it holds, and whom it talks to, when pipeline, "
    "data and tensor parallelism are combined.",
    controls=(
        Choice("model", "Model", (_LLAMA_65B, *MODELS), _LLAMA_65B),
        GPU,
        Slider("nodes", "Nodes", (1, 2, 4, 8, 16), 4, "of 8 GPUs"),
        Slider("stages", "Pipeline stages", (2, 4, 8, 16), 4),
        Slider("tensor", "Tensor parallel", (1, 2, 4, 8), 4, "GPUs", "GPU"),
        SEQ_LEN,
        MICRO_BATCH,
        ACCUMULATION,
        Choice("checkpointing", "Checkpointing", ("none", "selective", "full"), "full"),
        Choice("axis", "Frame the group of", _AXES, "tensor"),
        Slider("rank", "Rank", tuple(range(128)), 0, plays=True),
    ),
    figures=figures,
    computed_by=(
        "harness.layout.grid.Grid",
        "harness.plan.make.make_plan",
        "harness.estimate.timeline.estimate_memory",
        "tools.studio_pages.hybrid.crossing",
    ),
    formula="rank = (pipeline x data ranks + data) x tensor ranks + tensor: ranks that talk most, "
    "those of a tensor group, are neighbours on one node. GPUs = pipeline x data x tensor.",
    sources=(
        ("Narayanan et al., arXiv 2104.04473", "https://arxiv.org/abs/2104.04473"),
        ("LLaMA-65B, arXiv 2302.13971, table 2", "https://arxiv.org/abs/2302.13971"),
    ),
)
