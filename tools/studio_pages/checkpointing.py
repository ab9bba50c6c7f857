"""The page of gradient checkpointing: memory that is saved, arithmetic that is repeated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.estimate.activations import activations
from harness.estimate.held import GIB, Place
from harness.estimate.inputs import Inputs
from harness.estimate.layer_bytes import layer_activations
from harness.layout.recompute import (
    REVERSIBLE,
    WAYS,
    Checkpointing,
    flops_again,
    is_checkpointed,
)
from harness.layout.shape import flops_per_unit
from tools.studio_app.charts import Axis, Line, lines
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
    powers_of_two,
)
from tools.studio_app.plans import (
    MLP_TILES,
    MODELS,
    OFFLOAD,
    estimate_of,
    planned,
    settings_of,
)
from tools.studio_app.svg import Svg

_EVERY = "every N-th layer"
_WAYS = (*WAYS, REVERSIBLE, _EVERY)
_WIDTH, _HEIGHT = 760.0, 150.0
_LEGEND = (
    ("activations", "held"),
    ("gradients", "held, backward pass runs"),
    ("grid", "thrown away, or done with"),
)


@dataclass(frozen=True)
class Pass:
    """One layer's turn in a step, and the bytes that are held in it."""

    layer: int
    forward: bool
    bytes: int


def figures(values: Values) -> list[Figure]:
    """Return a step through all layers, with the memory that each way of checkpointing holds."""
    way = _way(values)
    inputs = _inputs(values, way)
    chosen = passes(inputs)
    curves = {
        str(other): passes(
            replace(
                inputs,
                checkpointing=other,
                activation_offload=inputs.activation_offload and other != "none",
            )
        )
        for other in WAYS
    }
    curves[_name(way)] = chosen
    now = round(values["progress"] / 100 * (len(chosen) - 1))
    again, flops = extra_flops(inputs), sum(flops_per_unit(inputs.shape, inputs.seq_len))
    peak, without = (max(turn.bytes for turn in turns) for turns in (chosen, curves["none"]))
    count = sum(is_checkpointed(way, layer) for layer in range(inputs.shape.num_layers))
    return [
        Numbers(
            [
                Number("Most activations", gib(peak), f"of a micro-batch, {_name(way)}"),
                Number("Without checkpointing", gib(without)),
                Number("Saved", f"{1 - peak / without:.1%}", "of the activations of the layers"),
                Number("Computed again", f"{again / flops:.1%}", "more operations in a step"),
                Number("Checkpointed layers", f"{count} of {inputs.shape.num_layers}"),
                Number("In host memory", gib(_boundaries(inputs, "host")), "of a micro-batch"),
            ]
        ),
        Drawing(_caption(chosen[now], way), _picture(inputs, chosen, now), _LEGEND),
        Chart(
            "Activations held during one step, GiB",
            lines(
                [
                    Line(name, [(n, turn.bytes / GIB) for n, turn in enumerate(turns)])
                    for name, turns in curves.items()
                ],
                Axis("layers, forward and then backward"),
                Axis("GiB", low=0),
            ),
        ),
    ]


def _way(values: Values) -> Checkpointing:
    way = values["way"]
    return int(values["every"]) if way == _EVERY else way


def _name(way: Checkpointing) -> str:
    return f"every {way}" if isinstance(way, int) else way


def _inputs(values: Values, way: Checkpointing) -> Inputs:
    plan = planned(
        model=values["model"],
        ds_json="zero1",
        gpu=None,
        gpus=1,
        seq_len=values["seq_len"],
        micro_batch=values["micro_batch"],
        settings=settings_of({**values, "checkpointing": way}),
    )
    return estimate_of(plan).inputs


def kept_bytes(inputs: Inputs) -> list[int]:
    """Return the bytes that each layer keeps on the device from forward to backward pass."""
    ways = range(inputs.shape.num_layers)
    marked = [is_checkpointed(inputs.checkpointing, layer) for layer in ways]
    each = _boundaries(inputs, "device") // (sum(marked) or 1)
    return [each if marked[layer] else layer_activations(inputs, layer).total for layer in ways]


def _boundaries(inputs: Inputs, place: Place) -> int:
    """Bytes that all checkpointed layers keep there."""
    names = ("activations: layer inputs", "activations: kept results")
    return sum(_sizes(inputs, place, "loss").get(name, 0) for name in names)


def _sizes(inputs: Inputs, place: Place, phase: str) -> dict[str, int]:
    return {
        part.component: part.bytes
        for part in activations(inputs)
        if part.place == place and phase in part.phases
    }


