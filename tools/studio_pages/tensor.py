"""The page of tensor parallelism: two products, divided by columns and then by rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional

from harness.layout.tensor import TensorPlan
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
    powers_of_two,
)
from tools.studio_app.svg import Svg

_LAYER = "model.layers.0."
_MLP, _ATTENTION = "MLP", "attention"
_WEIGHTS = {
    _MLP: (f"{_LAYER}mlp.up_proj.weight", f"{_LAYER}mlp.down_proj.weight"),
    _ATTENTION: (f"{_LAYER}self_attn.q_proj.weight", f"{_LAYER}self_attn.o_proj.weight"),
}
"""Names of A, of which attention has three alike (q, k and v), and of B."""
_WIDTH, _BOX = 760.0, 150.0
_FRAMES = (
    "two products, y = f(x A) B, on one GPU",
    "A is divided by columns, B by rows; x is on every GPU",
    "each GPU multiplies with its columns of A: a part of the hidden values",
    "each multiplies that part with its rows of B: a summand of y",
    "the summands are added (one all-reduce): y is whole on every GPU",
    "backward: the gradient of y is on every GPU, without any exchange",
    "each multiplies with its own B and A, transposed: gradients of its weights, a summand of x's",
    "the summands are added (the second all-reduce): the gradient of x is whole on every GPU",
)
_FORWARD = 5
"""Frames of the forward pass."""


@dataclass(frozen=True)
class Product:
    """The two products, whole and divided, and the gradients of x."""

    whole: torch.Tensor  # (tokens, size)
    summands: tuple[torch.Tensor, ...]  # of each GPU, (tokens, size)
    whole_grad: torch.Tensor  # (tokens, size)
    grads: tuple[torch.Tensor, ...]  # of each GPU, (tokens, size)

    @property
    def added(self) -> torch.Tensor:
        """The sum of what the GPUs have."""
        return torch.stack(self.summands).sum(0)

    @property
    def added_grad(self) -> torch.Tensor:
        """The sum of the gradients of x that the GPUs have."""
        return torch.stack(self.grads).sum(0)


def figures(values: Values) -> list[Figure]:
    """Return a frame of the two products, and how near the divided ones are."""
    size, ranks, tokens = values["size"], values["ranks"], values["tokens"]
    kind, heads, frame = values["part"], values["heads"], values["frame"] - 1
    product = multiplied(size, ranks, tokens, kind, heads)
    error = float((product.added - product.whole).abs().max())
    backward = float((product.added_grad - product.whole_grad).abs().max())
    shown, matrices = 8, 2 if kind == _MLP else 4
    parts = {
        f"GPU {place}": part[0, :shown].tolist() for place, part in enumerate(product.summands)
    }
    sums = {"added": product.added[0, :shown].tolist(), "whole": product.whole[0, :shown].tolist()}
    sent = 2 * (ranks - 1) / ranks * tokens * size * 2
    whole = matrices * size * size
    has = f"{heads // ranks} of {heads} heads" if kind == _ATTENTION else f"1 / {ranks} of A and B"
    return [
        Numbers(
            [
                Number("A GPU has", has, f"{gib(2 * whole / ranks)} of {gib(2 * whole)} in bf16"),
                Number("Difference", f"{error:.2g}", "of y, divided against whole"),
                Number("Difference backward", f"{backward:.2g}", "of the gradient of x"),
                Number("Operations of a GPU", f"{2 * whole * tokens / ranks:.3g}", "forward"),
                Number(
                    "Sent by each GPU", f"{sent / 1024:,.1f} KiB", "in each pass, bf16, by a ring"
                ),
            ]
        ),
        Drawing(
            _FRAMES[frame],
            _picture(size, ranks, frame, kind),
            [
                (f"series-{place % 8 + 1}", f"GPU {place}" if frame else "one GPU")
                for place in range(ranks if frame else 1)
            ],
        ),
        Chart(
            f"The first {shown} values of y for the first token",
            stacked([f"y{n}" for n in range(shown)], {**parts, **sums}, Axis(""), together=False),
        ),
    ]


def parts_of(
    size: int, ranks: int, kind: str = _MLP, heads: int = 32
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return of each GPU the rows of A's weight and the columns of B's that it has, by the plan of
    a Llama model. Weights are (out, in), as in PyTorch: rows of A's are columns of the product.
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
    """Return the products of random matrices in fp32, really divided as `parts_of` says, and what
    autograd makes of them.
    """
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
    return Product(whole, tuple(y for y, _ in parts), whole_grad, tuple(g for _, g in parts))


@cache  # 85 MB if somebody looks at all sizes
def _weights(size: int) -> tuple[torch.Tensor, ...]:
    draws = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, size, generator=draws) * size**-0.5 for _ in range(4))


def _picture(size: int, ranks: int, frame: int, kind_of_layer: str) -> str:
    """x, A, the hidden values, B and y, coloured by the GPU that has them; backward, their
    gradients, from the right to the left.
    """
    picture = Svg(_WIDTH, _BOX + 64, _FRAMES[frame])
    ranges = parts_of(size, ranks) if frame else [((0, size), (0, size))]
    is_backward, mlp = frame >= _FORWARD, kind_of_layer == _MLP
    d = "d" if is_backward else ""
    colours = [f"series-{place % 8 + 1}" for place in range(len(ranges))]
    thin, gap, top = 34.0, 30.0, 30.0
    left = 4.0
    for name, kind in (
        (f"{d}x", "row"),
        (f"{d}A" if mlp else f"{d}Q, {d}K, {d}V", "columns"),
        ("f(xA)" if mlp else "heads", "hidden"),
        (f"{d}B" if mlp else f"{d}O", "rows"),
        (f"{d}y", "y"),
    ):
        width, height = (_BOX, thin) if kind in ("row", "hidden", "y") else (_BOX, _BOX)
        if kind in ("row", "hidden", "y"):
            width = 100.0
        y = top + (_BOX - height) / 2
        picture.text(left + width / 2, 12, name, anchor="middle", bold=True)
        picture.rect(left, y, width, height, "grid", stroke="faint")
        shown = {"row": 0, "columns": 0, "hidden": 2, "rows": 0, "y": 3}[kind]
        if is_backward:
            shown = {"row": 6, "columns": 6, "hidden": 6, "rows": 6, "y": 5}[kind]
        if frame == 0 or frame >= shown:
            _fill(picture, kind, (left, y, width, height), ranges, size, colours, frame)
        left += width + gap
        if kind != "y":
            sign = {"row": "x", "columns": "=", "hidden": "x", "rows": "="}[kind]
            if is_backward:
                sign = "←"
            picture.text(left - gap / 2, top + _BOX / 2, sign, anchor="middle", size=15)
    return str(picture)


def _fill(
    picture: Svg,
    kind: str,
    box: tuple[float, float, float, float],
    ranges: list[tuple[tuple[int, int], tuple[int, int]]],
    size: int,
    colours: list[str],
    frame: int,
) -> None:
    left, top, width, height = box
    added = {"row": frame < _FORWARD or frame == len(_FRAMES) - 1, "y": frame >= _FORWARD - 1}
    if added.get(kind) or frame == 0:
        colour = "activations" if kind in ("row", "hidden", "y") else "weights"
        picture.rect(left, top, width, height, "gradients" if frame >= _FORWARD else colour)
        text = "on every GPU" if frame and kind in ("row", "y") else ""
        picture.text(
            left + width / 2, top + height + 14, text, size=11, fill="muted", anchor="middle",
            room=width,
        )  # fmt: skip
        return
    for place, (rows, columns) in enumerate(ranges):
        begin, end = columns if kind == "rows" else rows
        a, b = begin / size, end / size
        title = f"GPU {place}: {begin:,} to {end:,}"
        if kind == "rows":
            part = (left, top + a * height, width, (b - a) * height)
        elif kind in ("row", "y"):  # summands, all of the same size, on top of each other
            part = (left + place * 3, top + place * 3 - 6, width, height)
        else:
            part = (left + a * width, top, (b - a) * width, height)
        opacity = 0.75 if kind in ("row", "y") else 1
        picture.rect(*part, colours[place], stroke="surface", title=title, opacity=opacity)
    if kind in ("row", "y"):
        text = f"{len(ranges)} summands"
        picture.text(
            left + width / 2, top + height + 30, text, size=11, fill="muted", anchor="middle",
            room=width,
        )  # fmt: skip


PAGE = Page(
    slug="tensor",
    title="Tensor parallelism",
    controls=(
        Choice("part", "Part of a layer", tuple(_WEIGHTS), _MLP),
        Slider("size", "Rows and columns of A and B", powers_of_two(256, 2048), 1024),
        Slider("heads", "Heads of attention", (8, 16, 32), 16),
        Slider("ranks", "GPUs", (1, 2, 4, 8), 2),
        Slider("tokens", "Tokens", (1, 2, 4, 8, 16), 4),
        Slider("frame", "Step of the animation", tuple(range(1, 9)), 4, "of 8", plays=True),
    ),
    figures=figures,
    computed_by=(
        "harness.layout.tensor.TensorPlan",
        "tools.studio_pages.tensor.multiplied",
    ),
    formula="y = f(x A) B = sum over GPUs of f(x A_i) B_i, for columns A_i of A and rows B_i of B: "
    "f works on each value alone. Each GPU has 1 / r of the weights and of the arithmetic, and "
    "sends 2 (r - 1) / r x tokens x width x bytes, once forward, once backward. For attention A is "
    "q, k and v by heads, which do not see each other, and B the output projection.",
    sources=(("Megatron-LM, arXiv 1909.08053, section 3", "https://arxiv.org/abs/1909.08053"),),
)
