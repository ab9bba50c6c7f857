"""Gradient checkpointing: memory saved, operations repeated."""

from dataclasses import replace
from typing import NamedTuple

from harness.estimate.activations import activations
from harness.estimate.inputs import Inputs
from harness.estimate.layer_bytes import layer_activations
from harness.estimate.memory_item import GIB, Place
from harness.layout.recompute import REVERSIBLE, WAYS, Checkpointing, flops_again, is_checkpointed
from harness.layout.shape import flops_per_unit
from harness.report.chart import line, lines
from harness.report.formatting import gib
from tools.studio_app import plans
from tools.studio_app.figures import Code, Drawing, Figure, Table, numbers
from tools.studio_app.page import Choice, Page, Slider, Values, powers_of_two
from tools.studio_app.svg import WIDTH, Svg

_EVERY = "every N-th layer"
_HEIGHT = 150.0
_AGAIN: dict[Checkpointing, str] = {
    "none": "nothing",
    "selective": "all but matrix products and attention, where the paper repeats attention alone",
    "full": "the layer",
}
_LEGEND = (
    ("activations", "held"),
    ("gradients", "held, backward pass runs"),
    ("grid", "discarded, or no longer needed"),
)


class Pass(NamedTuple):
    """One layer's turn in a step, and the bytes that are held during it."""

    layer: int
    forward: bool
    bytes: int


def figures(values: Values) -> list[Figure]:
    """Return a step through all layers, with the memory that each way of checkpointing holds."""
    way: Checkpointing = int(values["every"]) if values["way"] == _EVERY else values["way"]
    name = f"every {way}" if isinstance(way, int) else way
    inputs = _inputs(values, way)
    turns = {str(other): passes(_with_way(inputs, other)) for other in WAYS}
    turns[name] = chosen = passes(inputs)
    now = round(values["progress"] / 100 * (len(chosen) - 1))
    layers, length = inputs.shape.num_layers, inputs.seq_len
    again = sum(flops_again(inputs.shape, length, way, inputs.mlp_tiles))
    peak, without = (max(turn.bytes for turn in moments) for moments in (chosen, turns["none"]))
    count = sum(is_checkpointed(way, layer) for layer in range(layers))
    share = again / sum(flops_per_unit(inputs.shape, length))
    return [
        numbers(
            ("Most activations", gib(peak), f"of a micro-batch, {name}"),
            ("Without checkpointing", gib(without)),
            ("Saved", f"{1 - peak / without:.1%}", "of the activations of the layers"),
            ("Recomputed", f"{share:.1%}", "more operations in a step"),
            ("Checkpointed layers", f"{count} of {layers}"),
            ("In host memory", gib(_boundaries(inputs, "host")), "of a micro-batch"),
        ),
        Drawing(_caption(chosen[now], way), _picture(inputs, chosen[now]), _LEGEND),
        lines(
            "Activations held during one step",
            [
                line(each, [(n, turn.bytes / GIB) for n, turn in enumerate(moments)])
                for each, moments in turns.items()
            ],
            "layers, forward and then backward",
            "GiB",
            from_zero=True,
            height=340,
        ),
        _by_the_paper(inputs),
        Code("Train with these settings", plans.train_command({**values, "checkpointing": way})),
    ]


def _by_the_paper(inputs: Inputs) -> Table:
    """Return a layer's kept bytes beside those of Korthikanti et al. (arXiv 2205.05198, table 2):
    sbh (34 + 5 a s / h), 34 sbh and 2 sbh, for a GPT with dropout in 16 bits.
    """
    config, tokens = inputs.shape, inputs.micro_batch * inputs.seq_len
    sbh, scores = tokens * config.hidden_size, 5 * tokens * config.num_heads * inputs.seq_len
    papers = {"none": 34 * sbh + scores, "selective": 34 * sbh, "full": 2 * sbh}
    rows = [
        (way, gib(kept_bytes(_with_way(inputs, way))[0]), gib(papers[way]), again)
        for way, again in _AGAIN.items()
    ]
    return Table("What a layer keeps", "checkpointing|here|by the paper|recomputed here", rows)


def _with_way(inputs: Inputs, way: Checkpointing) -> Inputs:
    offload = inputs.activation_offload and way != "none"
    return replace(inputs, checkpointing=way, activation_offload=offload)


def _inputs(values: Values, way: Checkpointing) -> Inputs:
    return plans.estimate_of(plans.planned({**values, "checkpointing": way})).inputs


