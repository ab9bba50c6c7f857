"""Tensor parallelism: two products, divided by columns and then by rows."""

from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional

from harness.layout.tensor import TensorPlan
from harness.report.formatting import gib
from tools.studio_app.figures import Bars, Drawing, Figure, Note, numbers
from tools.studio_app.page import Choice, Page, Slider, Values, powers_of_two
from tools.studio_app.svg import Svg, series

_LAYER = "model.layers.0."
_MLP, _ATTENTION = "MLP", "attention"
_WEIGHTS = {
    _MLP: (f"{_LAYER}mlp.up_proj.weight", f"{_LAYER}mlp.down_proj.weight"),
    _ATTENTION: (f"{_LAYER}self_attn.q_proj.weight", f"{_LAYER}self_attn.o_proj.weight"),
}
"""Names of A and B; attention has three such A (q, k and v)."""
_BOX, _THIN = 150.0, 34.0
_FRAMES = (
    "two products, y = f(x A) B, on one GPU",
    "A is sharded by columns, B by rows; x is on every GPU",
    "each GPU multiplies with its columns of A: a part of the hidden values",
    "each multiplies that part with its rows of B: a summand of y",
    "the summands are added (one all-reduce): y is complete on every GPU",
    "backward: the gradient of y is on every GPU, without any exchange",
    "each multiplies with its own B and A, transposed: gradients of its weights, a summand of x's",
    "the summands are added (the second all-reduce): the gradient of x is complete on every GPU",
)
_DIVIDED, _WHOLE = "divided by tokens", "whole on every GPU"
_OF_TOKENS = {
    1: "A is sharded by columns, B by rows; each GPU has some tokens of x",
    2: "all tokens of x are gathered (an all-gather); each GPU multiplies with its columns of A",
    4: "the summands are added and scattered (a reduce-scatter): each GPU has its tokens of y",
    5: "backward: the gradient of y is gathered (an all-gather)",
    7: "the summands are added and scattered: each GPU has the gradient of its tokens of x",
}
"""What differs with tensor_parallel.sequence_parallel (arXiv 2205.05198)."""
_CANNOT = "The tokens cannot be divided over these GPUs: x and y are whole on every GPU."
_FORWARD = 5
"""Frames of the forward pass."""
_SHOWN = ("wwwww", "wp.p.", "wppp.", "wpppp", "wpppw", "....w", "ppppw", "wpppw")
_SHOWN_DIVIDED = ("wwwww", "tp.p.", "wppp.", "tpppp", "tpppt", "....w", "ppppw", "tpppw")
"""How each frame shows x, A, the hidden values, B and y: whole, in parts, by tokens, or as an
outline.
"""
_PARTS = ("summands", "columns", "columns", "rows", "summands")
_NAMES = {_MLP: ("x", "A", "f(xA)", "B", "y"), _ATTENTION: ("x", "Q, K, V", "heads", "O", "y")}


class Product(NamedTuple):
    """The two products and the gradients of x, all (tokens, size): whole, and by GPU."""

    whole: torch.Tensor
    summands: torch.Tensor  # (GPUs, tokens, size)
    whole_grad: torch.Tensor
    grads: torch.Tensor  # (GPUs, tokens, size)


def figures(values: Values) -> list[Figure]:
    """Return a frame of the two products, and how far sharded ones are from unsharded ones."""
    size, ranks, tokens = values["size"], values["ranks"], values["tokens"]
    kind, heads, frame = values["part"], values["heads"], values["frame"] - 1
    divides = values["stream"] == _DIVIDED and tokens % ranks == 0
    title = _OF_TOKENS.get(frame, _FRAMES[frame]) if divides else _FRAMES[frame]
    product = multiplied(size, ranks, tokens, kind, heads)
    added = product.summands.sum(0)
    error = float((added - product.whole).abs().max())
    backward = float((product.grads.sum(0) - product.whole_grad).abs().max())
    rows = {f"GPU {place}": part for place, part in enumerate(product.summands)}
    rows |= {"added": added, "whole": product.whole}
    shown, whole = 8, (2 if kind == _MLP else 4) * size * size
    sent = 2 * (ranks - 1) / ranks * tokens * size * 2
    held = 2 * tokens * size * 2 / (ranks if divides else 1)
    has = f"{heads // ranks} of {heads} heads" if kind == _ATTENTION else f"1 / {ranks} of A and B"
    gpus = [f"GPU {place}" for place in range(ranks)] if frame else ["one GPU"]
    return [
        *([] if divides or values["stream"] == _WHOLE else [Note(_CANNOT, "warning")]),
        numbers(
            ("A GPU has", has, f"{gib(2 * whole / ranks)} of {gib(2 * whole)} in bf16"),
            ("Difference", f"{error:.2g}", "of y, sharded against unsharded"),
            ("Difference backward", f"{backward:.2g}", "of the gradient of x"),
            ("Operations of a GPU", f"{2 * whole * tokens / ranks:.3g}", "forward"),
            ("Sent by each GPU", f"{sent / 1024:,.1f} KiB", "in each pass, bf16, either way"),
            ("x and y on a GPU", f"{held / 1024:,.1f} KiB", "in bf16, between the two exchanges"),
        ),
        Drawing(
            title,
            _picture(values, title, divides),
            [(series(place), gpu) for place, gpu in enumerate(gpus)],
        ),
        Bars(
            f"The first {shown} values of y for the first token",
            "",
            [f"y{n}" for n in range(shown)],
            {name: part[0, :shown].tolist() for name, part in rows.items()},
            together=False,
            height=340,
        ),
    ]


