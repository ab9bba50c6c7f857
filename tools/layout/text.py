"""A plan's layout as text: who is where, who holds what, what happens in a step."""

from __future__ import annotations

from collections.abc import Sequence

from harness.estimate.inputs import GIB
from harness.estimate.timeline import Estimate
from harness.layout.grid import Coords
from harness.layout.stages import Work, bubble, layers_per_stage, schedule, stage_parameters
from harness.plan.plan import Plan
from tools.layout.timing import plan_spans, stage_work, waiting

_MOST_COLUMNS = 16  # data ranks, as many of which are spelt out
_MOST_TICKS = 21
_WHOLE = (
    "weights, gradients and optimizer states",
    "weights and gradients",
    "weights",
    "",
)
_CUT = ("", "optimizer states", "gradients and optimizer states", _WHOLE[0])


def describe(plan: Plan) -> str:
    """The whole report."""
    found = plan.estimate
    lines = [_headline(plan), "", *_ranks(plan), "", *_holdings(plan, found), "", _shares(plan)]
    lines += ["", *_step(plan)]
    notes = [event["message"] for event in plan.events if "message" in event]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _headline(plan: Plan) -> str:
    grid = plan.grid
    sizes = {axis: getattr(grid, axis) for axis in ("pipeline", "data", "sequence", "tensor")}
    axes = [f"{size} {axis}" for axis, size in sizes.items() if size > 1 or axis == "data"]
    return (
        f"{plan.model_config['model_type']} ({plan.model_source}), ZeRO {plan.zero_stage}, "
        f"{plan.precision}; ranks {grid.world_size} = {' x '.join(axes)}, "
        f"{plan.world.local_world_size} a node"
    )


def _ranks(plan: Plan) -> list[str]:
    """The grid of ranks."""
    grid, width = plan.grid, len(str(plan.grid.world_size - 1))
    count = min(grid.data, _MOST_COLUMNS)
    rows = ", a row for each pipeline stage" if plan.stages else ""
    lines = [f"Ranks: a column for each data rank{rows}; | where the next node begins"]
    for stage in range(grid.pipeline):
        ranks = [grid.rank(Coords(stage, data, 0, 0)) for data in range(grid.data)]
        nodes = [rank // plan.world.local_world_size for rank in ranks]
        row = f"  stage {stage:<3} on node {nodes[0]:<3}"
        for index, rank in enumerate(ranks[:count]):
            row += f"{'|' if nodes[index] != nodes[max(index, 1) - 1] else ' '}{rank:>{width + 1}} "
        lines.append(row.rstrip() + (f"  ... {ranks[-1]}" if grid.data > count else ""))
    return lines


def _holdings(plan: Plan, found: Estimate | None) -> list[str]:
    """A row for each stage, and how even they are."""
    units = _units(plan)
    fullest = found.fullest if found else []
    head = ["stage", "holds", "parameters", "work", "GiB between steps", "GiB at the peak, in"]
    rows = [head[: 2 if plan.shape is None else None]]
    parameters, work = _sizes(plan)
    for stage, text in enumerate(units):
        row = [str(stage), text]
        if plan.shape is not None:
            row += [f"{parameters[stage]:,}", f"{work[stage] / sum(work):.1%}"]
        if fullest:
            rank = fullest[stage]
            held, peak = rank.total("between_steps") / GIB, rank.peak / GIB
            row += [f"{held:.2f}", f"{peak:.2f} {rank.peak_phase}"]
        rows.append(row)
    lines = ["What each holds; of ranks that are not alike, the fullest", *_table(rows)]
    if len(units) > 1 and plan.shape is not None:
        sizes = {"work": work, "parameters": parameters}
        if fullest:
            sizes["peak memory"] = [rank.peak for rank in fullest]
        even = ", ".join(
            f"{name} {max(size) * len(size) / sum(size):.2f}" for name, size in sizes.items()
        )
        lines.append(f"Balance, the largest stage over the mean: {even}")
    return lines


def _units(plan: Plan) -> list[str]:
    """Return the parts of the model on each stage, as text."""
    if plan.stages is None:
        return ["the whole model"]
    found, first = [], 0
    counts = layers_per_stage(plan.stages)
    for stage, count in enumerate(counts):
        layers = f"layers {first}-{first + count - 1}" if count > 1 else f"layer {first}"
        before = "embedding, " if stage == 0 else ""
        after = ", norm and head" if stage == len(counts) - 1 else ""
        found.append(f"{before}{layers}{after}")
        first += count
    return found


def _sizes(plan: Plan) -> tuple[Sequence[int], Sequence[int]]:
    """Parameters and FLOPs per token of each stage; nothing where these are not known."""
    if plan.shape is None:
        return (), ()
    bounds = plan.stages or (0, plan.shape.num_layers + 2)
    work = [sum(passes) for passes in stage_work(plan)] if plan.stages else [1]
    return stage_parameters(plan.shape, bounds), work


def _table(rows: list[list[str]]) -> list[str]:
    """Columns as wide as they must be; words to the left, numbers to the right."""
    rows = [row + [""] * (len(rows[0]) - len(row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", "<", ">", ">", ">", "<"]
    return [
        "  "
        + "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False)
        ).rstrip()
        for row in rows
    ]


def _shares(plan: Plan) -> str:
    """Return the parts that ZeRO keeps whole on each rank, and those that it divides."""
    count, zero_stage = plan.grid.data * plan.grid.sequence, plan.zero_stage
    parts = [f"{_WHOLE[zero_stage]} whole"] if _WHOLE[zero_stage] else []
    parts += [f"1/{count} of the {_CUT[zero_stage]}"] if _CUT[zero_stage] else []
    whose = "rank of a stage" if plan.stages else "rank"
    return f"ZeRO {zero_stage}: each {whose} holds {', '.join(parts)}"


def _step(plan: Plan) -> list[str]:
    stages, batches = plan.grid.pipeline, plan.grad_accum
    each = f"{batches} micro-batch{'es' * (batches > 1)} of {plan.micro_batch} x "
    each += f"{plan.config.data.seq_len} tokens"
    if plan.stages is None:
        return [f"A step: each data rank runs {each} through the model"]
    rows = schedule(stages, batches)
    lines = [f"A step: {each} for each data rank; F3, B3: their passes forward and backward"]
    lines += [f"  stage {stage:<3}{_ticks(row, batches)}" for stage, row in enumerate(rows)]
    return [
        *lines,
        f"Bubble: ({stages} - 1) / ({batches} + {stages} - 1) = {bubble(stages, batches):.1%} of "
        f"the step waiting; {waiting(plan_spans(plan)):.1%} with each stage's own work",
    ]


def _ticks(row: Sequence[Work], batches: int) -> str:
    width = 1 + len(str(batches - 1))
    cells = ["." if work is None else f"{work[0][0].upper()}{work[1]}" for work in row]
    cells = [f"{cell:<{width}}" for cell in cells]
    if len(cells) > _MOST_TICKS:
        cells = [*cells[: _MOST_TICKS * 2 // 3], "...", *cells[-_MOST_TICKS // 3 :]]
    return " ".join(cells).rstrip()
