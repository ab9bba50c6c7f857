"""The page of pipeline parallelism: the work of each stage over time, and its bubble."""

from __future__ import annotations

from collections.abc import Sequence

from harness.layout.stages import Work, bubble, schedule
from tools.layout.timing import Span, spans, stage_work, waiting
from tools.studio_app.charts import Axis, stacked
from tools.studio_app.page import (
    Chart,
    Choice,
    Drawing,
    Figure,
    Number,
    Numbers,
    Page,
    Slider,
    Values,
)
from tools.studio_app.plans import MODELS, planned
from tools.studio_app.svg import Svg

_ONE_F_ONE_B, _GPIPE = "1F1B", "GPipe"
_EQUAL = "equally fast stages"
_WIDTH, _ROW = 760.0, 34.0
_LABEL = 62.0


def figures(values: Values) -> list[Figure]:
    """Return one step of every stage up to a place in it, and what both schedules cost."""
    stages, batches = values["stages"], values["batches"]
    work = _work(values["model"], stages)
    rows = {_ONE_F_ONE_B: schedule(stages, batches), _GPIPE: gpipe(stages, batches)}
    placed = {name: spans(grid, work) for name, grid in rows.items()}
    chosen = placed[values["schedule"]]
    most = {name: [peak_in_flight(row) for row in grid] for name, grid in rows.items()}
    end = max(span.end for span in chosen)
    return [
        Numbers(
            [
                Number("Bubble, formula", f"{bubble(stages, batches):.1%}", "equally fast stages"),
                Number("Waiting", f"{waiting(chosen):.1%}", f"of the step, {values['schedule']}"),
                *(
                    Number(f"{name} keeps", f"{max(counts)}", "micro-batches' activations at most")
                    for name, counts in most.items()
                ),
                Number("Step", f"{end / (sum(map(sum, work)) * batches):.2f} x", "of one GPU's"),
            ]
        ),
        Drawing(
            f"{values['schedule']}, {stages} stages, {batches} micro-batches",
            _picture(chosen, stages, values["progress"] / 100),
        ),
        Chart(
            "Micro-batches whose activations a stage keeps at most",
            stacked([f"stage {stage}" for stage in range(stages)], most, Axis(""), together=False),
            280,
        ),
    ]


def gpipe(stages: int, micro_batches: int) -> tuple[tuple[Work, ...], ...]:
    """Return the work of each stage at each tick under GPipe (arXiv 1811.06965, figure 2c): all
    forward passes, then all backward passes, the last micro-batch first.
    """
    half = micro_batches + stages - 1
    rows: list[list[Work]] = []
    for stage in range(stages):
        row: list[Work] = [None] * (2 * half)
        for batch in range(micro_batches):
            row[stage + batch] = ("forward", batch)
            row[half + stages - 1 - stage + micro_batches - 1 - batch] = ("backward", batch)
        rows.append(row)
    return tuple(map(tuple, rows))


def peak_in_flight(row: Sequence[Work]) -> int:
    """Return the micro-batches whose forward pass is done and backward pass is not, at most."""
    count, most = 0, 0
    for task in row:
        if task is not None:
            count += 1 if task[0] == "forward" else -1
            most = max(most, count)
    return most


def _work(model: str, stages: int) -> list[tuple[float, float]]:
    """Time of each stage's forward and backward pass."""
    if model == _EQUAL:
        return [(1.0, 2.0)] * stages
    plan = planned(
        model=model,
        ds_json="pipeline4",
        gpu=None,
        gpus=stages,
        seq_len=1024,
        micro_batch=1,
        accumulation=stages,
        changes=(f"pipeline.stages={stages}",),
    )
    passes = stage_work(plan)
    unit = sum(forward for forward, _ in passes) / len(passes)
    return [(forward / unit, backward / unit) for forward, backward in passes]


def _picture(placed: list[Span], stages: int, progress: float) -> str:
    """A row for each stage; bars to the left of now are done."""
    end = max(span.end for span in placed)
    now, scale = progress * end, (_WIDTH - _LABEL) / end
    height = stages * _ROW
    picture = Svg(_WIDTH, height + 44, f"Work of {stages} stages over one step")
    for stage in range(stages):
        picture.text(0, stage * _ROW + _ROW / 2, f"stage {stage}", size=12)
        picture.rect(_LABEL, stage * _ROW + 3, _WIDTH - _LABEL, _ROW - 6, "grid", radius=0)
    for span in placed:
        if span.begin >= now:
            continue
        width = (min(span.end, now) - span.begin) * scale
        left, top = _LABEL + span.begin * scale, span.stage * _ROW + 3
        colour = "weights" if span.kind == "forward" else "gradients"
        text = f"{span.kind} pass of micro-batch {span.micro_batch}"
        picture.rect(left, top, width, _ROW - 6, colour, stroke="surface", title=text)
        if width > 11:
            middle = left + width / 2
            number = str(span.micro_batch)
            y = top + (_ROW - 6) / 2
            picture.text(middle, y, number, fill="on-colour", anchor="middle", size=12)
    at = _LABEL + now * scale
    picture.line([(at, 0), (at, height)], "ink", width=1.5)
    legend = (("weights", "forward"), ("gradients", "backward"), ("grid", "waiting"))
    for place, (colour, name) in enumerate(legend):
        picture.rect(_LABEL + place * 110, height + 16, 12, 12, colour)
        picture.text(_LABEL + place * 110 + 17, height + 22, name, size=12, fill="muted")
    return str(picture)


PAGE = Page(
    slug="pipeline",
    title="Pipeline parallelism",
    group="Parallelism",
    sees="One optimizer step of a pipelined model: each row is a stage, each number a micro-batch, "
    "grey is waiting (the bubble). DeepSpeed runs 1F1B; GPipe is drawn for comparison.",
    controls=(
        Slider("stages", "Stages", (2, 3, 4, 6, 8, 12, 16), 4),
        Slider("batches", "Micro-batches", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), 4),
        Choice("schedule", "Schedule", (_ONE_F_ONE_B, _GPIPE), _ONE_F_ONE_B),
        Choice("model", "Work of a stage", (_EQUAL, *MODELS), _EQUAL),
        Slider("progress", "Place in the step", tuple(range(0, 101, 4)), 100, "%", plays=True),
    ),
    figures=figures,
    computed_by=(
        "harness.layout.stages.schedule",
        "harness.layout.stages.bubble",
        "tools.layout.timing.spans",
        "tools.layout.timing.waiting",
        "tools.studio_pages.pipeline.gpipe",
    ),
    formula="Bubble = (p - 1) / (m + p - 1) for p equally fast stages and m micro-batches. A "
    "backward pass takes twice as long as a forward pass; sending takes no time here. 1F1B keeps "
    "min(p - stage, m) micro-batches, GPipe all m.",
    sources=(
        ("GPipe, arXiv 1811.06965, section 2.3", "https://arxiv.org/abs/1811.06965"),
        ("PipeDream-Flush (1F1B), arXiv 2006.09503", "https://arxiv.org/abs/2006.09503"),
    ),
)