def parts_of(
    size: int, ranks: int, kind: str = _MLP, heads: int = 32
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return, per GPU, its rows of A's weight and columns of B's, by a Llama model's plan.

    Weights are (out, in), as in PyTorch: rows of A's weight are columns of the product.
    """
    plan = TensorPlan.make("llama", heads, heads, 32000)
    first, second = _WEIGHTS[kind]
    ranges = []
    for rank in range(ranks):
        up = plan.cut(first, (size, size), rank, ranks).get(0, ((0, size),))
        down = plan.cut(second, (size, size), rank, ranks).get(1, ((0, size),))
        ranges.append((up[0], down[0]))
    return ranges


def multiplied(size: int, ranks: int, tokens: int, kind: str = _MLP, heads: int = 32) -> Product:
    """Return products of random fp32 matrices, divided as `parts_of` says, and their gradients."""
    *ups, down = _weights(size)[-2 if kind == _MLP else 0 :]
    width = size // heads
    draws = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(tokens, size, generator=draws) for _ in range(2))

    def run(rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        own = x.clone().requires_grad_()
        hidden = [own @ up[rows].T for up in ups]
        if kind == _MLP:
            middle = functional.silu(hidden[0])
        else:
            q, k, v = (part.view(1, tokens, -1, width).transpose(1, 2) for part in hidden)
            middle = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            middle = middle.transpose(1, 2).reshape(tokens, -1)
        y = middle @ down[:, columns].T
        y.backward(grad)
        assert own.grad is not None, "y depends on x"
        return y.detach(), own.grad

    whole, whole_grad = run(slice(None), slice(None))
    parts = [run(slice(*up), slice(*down)) for up, down in parts_of(size, ranks, kind, heads)]
    summands, grads = map(torch.stack, zip(*parts, strict=True))
    return Product(whole, summands, whole_grad, grads)


@cache  # 85 MiB once somebody has looked at all sizes
def _weights(size: int) -> tuple[torch.Tensor, ...]:
    draws = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, size, generator=draws) * size**-0.5 for _ in range(4))


def _picture(values: Values, title: str, divides: bool) -> str:
    """Return the matrices in the colours of the GPUs that hold them; backward, their gradients."""
    size, ranks, frame, kind = values["size"], values["ranks"], values["frame"] - 1, values["part"]
    picture, tokens = Svg(_BOX + 64, title), values["tokens"]
    ranges = parts_of(size, ranks) if frame else [((0, size), (0, size))]
    some = [(n * tokens // ranks, (n + 1) * tokens // ranks) for n in range(ranks)]
    is_backward, left, gap, top = frame >= _FORWARD, 4.0, 30.0, 30.0
    for place, (name, parts, shown) in enumerate(
        zip(_NAMES[kind], _PARTS, (_SHOWN_DIVIDED if divides else _SHOWN)[frame], strict=True)
    ):
        is_thin = place % 2 == 0
        width, height = (100.0, _THIN) if is_thin else (_BOX, _BOX)
        box = (left, top + (_BOX - height) / 2, width, height)
        if is_backward and place != 2:
            name = ", ".join(f"d{each}" for each in name.split(", "))
        picture.text(left + width / 2, 12, name, anchor="middle", bold=True)
        picture.rect(*box, "grid", stroke="faint")
        if shown == "w":
            plain = "activations" if is_thin else "weights"
            picture.rect(*box, "gradients" if is_backward else plain)
            if frame and parts == "summands":
                _below(picture, box, "on every GPU", 14)
        elif shown == "p":
            _parts(picture, parts, box, ranges, size)
        elif shown == "t":
            _parts(picture, "rows", box, [(each, each) for each in some], tokens)
        left += width + gap
        if place < 4:
            sign, at = "←" if is_backward else "x=x="[place], top + _BOX / 2
            picture.text(left - gap / 2, at, sign, anchor="middle", size=15)
    return str(picture)


def _parts(
    picture: Svg, parts: str, box: tuple[float, float, float, float],
    ranges: list[tuple[tuple[int, int], tuple[int, int]]], size: int,
) -> None:  # fmt: skip
    left, top, width, height = box
    opacity = 0.75 if parts == "summands" else 1
    for place, (columns, rows) in enumerate(ranges):
        begin, end = rows if parts == "rows" else columns
        a, b = begin / size, end / size
        part = {
            "rows": (left, top + a * height, width, (b - a) * height),
            "columns": (left + a * width, top, (b - a) * width, height),
            "summands": (left + place * 3, top + place * 3 - 6, width, height),
        }[parts]
        title = f"GPU {place}: {begin:,} to {end:,}"
        picture.rect(*part, series(place), stroke="surface", title=title, opacity=opacity)
    if parts == "summands":
        _below(picture, box, f"{len(ranges)} summands", 30)


def _below(picture: Svg, box: tuple[float, ...], text: str, by: float) -> None:
    left, top, width, height = box
    middle, y = left + width / 2, top + height + by
    picture.text(middle, y, text, size=11, fill="muted", anchor="middle", room=width)


PAGE = Page(
    "tensor",
    (
        Choice("part", "Part of a layer", tuple(_WEIGHTS), _MLP),
        Slider("size", "Rows and columns of A and B", powers_of_two(256, 2048), 1024),
        Slider("heads", "Heads of attention", (8, 16, 32), 16),
        Slider("ranks", "GPUs", (1, 2, 4, 8), 2),
        Slider("tokens", "Tokens", (1, 2, 4, 8, 16), 4),
        Choice("stream", "x and y", (_WHOLE, _DIVIDED), _WHOLE),
        Slider("frame", "Step of the animation", tuple(range(1, 9)), 4, "of 8", plays=True),
    ),
    figures,
)
