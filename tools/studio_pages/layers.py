"""Model parallelism: layers placed on devices, and one micro-batch on its way."""

from harness.layout.shape import num_parameters
from harness.layout.stages import layers_per_stage, schedule, stage_parameters
from harness.report.formatting import gib
from tools.layout.schedules import Span, spans, stage_work, waiting
from tools.studio_app.figures import Bars, Drawing, Figure, numbers
from tools.studio_app.page import Choice, Page, Slider, Values
from tools.studio_app.plans import MICRO_BATCH, MODELS, SEQ_LEN, planned
from tools.studio_app.svg import Box, lanes

_ROW, _LABEL = 46.0, 92.0
_STATES = 16
"""Bytes of a weight: bf16 weight and gradient, fp32 master weight and two moments."""
_LEGEND = (
    ("weights", "forward pass runs"),
    ("activations", "done; its activations are kept"),
    ("gradients", "backward pass runs"),
    ("grid", "waits, or done with"),
)


def figures(values: Values) -> list[Figure]:
    """Return the path of one micro-batch, and what each device holds."""
    devices = values["devices"]
    plan = planned(
        {**values, "json": "pipeline4", "gpus": devices}, (f"pipeline.stages={devices}",)
    )
    assert plan.stages is not None, "at least two devices"
    if plan.shape is None:
        raise ValueError(f"the tensors of {values['model']} are in no table: choose another model")
    placed = spans(schedule(devices, 1), stage_work(plan))
    now = values["progress"] / 100 * placed[-1].end
    moment = next((span for span in placed if now < span.end), placed[-1])  # one at any time
    counts = stage_parameters(plan.shape, plan.stages)
    sent = 2 * values["micro_batch"] * values["seq_len"] * plan.shape.hidden_size
    states = [_STATES * count / 2**30 for count in counts]
    where = f"device {moment.stage}"
    return [
        numbers(
            ("Now", where, f"{moment.kind} pass of its layers"),
            ("Waiting", f"{waiting(placed):.0%}", "of all devices' time"),
            ("Handed on", gib(sent), "hidden states, or their gradients, in bf16"),
            ("A device holds", f"{max(states):,.1f} GiB", "weights and their states"),
            ("A single device", gib(_STATES * num_parameters(plan.shape))),
        ),
        Drawing(
            f"One micro-batch: the {moment.kind} pass is on {where}",
            _picture(layers_per_stage(plan.stages), moment),
            _LEGEND,
        ),
        Bars(
            "Weights and their states on each device",
            "GiB",
            [f"device {n}" for n in range(devices)],
            {"states": states},
            height=260,
        ),
    ]


def _picture(layers: tuple[int, ...], moment: Span) -> str:
    """Return a row of layers for each device, in one of the legend's colours."""
    is_forward, first, boxes = moment.kind == "forward", 0, []
    each = 1 / max(layers)
    for device, count in enumerate(layers):
        colour = "weights" if is_forward else "gradients"
        if device != moment.stage:  # forward leaves activations behind, backward frees them
            colour = "activations" if device < moment.stage else "grid"
        for layer in range(count):
            name = str(first + layer)
            begin, end = layer * each, (layer + 0.93) * each
            boxes.append(Box(device, begin, end, colour, name, f"layer {name}"))
        first += count
    names = [f"device {device}" for device in range(len(layers))]
    label = f"{moment.kind} pass on device {moment.stage}"
    picture = lanes(label, names, boxes, row=_ROW, left=_LABEL, bold=moment.stage, back="none")
    here, to = moment.stage * _ROW, moment.stage + (1 if is_forward else -1)
    if 0 <= to < len(layers):
        place = _LABEL / 2 - 20
        ends = (here + 33, here + _ROW + 12) if is_forward else (here + 12, here - _ROW + 34)
        picture.line([(place, ends[0]), (place, ends[1])], "ink", width=2, arrow=True)
    return str(picture)


PAGE = Page(
    "layers",
    (
        Choice("model", "Model", MODELS, "llama-1b"),
        Slider("devices", "Devices", (2, 3, 4, 6, 8), 4),
        SEQ_LEN,
        MICRO_BATCH,
        Slider("progress", "Place in the step", tuple(range(0, 101, 4)), 24, "%", plays=True),
    ),
    figures,
)
