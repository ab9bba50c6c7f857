"""The page of pipeline parallelism: the work of each stage over time, and its bubble."""

from __future__ import annotations

from harness.layout.stages import bubble
from tools.layout.schedules import (
    SCHEDULES,
    Span,
    interleaved,
    most_kept,
    spans,
    stage_work,
    waiting,
)
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
    Table,
    Values,
)
from tools.studio_app.plans import MODELS, planned
from tools.studio_app.svg import Svg

_EQUAL = "equally fast stages"
_WIDTH, _ROW = 760.0, 34.0
_LABEL = 74.0
_COLOURS = {
    "forward": "weights",
    "backward": "gradients",
    "inputs": "gradients",
    "weights": "optimizer",
}
_LEGEND = (
    ("weights", "forward; paler: later chunks"),
    ("gradients", "backward, or its part for the inputs"),
    ("optimizer", "backward for the weights (zero-bubble)"),
    ("grid", "waiting"),
)


def figures(values: Values) -> list[Figure]:
    """Return one step of every stage up to a place in it, and what all schedules cost."""
    stages, batches, name = values["stages"], values["batches"], values["schedule"]
    work = _work(values["model"], stages)
    chunks = {
        each: values["chunks"] if make is interleaved else 1 for each, make in SCHEDULES.items()
    }
    orders = {
        each: make(stages, batches, chunks[each])
        for each, make in SCHEDULES.items()
        if make is not interleaved or each == name or not batches % stages
    }
    placed = {each: spans(rows, work, chunks[each]) for each, rows in orders.items()}
    most = {each: [most_kept(row, chunks[each]) for row in orders[each]] for each in orders}
    chosen = placed[name]
    rows = [
        (
            each,
            f"{waiting(found):.1%}",
            f"{_step(found, work, batches):.2f} x",
            f"{max(most[each]):.3g}",
            "yes" if each == "1F1B" else "no: drawn for comparison",
        )
        for each, found in placed.items()
    ]
    return [
        Numbers(
            [
                Number("Bubble, formula", f"{bubble(stages, batches):.1%}", "1F1B, equal stages"),
                Number("Waiting", f"{waiting(chosen):.1%}", f"of the step, {name}"),
                Number("Keeps", f"{max(most[name]):.3g}", "micro-batches' activations at most"),
                Number("Step", f"{_step(chosen, work, batches):.2f} x", "of even work, no waiting"),
            ]
        ),
        Drawing(
            f"{name}, {stages} stages, {batches} micro-batches",
            _picture(chosen, stages, values["progress"] / 100),
            _LEGEND,
        ),
        Table(
            "All schedules",
            ("schedule", "waiting", "step, of even work", "keeps at most", "DeepSpeed runs it"),
            rows,
        ),
        Chart(
            "Micro-batches whose activations a stage keeps at most",
            stacked([f"stage {stage}" for stage in range(stages)], most, Axis(""), together=False),
            280,
        ),
    ]


def _step(placed: list[Span], work: list[tuple[float, float]], batches: int) -> float:
    """The length of a step over that of stages that share its work evenly and never wait."""
    return max(span.end for span in placed) * len(work) / (sum(map(sum, work)) * batches)


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
    picture = Svg(_WIDTH, height, f"Work of {stages} stages over one step")
    for stage in range(stages):
        middle = stage * _ROW + _ROW / 2
        picture.text(0, middle, f"stage {stage}", size=12, room=_LABEL - 6)
        picture.rect(_LABEL, stage * _ROW + 3, _WIDTH - _LABEL, _ROW - 6, "grid", radius=0)
    for span in placed:
        if span.begin >= now:
            continue
        width = (min(span.end, now) - span.begin) * scale
        left, top = _LABEL + span.begin * scale, span.stage * _ROW + 3
        kind = {"inputs": "gradients of inputs", "weights": "gradients of weights"}.get(
            span.kind, f"{span.kind} pass"
        )
        text = f"{kind}, micro-batch {span.micro_batch}, chunk {span.chunk}"
        picture.rect(
            left, top, width, _ROW - 6, _COLOURS[span.kind],
            stroke="surface", title=text, opacity=1 - 0.16 * span.chunk,
        )  # fmt: skip
        number = str(span.micro_batch)
        if width > 7:
            middle, y = left + width / 2, top + (_ROW - 6) / 2
            picture.text(middle, y, number, fill="on-colour", anchor="middle", size=12, room=width)
    at = _LABEL + now * scale
    picture.line([(at, 0), (at, height)], "ink", width=1.5)
    return str(picture)


PAGE = Page(
    slug="pipeline",
    title="Pipeline parallelism",
    controls=(
        Slider("stages", "Stages", (2, 3, 4, 6, 8, 12, 16), 4),
        Slider("batches", "Micro-batches", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), 8),
        Choice("schedule", "Schedule", tuple(SCHEDULES), "1F1B"),
        Slider("chunks", "Chunks of a stage, if interleaved", (2, 3, 4), 2, "chunks"),
        Choice("model", "Work of a stage", (_EQUAL, *MODELS), _EQUAL),
        Slider("progress", "Place in the step", tuple(range(0, 101, 4)), 100, "%", plays=True),
    ),
    figures=figures,
    computed_by=(
        "harness.layout.stages.schedule",
        "harness.layout.stages.bubble",
        "tools.layout.schedules.interleaved",
        "tools.layout.schedules.zero_bubble",
        "tools.layout.schedules.spans",
        "tools.layout.schedules.waiting",
    ),
    formula="Waiting over work is (p - 1) / m for p equally fast stages and m micro-batches under "
    "1F1B and GPipe, (p - 1) / (v m) with v interleaved chunks, and under ZB-H1 a third of 1F1B's "
    "where forward pass and both parts of the backward pass take equally long, as here; the share "
    "of the step is (p - 1) / (m + p - 1) under 1F1B. Sending takes no time. 1F1B keeps "
    "min(p - stage, m) micro-batches, GPipe all m, interleaved p + (p - 1) / v, ZB-H1 p.",
    sources=(
        ("GPipe, arXiv 1811.06965, section 2.3", "https://arxiv.org/abs/1811.06965"),
        ("PipeDream-Flush (1F1B), arXiv 2006.09503", "https://arxiv.org/abs/2006.09503"),
        ("Narayanan et al. (interleaved), arXiv 2104.04473", "https://arxiv.org/abs/2104.04473"),
        ("Qi et al. (zero-bubble), arXiv 2401.10241", "https://arxiv.org/abs/2401.10241"),
    ),
)
