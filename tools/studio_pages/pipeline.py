"""Pipeline parallelism: the work of each stage over time, and its bubble."""

from harness.layout.stages import bubble
from tools.layout import schedules
from tools.studio_app.figures import Bars, Drawing, Figure, Table, numbers
from tools.studio_app.page import Choice, Page, Slider, Values
from tools.studio_app.plans import MODELS, planned
from tools.studio_app.svg import WIDTH, Box, lanes

_EQUAL = "equally fast stages"
_LABEL = 74.0
_KINDS = {
    "forward": ("weights", "forward pass"),
    "backward": ("gradients", "backward pass"),
    "inputs": ("gradients", "gradients of inputs"),
    "weights": ("optimizer", "gradients of weights"),
}
_LEGEND = (
    ("weights", "forward; paler: later chunks"),
    ("gradients", "backward, or its part for the inputs"),
    ("optimizer", "backward for the weights (zero-bubble)"),
    ("grid", "waiting"),
)


def figures(values: Values) -> list[Figure]:
    """Return one step of every stage up to a chosen moment, and the cost of all schedules."""
    stages, batches, name = values["stages"], values["batches"], values["schedule"]
    work = _work(values["model"], stages)
    placed, most = {}, {}
    for each, make in schedules.SCHEDULES.items():
        if make is schedules.interleaved and each != name and batches % stages:
            continue
        chunks = values["chunks"] if make is schedules.interleaved else 1
        orders = make(stages, batches, chunks)
        placed[each] = schedules.spans(orders, work, chunks)
        most[each] = [schedules.most_kept(row, chunks) for row in orders]
    lengths = {each: _step(slots, work, batches) for each, slots in placed.items()}
    rows = [
        (
            each,
            f"{schedules.waiting(slots):.1%}",
            f"{lengths[each]:.2f} x",
            f"{max(most[each]):.3g}",
            "yes" if each == "1F1B" else "no: drawn for comparison",
        )
        for each, slots in placed.items()
    ]
    # Waiting over work is 1F1B's divided by the chunks, or by 3 where three passes fill the gaps.
    parts = {schedules.interleaved: values["chunks"], schedules.zero_bubble: 3}
    formula = bubble(stages, batches * parts.get(schedules.SCHEDULES[name], 1))
    return [
        numbers(
            ("Bubble, formula", f"{formula:.1%}", f"{name}, equal stages"),
            ("Waiting", f"{schedules.waiting(placed[name]):.1%}", f"of the step, {name}"),
            ("Keeps", f"{max(most[name]):.3g}", "micro-batches' activations at most"),
            ("Step", f"{lengths[name]:.2f} x", "of even work, no waiting"),
        ),
        Drawing(
            f"{name}, {stages} stages, {batches} micro-batches",
            _picture(placed[name], stages, values["progress"] / 100),
            _LEGEND,
        ),
        Table(
            "All schedules",
            "schedule|waiting|step, of even work|keeps at most|DeepSpeed runs it",
            rows,
        ),
        Bars(
            "Micro-batches whose activations a stage keeps at most",
            "",
            [f"stage {stage}" for stage in range(stages)],
            most,
            together=False,
            height=280,
        ),
    ]


def _step(placed: list[schedules.Span], work: list[tuple[float, float]], batches: int) -> float:
    """Return the length of a step relative to that of stages that share its work evenly."""
    return max(span.end for span in placed) * len(work) / (sum(map(sum, work)) * batches)


def _work(model: str, stages: int) -> list[tuple[float, float]]:
    """Return the time of each stage's forward and backward pass."""
    if model == _EQUAL:
        return [(1.0, 2.0)] * stages
    values = {"model": model, "json": "pipeline4", "gpus": stages, "seq_len": 1024}
    plan = planned({**values, "accumulation": stages}, (f"pipeline.stages={stages}",))
    passes = schedules.stage_work(plan)
    unit = sum(forward for forward, _ in passes) / len(passes)
    return [(forward / unit, backward / unit) for forward, backward in passes]


def _picture(placed: list[schedules.Span], stages: int, progress: float) -> str:
    """Return a row for each stage; bars to the left of now are done."""
    length = max(span.end for span in placed)
    now, boxes = progress * length, []
    for span in placed:
        if span.begin < now:
            colour, kind = _KINDS[span.kind]
            title = f"{kind}, micro-batch {span.micro_batch}, chunk {span.chunk}"
            begin, end = span.begin / length, min(span.end, now) / length
            text, opacity = str(span.micro_batch), 1 - 0.16 * span.chunk
            boxes.append(Box(span.stage, begin, end, colour, text, title, opacity))
    names = [f"stage {stage}" for stage in range(stages)]
    picture = lanes(f"Work of {stages} stages over one step", names, boxes, left=_LABEL)
    at = _LABEL + progress * (WIDTH - _LABEL)
    picture.line([(at, 0), (at, picture.height)])
    return str(picture)


PAGE = Page(
    "pipeline",
    (
        Slider("stages", "Stages", (2, 3, 4, 6, 8, 12, 16), 4),
        Slider("batches", "Micro-batches", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), 8),
        Choice("schedule", "Schedule", tuple(schedules.SCHEDULES), "1F1B"),
        Slider("chunks", "Chunks of a stage, if interleaved", (2, 3, 4), 2, "chunks"),
        Choice("model", "Work of a stage", (_EQUAL, *MODELS), _EQUAL),
        Slider("progress", "Place in the step", tuple(range(0, 101, 4)), 100, "%", plays=True),
    ),
    figures,
)
