"""The page of model parallelism: layers placed on devices, and one micro-batch on its way."""

from __future__ import annotations

from harness.layout.stages import layers_per_stage, schedule, stage_parameters
from tools.layout.schedules import Span, spans, stage_work, waiting
from tools.studio_app.charts import Axis, stacked
from tools.studio_app.memory import gib
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
from tools.studio_app.plans import MICRO_BATCH, MODELS, SEQ_LEN, planned
from tools.studio_app.svg import Svg

_WIDTH, _ROW, _LABEL = 760.0, 46.0, 92.0
_STATES = 16
"""Bytes of a weight: bf16 weight and gradient, fp32 master weight and two moments."""
_LEGEND = (
    ("weights", "forward pass runs"),
    ("activations", "done; its activations are kept"),
    ("gradients", "backward pass runs"),
    ("grid", "waits, or done with"),
)


def figures(values: Values) -> list[Figure]:
    """Return the way of one micro-batch, and what each device holds."""
    devices = values["devices"]
    plan = planned(
        model=values["model"],
        ds_json="pipeline4",
        gpu=None,
        gpus=devices,
        seq_len=values["seq_len"],
        micro_batch=values["micro_batch"],
        changes=(f"pipeline.stages={devices}",),
    )
    assert plan.stages is not None, "two devices at least"
    if plan.shape is None:
        raise ValueError(f"the tensors of {values['model']} are in no table: choose another model")
    layers = layers_per_stage(plan.stages)
    placed = spans(schedule(devices, 1), stage_work(plan))
    moment = _moment(placed, values["progress"] / 100)
    counts = stage_parameters(plan.shape, plan.stages)
    sent = 2 * values["micro_batch"] * values["seq_len"] * plan.shape.hidden_size
    states = [_STATES * count / 2**30 for count in counts]
    return [
        Numbers(
            [
                Number("Now", f"device {moment.stage}", f"{moment.kind} pass of its layers"),
                Number("Waiting", f"{waiting(placed):.0%}", "of all devices' time"),
                Number("Handed on", gib(sent), "hidden states, or their gradients, in bf16"),
                Number("A device holds", f"{max(states):,.1f} GiB", "weights and their states"),
                Number("One device alone", f"{_STATES * sum(counts) / 2**30:,.1f} GiB"),
            ]
        ),
        Drawing(
            f"One micro-batch: the {moment.kind} pass is on device {moment.stage}",
            _picture(layers, moment),
            _LEGEND,
        ),
        Chart(
            "Weights and their states on each device, GiB",
            stacked([f"device {n}" for n in range(devices)], {"states": states}, Axis("GiB")),
            260,
        ),
    ]


def _moment(placed: list[Span], progress: float) -> Span:
    """The pass that runs at a place in the step: one at any time."""
    now = progress * placed[-1].end
    return next((span for span in placed if now < span.end), placed[-1])


def _picture(layers: tuple[int, ...], moment: Span) -> str:
    """A row of layers for each device, in one of the legend's colours."""
    picture = Svg(_WIDTH, len(layers) * _ROW, f"{moment.kind} pass on device {moment.stage}")
    first, each = 0, (_WIDTH - _LABEL) / max(layers)
    is_forward = moment.kind == "forward"
    for device, count in enumerate(layers):
        top = device * _ROW
        runs = device == moment.stage
        picture.text(0, top + 18, f"device {device}", size=12, room=_LABEL - 8, bold=runs)
        colour = "weights" if is_forward else "gradients"
        if not runs:  # forward leaves activations behind, which backward takes away
            colour = "activations" if device < moment.stage else "grid"
        for layer in range(count):
            left, title = _LABEL + layer * each, f"layer {first + layer}"
            picture.rect(left, top + 2, each - 3, _ROW - 14, colour, title=title)
            ink = "muted" if colour == "grid" else "on-colour"
            middle = left + each / 2 - 1.5
            name = str(first + layer)
            if each > 14:
                picture.text(middle, top + 18, name, fill=ink, anchor="middle", size=11, room=each)
        first += count
    place = _LABEL / 2 - 20
    here, to = moment.stage * _ROW, moment.stage + (1 if is_forward else -1)
    if 0 <= to < len(layers):
        ends = (here + 28, here + _ROW + 6) if is_forward else (here + 6, here - _ROW + 30)
        picture.line([(place, ends[0]), (place, ends[1])], "ink", width=2, arrow=True)
    return str(picture)


PAGE = Page(
    slug="layers",
    title="Model parallelism",
    controls=(
        Choice("model", "Model", MODELS, "llama-1b"),
        Slider("devices", "Devices", (2, 3, 4, 6, 8), 4),
        SEQ_LEN,
        MICRO_BATCH,
        Slider("progress", "Place in the step", tuple(range(0, 101, 4)), 24, "%", plays=True),
    ),
    figures=figures,
    computed_by=(
        "harness.layout.stages.layers_per_stage",
        "harness.layout.stages.stage_parameters",
        "tools.layout.schedules.stage_work",
        "tools.layout.schedules.spans",
    ),
    formula="With one micro-batch n equally fast devices wait (n - 1) / n of their time: the "
    "bubble (n - 1) / (m + n - 1) at m = 1. Handed on: micro-batch x sequence length x width x 2 "
    "bytes. States: 16 bytes a weight (bf16 weight and gradient, fp32 master weight and moments).",
    sources=(
        ("GPipe, arXiv 1811.06965, section 1", "https://arxiv.org/abs/1811.06965"),
        ("ZeRO, arXiv 1910.02054, section 3 (16 bytes)", "https://arxiv.org/abs/1910.02054"),
    ),
)
