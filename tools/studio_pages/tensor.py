"""The page of tensor parallelism: two products, divided by columns and then by rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from harness.layout.tensor import TensorPlan
from tools.studio_app.charts import Axis, stacked
from tools.studio_app.memory import gib
from tools.studio_app.page import (
    Chart,
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

_UP, _DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
_HEADS = 32
_WIDTH, _BOX = 760.0, 150.0
_FRAMES = (
    "two products, y = f(x A) B, on one GPU",
    "A is divided by columns, B by rows; x is on every GPU",
    "each GPU multiplies with its columns of A: a part of the hidden values",
    "each multiplies that part with its rows of B: a summand of y",
    "the summands are added (one all-reduce): y is whole on every GPU",
)


@dataclass(frozen=True)
class Product:
    """The two products, whole and divided."""

    whole: torch.Tensor  # (tokens, size)
    summands: tuple[torch.Tensor, ...]  # of each GPU, (tokens, size)

    @property
    def added(self) -> torch.Tensor:
        """The sum of what the GPUs have."""
        return torch.stack(self.summands).sum(0)


def figures(values: Values) -> list[Figure]:
    """Return a frame of the two products, and how near the divided ones are."""
    size, ranks, tokens = values["size"], values["ranks"], values["tokens"]
    product = multiplied(size, ranks, tokens)
    error = float((product.added - product.whole).abs().max())
    most = float(product.whole.abs().max())
    shown, frame = 8, values["frame"] - 1
    parts = {
        f"GPU {place}": part[0, :shown].tolist() for place, part in enumerate(product.summands)
    }
    sums = {"added": product.added[0, :shown].tolist(), "whole": product.whole[0, :shown].tolist()}
    sent = 2 * (ranks - 1) / ranks * tokens * size * 2
    return [
        Numbers(
            [
                Number(
                    "Difference", f"{error:.2g}", f"divided against whole; largest y {most:.3g}"
                ),
                Number("Weights of a GPU", gib(2 * size * size / ranks * 2), "of both, in bf16"),
                Number("On one GPU", gib(2 * size * size * 2), f"2 x {size:,} x {size:,}"),
                Number("Operations of a GPU", f"{4 * size * size * tokens / ranks:.3g}"),
                Number("Sent by each GPU", f"{sent / 1024:,.1f} KiB", "forward, bf16, by a ring"),
            ]
        ),
        Drawing(_FRAMES[frame], _picture(size, ranks, frame)),
        Chart(
            f"The first {shown} values of y for the first token",
            stacked([f"y{n}" for n in range(shown)], {**parts, **sums}, Axis(""), together=False),
        ),
    ]


def parts_of(size: int, ranks: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return of each GPU the rows of A's weight and the columns of B's that it has, by the plan of
    a Llama model. Weights are (out, in), as in PyTorch: rows of A's are columns of the product.
    """
    plan = TensorPlan.make("llama", _HEADS, _HEADS, 32000)
    ranges = []
    for rank in range(ranks):
        up = plan.cut(_UP, (size, size), rank, ranks).get(0, ((0, size),))
        down = plan.cut(_DOWN, (size, size), rank, ranks).get(1, ((0, size),))
        ranges.append((up[0], down[0]))
    return ranges


def multiplied(size: int, ranks: int, tokens: int) -> Product:
    """Return the products of random matrices in fp32, really divided as `parts_of` says."""
    up, down = _weights(size)
    x = torch.randn(tokens, size, generator=torch.Generator().manual_seed(1))
    act = torch.nn.functional.silu
    whole = act(x @ up.T) @ down.T
    summands = tuple(
        act(x @ up[rows[0] : rows[1]].T) @ down[:, columns[0] : columns[1]].T
        for rows, columns in parts_of(size, ranks)
    )
    return Product(whole, summands)


