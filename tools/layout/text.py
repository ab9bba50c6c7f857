"""Formats a plan's layout as text: the ranks, their contents, and the schedule of a step."""

from collections.abc import Sequence

from harness.estimate.memory_item import GIB
from harness.estimate.timeline import Estimate
from harness.layout.expert import expert_shard
from harness.layout.grid import Coords
from harness.layout.stages import Work, bubble, layers_per_stage, schedule, stage_parameters
from harness.layout.tensor import tensor_shard
from harness.plan.duration import step_line, step_time
from harness.plan.plan import Plan
from tools.layout.schedules import plan_spans, stage_work, waiting

_MOST_COLUMNS = 16  # data ranks that are printed
_MOST_TICKS = 21
_WHOLE = ("weights, gradients and optimizer states", "weights and gradients", "weights", "")
_CUT = ("", "optimizer states", "gradients and optimizer states", _WHOLE[0])


def describe(plan: Plan, width: int | None = None) -> str:
    """Return the whole report; `width` is that of the terminal."""
    estimate = plan.estimate
    lines = [_headline(plan), "", *_ranks(plan, width), "", *_holdings(plan, estimate), ""]
    time = [f"Time: {step_line(step)}"] if (step := step_time(plan)) else []
    lines += [_shares(plan), *_fit(estimate), *time, "", *_step(plan, width)]
    notes = [event["message"] for event in plan.events if "message" in event]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _fit(estimate: Estimate | None) -> list[str]:
    """Return the verdict; empty if the GPU is unknown."""
    if estimate is None or estimate.device_bytes is None:
        return []
    verdict = {"fits": "it fits", "tight": "it is tight", "does not fit": "it does not fit"}
    return [
        f"On GPUs of {estimate.device_bytes / GIB:.0f} GiB {verdict[estimate.verdict]}: the "
        f"fullest rank holds {estimate.worst.peak / GIB:.2f} GiB in tensors at its peak"
    ]


def _headline(plan: Plan) -> str:
    grid = plan.grid
    sizes = {axis: getattr(grid, axis) for axis in ("pipeline", "data", "sequence", "tensor")}
    axes = [f"{size} {axis}" for axis, size in sizes.items() if size > 1 or axis == "data"]
    return (
        f"{plan.model_config['model_type']} ({plan.model_source}), ZeRO {plan.zero_stage}, "
        f"{plan.precision}; ranks {grid.world_size} = {' x '.join(axes)}, "
        f"{plan.world.local_world_size} per node"
    )


