"""Cost of attention: exact, windowed and linear kinds over the sequence length."""

from dataclasses import replace
from functools import lru_cache

import torch

from harness.estimate.inputs import Inputs
from harness.estimate.layer_bytes import layer_activations
from harness.estimate.memory_item import GIB
from harness.estimate.step_time.layer import attention_flops, layer_passes
from harness.estimate.step_time.machine import machine_of
from harness.layout.attention_table import ATTENTIONS
from harness.report.chart import Chart, Mark, line, lines
from harness.report.formatting import gib
from tools.studio_app import plans
from tools.studio_app.figures import Drawing, Figure, Table, numbers
from tools.studio_app.page import Choice, Page, Slider, Values, powers_of_two
from tools.studio_app.svg import WIDTH, Svg

_KINDS = ("eager", "sdpa", *(name for name, row in ATTENTIONS.items() if row.sizes))
_LENGTHS = powers_of_two(512, 262144)
_TOKENS, _BOX = (
    32,
    10.0,
)  # of the picture: tokens, which are also the size of a head; side of a cell
_SIZES = {"window": 8, "global": 1, "features": 2, "buckets": 4}
"""Sizes of the picture, whose text is short."""


def figures(values: Values) -> list[Figure]:
    """Return operations, memory and time of a layer's attention, and the tokens that each sees."""
    base, length, chosen = _base(values["model"]), values["seq_len"], values["kind"]
    here = {name: of_kind(base, name, length) for name in _KINDS}
    flops = {name: attention_flops(inputs, 0) for name, inputs in here.items()}
    kept = {name: layer_activations(inputs, 0).attention for name, inputs in here.items()}
    products = 2.0 * sum(t.numel for t in base.shape.body.layers[0]) * length
    machine = machine_of(values["gpu"], plans.PER_NODE, base.products)
    share = flops[chosen] / (flops[chosen] + products)
    rows = []
    for name, inputs in here.items():
        passes, sizes = layer_passes(inputs, 0, machine), ATTENTIONS[name].sizes
        seconds = passes.forward.attention + passes.backward.attention
        settings = ", ".join(f"{key} {size}" for key, size in sizes.items()) or "exact"
        share_of_exact = f"{flops[name] / flops['sdpa']:.2f} x"
        row = (f"{flops[name]:.3g}", share_of_exact, gib(kept[name]), f"{seconds * 1e3:,.2f}")
        rows.append((name, settings, *row))
    return [
        numbers(
            ("Operations", f"{flops[chosen]:.3g}", f"of a layer's {chosen}, forward, a sample"),
            ("Share of the layer", f"{share:.1%}", "the rest: products with weights"),
            ("Relative to exact", rows[_KINDS.index(chosen)][3], "sdpa's operations"),
            ("Kept by the layer", gib(kept[chosen]), "by its attention, for the backward pass"),
        ),
        Drawing(
            f"{chosen}: the weight of each token (column) in the output of each token (row)",
            _picture(chosen),
        ),
        _over_length(base, "Operations per token of a layer's attention, forward", "", length),
        _over_length(base, "Memory that a layer's attention keeps for a sample", "GiB", length),
        Table(
            f"At {length:,} tokens",
            "attention|sizes|operations|of exact|kept by a layer|ms, forward and backward",
            rows,
        ),
    ]


@lru_cache
def _base(model: str) -> Inputs:
    inputs = plans.estimate_of(plans.planned({"model": model, "json": "zero1"})).inputs
    if inputs.trace is not None:
        raise ValueError(f"the layers of {model} are only known as a whole: choose another model")
    return inputs


def of_kind(base: Inputs, name: str, length: int) -> Inputs:
    """Return the inputs of one sample with another attention, in its default sizes."""
    sizes = tuple(ATTENTIONS[name].sizes.items())
    return replace(
        base, micro_batch=1, seq_len=length, attention=name, attention_sizes=sizes, seen_tokens=None
    )


def _over_length(base: Inputs, title: str, unit: str, length: int) -> Chart:
    curves = []
    for name in _KINDS:
        points = []
        for tokens in _LENGTHS:
            inputs = of_kind(base, name, tokens)
            size = layer_activations(inputs, 0).attention / GIB
            points.append((tokens, size if unit else attention_flops(inputs, 0) / tokens))
        curves.append(line(name, points))
    if not unit:
        weights = 2.0 * sum(t.numel for t in base.shape.body.layers[0])
        points = [(tokens, weights) for tokens in _LENGTHS]
        curves.append(line("the layer's products with weights", points, "ink", "dashed"))
    marks = [Mark({"x": length}, "var(--muted)", "chosen", True)]
    more = {"log_x": True, "log_y": True, "marks": marks, "height": 340}
    return lines(title, curves, "sequence length", unit, **more)


@lru_cache
def weights_of(kind: str) -> torch.Tensor:
    """Return the weight of every token in every output (32, 32), by the code that trains: attention
    of random queries and keys to values that are the rows of the identity.
    """
    from harness.models.efficient_attention.kinds import KINDS, attend

    draws = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, _TOKENS, _TOKENS, generator=draws) for _ in range(2))
    value = torch.eye(_TOKENS)[None, None]
    if kind not in KINDS:
        attended = torch.nn.functional.scaled_dot_product_attention
        return attended(query, key, value, is_causal=True)[0, 0]
    sizes = {name: _SIZES[name] for name in ATTENTIONS[kind].sizes}
    if kind == "performer":
        sizes["features"] = 64  # its noise falls with their number
    output, _ = attend(kind, sizes, 0, torch.nn.Identity(), query, key, value, None)
    return output[0, :, 0]


def _picture(kind: str) -> str:
    weights = weights_of(kind)
    picture, left = Svg(_TOKENS * _BOX, f"Weights of {kind}"), (WIDTH - _TOKENS * _BOX) / 2
    picture.rect(0, 0, WIDTH, _TOKENS * _BOX, "page", radius=0)
    for row, of_row in enumerate(weights.tolist()):
        for column, weight in enumerate(of_row):
            if weight > 1e-4:
                place = (left + column * _BOX, row * _BOX, _BOX - 1, _BOX - 1)
                title = f"token {column} in the output of token {row}: {weight:.1%}"
                opacity = 0.25 + 0.75 * min(1.0, 3 * weight)
                picture.rect(*place, "activations", opacity=opacity, radius=0, title=title)
    return str(picture)


PAGE = Page(
    "attention",
    (
        Choice("model", "Model", plans.MODELS, "llama-3-8b"),
        Choice("kind", "Attention", _KINDS, "longformer"),
        Slider("seq_len", "Sequence length", _LENGTHS, 32768, "tokens"),
        plans.GPU,
    ),
    figures,
)