@cache  # 180 MB if somebody looks at all sizes
def _weights(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    up, down = (torch.randn(size, size, generator=draws) * size**-0.5 for _ in range(2))
    return up, down


def _picture(size: int, ranks: int, frame: int) -> str:
    """x, A, the hidden values, B and y, coloured by the GPU that has them."""
    picture = Svg(_WIDTH, _BOX + 70, _FRAMES[frame])
    ranges = parts_of(size, ranks) if frame else [((0, size), (0, size))]
    colours = [f"series-{place % 8 + 1}" for place in range(len(ranges))]
    thin, gap, top = 34.0, 30.0, 30.0
    left = 4.0
    for name, kind in (
        ("x", "row"),
        ("A", "columns"),
        ("f(xA)", "hidden"),
        ("B", "rows"),
        ("y", "y"),
    ):
        width, height = (_BOX, thin) if kind in ("row", "hidden", "y") else (_BOX, _BOX)
        if kind in ("row", "hidden", "y"):
            width = 100.0
        y = top + (_BOX - height) / 2
        picture.text(left + width / 2, 12, name, anchor="middle", bold=True)
        picture.rect(left, y, width, height, "grid", stroke="faint")
        shown = {"row": 0, "columns": 0, "hidden": 2, "rows": 0, "y": 3}[kind]
        if frame == 0 or frame >= shown:
            _fill(picture, kind, (left, y, width, height), ranges, size, colours, frame)
        left += width + gap
        if kind != "y":
            sign = {"row": "x", "columns": "=", "hidden": "x", "rows": "="}[kind]
            picture.text(left - gap / 2, top + _BOX / 2, sign, anchor="middle", size=15)
    for place, colour in enumerate(colours[:8]):
        name = f"GPU {place}" if frame else "one GPU"
        picture.rect(4 + place * 88, _BOX + 52, 12, 12, colour)
        picture.text(21 + place * 88, _BOX + 58, name, size=12, fill="muted")
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
    if kind == "row" or (kind == "y" and frame == 4) or frame == 0:
        colour = "activations" if kind in ("row", "hidden", "y") else "weights"
        picture.rect(left, top, width, height, colour)
        text = "on every GPU" if frame and kind in ("row", "y") else ""
        picture.text(
            left + width / 2, top + height + 12, text, size=11, fill="muted", anchor="middle"
        )
        return
    for place, (rows, columns) in enumerate(ranges):
        begin, end = columns if kind == "rows" else rows
        a, b = begin / size, end / size
        title = f"GPU {place}: {begin:,} to {end:,}"
        if kind == "rows":
            part = (left, top + a * height, width, (b - a) * height)
        elif kind == "y":  # summands, all of the same size, on top of each other
            part = (left + place * 3, top + place * 3 - 6, width, height)
        else:
            part = (left + a * width, top, (b - a) * width, height)
        opacity = 0.75 if kind == "y" else 1
        picture.rect(*part, colours[place], stroke="surface", title=title, opacity=opacity)
    if kind == "y":
        text = f"{len(ranges)} summands"
        picture.text(
            left + width / 2, top + height + 26, text, size=11, fill="muted", anchor="middle"
        )


PAGE = Page(
    slug="tensor",
    title="Tensor parallelism",
    controls=(
        Slider("size", "Rows and columns of A and B", powers_of_two(256, 4096), 4096),
        Slider("ranks", "GPUs", (1, 2, 4, 8), 2),
        Slider("tokens", "Tokens", (1, 2, 4, 8, 16), 4),
        Slider("frame", "Step of the animation", (1, 2, 3, 4, 5), 5, "of 5", plays=True),
    ),
    figures=figures,
    computed_by=(
        "harness.layout.tensor.TensorPlan",
        "tools.studio_pages.tensor.multiplied",
    ),
    formula="y = f(x A) B = sum over GPUs of f(x A_i) B_i, for columns A_i of A and rows B_i of B: "
    "f works on each value alone. Each GPU has 1 / r of the weights and of the arithmetic, and "
    "sends 2 (r - 1) / r x tokens x width x bytes in each direction.",
    sources=(("Megatron-LM, arXiv 1909.08053, section 3", "https://arxiv.org/abs/1909.08053"),),
    slow_at_first=({},),
)