def passes(inputs: Inputs) -> list[Pass]:
    """Return every layer's forward and backward pass, with what is held at its end or begin."""
    kept, first = kept_bytes(inputs), _sizes(inputs, "device", "backward_last")
    # Besides layers: one on its way to the host or back, a tile of an MLP, two streams.
    names = ("layer moved to and from the host", "MLP tile", "activations: streams")
    turns, size_now = [], sum(first.get(name, 0) for name in names)
    for layer, size in enumerate(kept):
        size_now += size
        turns.append(Pass(layer, True, size_now))
    for layer in reversed(range(len(kept))):
        again = 0
        if inputs.checkpointing in ("selective", REVERSIBLE):  # in part, and in all layers alike
            again = first["recomputed layer"] + first.get("gradients of streams", 0)
        elif is_checkpointed(inputs.checkpointing, layer):
            again = layer_activations(inputs, layer).total
        turns.append(Pass(layer, False, size_now + again))
        size_now -= kept[layer]
    return turns


def extra_flops(inputs: Inputs) -> int:
    """Return the operations per token that the backward pass repeats."""
    return sum(flops_again(inputs.shape, inputs.seq_len, inputs.checkpointing, inputs.mlp_tiles))


def _caption(turn: Pass, way: Checkpointing) -> str:
    if way == REVERSIBLE:
        if turn.forward:
            return f"Forward pass of layer {turn.layer}: nothing is kept but the two streams"
        return f"Backward pass of layer {turn.layer}: its inputs are computed from its outputs"
    if turn.forward:
        kept = "keeps its input alone" if is_checkpointed(way, turn.layer) else "keeps everything"
        return f"Forward pass of layer {turn.layer}: it {kept}"
    if is_checkpointed(way, turn.layer):
        return f"Backward pass of layer {turn.layer}: its forward pass is computed again first"
    return f"Backward pass of layer {turn.layer}: all that it needs was kept"


def _picture(inputs: Inputs, turns: list[Pass], now: int) -> str:
    """A column for each layer: what it holds now, within what it would hold whole."""
    turn, kept = turns[now], kept_bytes(inputs)
    wholes = [layer_activations(inputs, layer).total for layer in range(len(kept))]
    picture = Svg(_WIDTH, _HEIGHT + 24, _caption(turn, inputs.checkpointing))
    step, most = _WIDTH / len(kept), max(wholes)
    for layer, whole in enumerate(wholes):
        runs = layer == turn.layer and not turn.forward
        here = kept[layer] if layer <= turn.layer else 0  # forward fills them, backward empties
        if runs and is_checkpointed(inputs.checkpointing, layer):
            here = whole
        left, full = layer * step + step * 0.12, _HEIGHT * whole / most
        picture.rect(left, _HEIGHT - full, step * 0.76, full, "grid", title=gib(whole))
        size = _HEIGHT * here / most
        colour = "gradients" if runs else "activations"
        picture.rect(left, _HEIGHT - size, step * 0.76, size, colour, title=gib(here))
        bold = layer == turn.layer
        if len(kept) <= 32 or layer % 4 == 0:
            middle = left + step * 0.38
            picture.text(
                middle, _HEIGHT + 12, str(layer), anchor="middle", size=11, bold=bold,
                room=step * (1 if len(kept) <= 32 else 4),
            )  # fmt: skip
    return str(picture)


PAGE = Page(
    slug="checkpointing",
    title="Gradient checkpointing",
    controls=(
        Choice("model", "Model", MODELS, "gpt2-124m"),
        Choice("way", "Checkpointing", _WAYS, _EVERY),
        Slider("every", "N", tuple(range(1, 13)), 3, "layers", "layer"),
        Slider("seq_len", "Sequence length", powers_of_two(256, 32768), 1024, "tokens"),
        Slider("micro_batch", "Micro-batch", powers_of_two(1, 64), 8, "samples", "sample"),
        OFFLOAD,
        MLP_TILES,
        Slider("progress", "Place in the step", tuple(range(0, 101, 4)), 72, "%", plays=True),
    ),
    figures=figures,
    computed_by=(
        "harness.estimate.layer_bytes.layer_activations",
        "harness.estimate.activations.activations",
        "harness.layout.recompute.is_checkpointed",
        "harness.layout.recompute.flops_again",
    ),
    formula="A checkpointed layer keeps bytes x width x tokens (its input) and repeats its forward "
    "pass, a third of its operations; model.checkpointing=N does so in every N-th layer, "
    "selective keeps the results of matrix products and attention and repeats the rest; "
    "reversible layers keep nothing but the last one's two streams. Kept inputs may wait in host "
    "memory (model.activation_offload); an MLP in tiles is repeated tile by tile.",
    sources=(
        ("Chen et al., arXiv 1604.06174", "https://arxiv.org/abs/1604.06174"),
        ("Gomez et al., arXiv 1707.04585", "https://arxiv.org/abs/1707.04585"),
        ("Korthikanti et al., arXiv 2205.05198", "https://arxiv.org/abs/2205.05198"),
    ),
)