def _ranks(plan: Plan, columns: int | None) -> list[str]:
    """Return the grid of ranks as lines."""
    grid, most = plan.grid, plan.grid.world_size - 1
    peers = grid.sequence * grid.tensor
    width = len(_with_peers(most - peers + 1, peers))
    count = min(grid.data, _MOST_COLUMNS)
    if columns is not None:
        room = columns - len("  stage 0   on node 0  ") - len(f"  ... {most}")
        count = min(count, max(1, room // (width + 3)))
    rows = ", one row per pipeline stage" if plan.stages else ""
    lines = [f"Ranks: one column per data rank{rows}; | marks the start of a node"]
    for stage in range(grid.pipeline):
        ranks = [grid.rank(Coords(stage, data, 0, 0)) for data in range(grid.data)]
        nodes = [rank // plan.world.local_world_size for rank in ranks]
        row = f"  stage {stage:<3} on node {nodes[0]:<3}"
        for index, rank in enumerate(ranks[:count]):
            row += f"{'|' if nodes[index] != nodes[max(index, 1) - 1] else ' '}"
            row += f"{_with_peers(rank, peers):>{width + 1}} "
        lines.append(row.rstrip() + (f"  ... {ranks[-1]}" if grid.data > count else ""))
    return lines


def _with_peers(rank: int, peers: int) -> str:
    """Return a rank and its peers that read the same samples, such as "4" or "4-7"."""
    return str(rank) if peers == 1 else f"{rank}-{rank + peers - 1}"


def _holdings(plan: Plan, estimate: Estimate | None) -> list[str]:
    """Return a table row for each stage, and how balanced the stages are."""
    units = _units(plan)
    fullest = estimate.fullest if estimate else []
    head = ["stage", "holds", "parameters", "work", "GiB between steps", "GiB at the peak, in"]
    rows = [head[: 2 if plan.shape is None else None]]
    parameters, work = _sizes(plan)
    for stage, text in enumerate(units):
        row = [str(stage), text]
        if plan.shape is not None:
            row += [f"{parameters[stage]:,}", f"{work[stage] / sum(work):.1%}"]
        if fullest:
            rank = fullest[stage]
            between_steps, peak = rank.total("between_steps") / GIB, rank.peak / GIB
            row += [f"{between_steps:.2f}", f"{peak:.2f} {rank.peak_phase}"]
        rows.append(row)
    lines = ["What each holds; of ranks that differ, the fullest", *_table(rows)]
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
    """Return each stage's part of the model as text."""
    if plan.stages is None:
        places, experts = plan.grid.tensor, plan.grid.expert
        if experts > 1:
            return [f"1/{experts} of the experts, the rest"]
        return ["the whole model" if places == 1 else f"1/{places} of each matrix"]
    texts, first = [], 0
    counts = layers_per_stage(plan.stages)
    for stage, count in enumerate(counts):
        layers = f"layers {first}-{first + count - 1}" if count > 1 else f"layer {first}"
        before = "embedding, " if stage == 0 else ""
        after = ", norm and head" if stage == len(counts) - 1 else ""
        each = f", 1/{plan.grid.tensor} of each matrix" if plan.grid.tensor > 1 else ""
        texts.append(f"{before}{layers}{after}{each}")
        first += count
    return texts


def _sizes(plan: Plan) -> tuple[Sequence[int], Sequence[int]]:
    """Return each stage's parameters and FLOPs per token; empty for an unknown model."""
    if plan.shape is None:
        return (), ()
    bounds = plan.stages or (0, plan.shape.num_layers + 2)
    work = [sum(passes) for passes in stage_work(plan)] if plan.stages else [1]
    shape = expert_shard(tensor_shard(plan.shape, plan.grid.tensor), plan.grid.expert)
    return stage_parameters(shape, bounds), work


def _table(rows: list[list[str]]) -> list[str]:
    """Return the rows with aligned columns: words to the left, numbers to the right."""
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
    """Return a line about the states that ZeRO replicates and those that it partitions."""
    count, zero_stage = plan.grid.data * plan.grid.sequence, plan.zero_stage
    parts = [f"the full {_WHOLE[zero_stage]}"] if _WHOLE[zero_stage] else []
    parts += [f"1/{count} of the {_CUT[zero_stage]}"] if _CUT[zero_stage] else []
    whose = "rank of a stage" if plan.stages else "rank"
    prefix = "of that, " if plan.grid.tensor > 1 else ""
    experts = ""
    if plan.grid.expert > 1:
        same = count // plan.grid.expert
        experts = f"; {plan.grid.expert} neighbours share the experts, {same} ranks have the same"
    return f"ZeRO {zero_stage}: {prefix}each {whose} holds {', '.join(parts)}{experts}"


def _step(plan: Plan, columns: int | None) -> list[str]:
    stages, batches = plan.grid.pipeline, plan.grad_accum
    each = f"{batches} micro-batch{'es' * (batches > 1)} of {plan.micro_batch} x "
    each += f"{plan.seq_len} tokens"
    if plan.stages is None:
        return [f"A step: each data rank runs {each} through the model"]
    rows = schedule(stages, batches)
    lines = [f"A step: {each} for each data rank; F3, B3: their passes forward and backward"]
    lines += [
        f"  stage {stage:<3}{_ticks(row, batches, columns)}" for stage, row in enumerate(rows)
    ]
    return [
        *lines,
        f"Bubble: ({stages} - 1) / ({batches} + {stages} - 1) = {bubble(stages, batches):.1%} of "
        f"the step waiting; {waiting(plan_spans(plan)):.1%} with each stage's own work",
    ]


def _ticks(row: Sequence[Work], batches: int, columns: int | None) -> str:
    width = 1 + len(str(batches - 1))
    most = _MOST_TICKS
    if columns is not None:
        most = min(most, max(3, (columns - len("  stage 0  ...")) // (width + 1)))
    cells = ["." if work is None else f"{work[0][0].upper()}{work[1]}" for work in row]
    cells = [f"{cell:<{width}}" for cell in cells]
    if len(cells) > most:
        cells = [*cells[: most * 2 // 3], "...", *cells[-most // 3 :]]
    return " ".join(cells).rstrip()