def kept_bytes(inputs: Inputs) -> list[int]:
    """Return the bytes that each layer keeps on the device from forward to backward pass."""
    marked = [is_checkpointed(inputs.checkpointing, n) for n in range(inputs.shape.num_layers)]
    each = _boundaries(inputs, "device") // (sum(marked) or 1)
    return [
        each if is_marked else layer_activations(inputs, layer).total
        for layer, is_marked in enumerate(marked)
    ]


def _boundaries(inputs: Inputs, place: Place) -> int:
    """Return the bytes that all checkpointed layers keep there."""
    names = ("activations: layer inputs", "activations: kept results")
    return sum(_sizes(inputs, place, "loss").get(name, 0) for name in names)


def _sizes(inputs: Inputs, place: Place, phase: str) -> dict[str, int]:
    return {
        part.component: part.bytes
        for part in activations(inputs)
        if part.place == place and phase in part.phases
    }


def passes(inputs: Inputs) -> list[Pass]:
    """Return the bytes held at the end of every layer's forward pass and at the start of its
    backward pass.
    """
    kept, first = kept_bytes(inputs), _sizes(inputs, "device", "backward_last")
    # Held besides: a layer on its way to the host or back, a tile of an MLP, two streams.
    names = ("layer moved to and from the host", "MLP tile", "activations: streams")
    turns, size_now = [], sum(first.get(name, 0) for name in names)
    for layer, size in enumerate(kept):
        size_now += size
        turns.append(Pass(layer, True, size_now))
    for layer in reversed(range(len(kept))):
        again = 0
        if inputs.checkpointing in ("selective", REVERSIBLE):  # the same part of every layer
            again = first["recomputed layer"] + first.get("gradients of streams", 0)
        elif is_checkpointed(inputs.checkpointing, layer):
            again = layer_activations(inputs, layer).total
        turns.append(Pass(layer, False, size_now + again))
        size_now -= kept[layer]
    return turns


def _caption(turn: Pass, way: Checkpointing) -> str:
    is_marked = is_checkpointed(way, turn.layer)
    if turn.forward:
        says = "it keeps only its input" if is_marked else "it keeps everything"
        says = "nothing is kept but the two streams" if way == REVERSIBLE else says
        return f"Forward pass of layer {turn.layer}: {says}"
    says = (
        "its forward pass is recomputed first" if is_marked else "everything that it needs was kept"
    )
    says = "its inputs are computed from its outputs" if way == REVERSIBLE else says
    return f"Backward pass of layer {turn.layer}: {says}"


def _picture(inputs: Inputs, turn: Pass) -> str:
    """Return a column for each layer: what it holds now, within what it would hold without
    checkpointing.
    """
    kept = kept_bytes(inputs)
    wholes = [layer_activations(inputs, layer).total for layer in range(len(kept))]
    picture = Svg(_HEIGHT + 24, _caption(turn, inputs.checkpointing))
    step, most = WIDTH / len(kept), max(wholes)
    every = 1 if len(kept) <= 32 else 4
    for layer, whole in enumerate(wholes):
        runs = layer == turn.layer and not turn.forward
        here = kept[layer] if layer <= turn.layer else 0  # forward fills them, backward empties
        if runs and is_checkpointed(inputs.checkpointing, layer):
            here = whole
        left = layer * step + step * 0.12
        colour = "gradients" if runs else "activations"
        for size, fill in ((whole, "grid"), (here, colour)):
            height = _HEIGHT * size / most
            picture.rect(left, _HEIGHT - height, step * 0.76, height, fill, title=gib(size))
        if layer % every == 0:
            middle, bold = left + step * 0.38, layer == turn.layer
            picture.text(
                middle, _HEIGHT + 12, str(layer), anchor="middle", size=11, bold=bold,
                room=step * every,
            )  # fmt: skip
    return str(picture)


PAGE = Page(
    "checkpointing",
    (
        Choice("model", "Model", plans.MODELS, "gpt2-124m"),
        Choice("way", "Checkpointing", (*WAYS, REVERSIBLE, _EVERY), _EVERY),
        Slider("every", "N", tuple(range(1, 13)), 3, "layers", "layer"),
        Slider("seq_len", "Sequence length", powers_of_two(256, 32768), 1024, "tokens"),
        Slider("micro_batch", "Micro-batch", powers_of_two(1, 64), 8, "samples", "sample"),
        plans.OFFLOAD,
        plans.MLP_TILES,
        Slider("progress", "Place in the step", tuple(range(0, 101, 4)), 72, "%", plays=True),
    ),
    figures,
)
