"""Mixed precision: rounding of a number, and of real gradients with a loss scale."""

import math
from functools import lru_cache

import torch

from harness.report.chart import Chart, line, lines
from tools.studio_app import small
from tools.studio_app.figures import Figure, Table, numbers
from tools.studio_app.page import Page, Slider, Typed, Values

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WIDTHS = {"fp32": 10.0, "bf16": 5.0, "fp16": 1.5}
"""Widths of the curves, which mostly coincide."""
_SAMPLES, _SEQ_LEN = 4, 256
_LOWEST_POWER = 160  # below that of fp32's smallest number


def figures(values: Values) -> list[Figure]:
    """Return the formats' rounding of a number, and of the gradients of a small model."""
    scale = 2.0 ** values["scale"]
    grads = gradients() * values["tokens"]
    rows = [_kept(name, grads, scale) for name in _DTYPES]
    _, bf16, fp16 = rows
    return [
        numbers(
            ("Gradients", f"{grads.numel():,}", "elements that are not 0 in fp32"),
            ("Lost in fp16", fp16[1], f"rounded to 0 at loss scale {scale:,.0f}"),
            ("Overflow in fp16", fp16[2], "infinite: the step is skipped"),
            ("Lost in bf16", bf16[1], "it has the range of fp32"),
        ),
        _histogram(grads, scale),
        Table(
            "The same gradients in each format",
            "format|become 0|become infinite|subnormal|mean rounding error",
            rows,
        ),
        _number(values["number"]),
        _update(values["weight"]),
        Table(
            "The formats",
            "format|bits: exponent, fraction|largest|smallest normal|smallest|step at 1",
            [_described(name) for name in _DTYPES],
        ),
    ]


@lru_cache
def gradients() -> torch.Tensor:
    """Return every nonzero element of the gradient of a Llama's mean loss over text, in fp32."""
    model = small.llama()
    small.backward(model, small.samples(_SAMPLES, torch.Generator().manual_seed(0), _SEQ_LEN))
    flat = small.flat_gradient(model)
    return flat[flat != 0]


def rounded(values: torch.Tensor, name: str) -> torch.Tensor:
    """Return fp32 numbers after a round trip through a format."""
    return values.to(_DTYPES[name]).float()


def _kept(name: str, grads: torch.Tensor, scale: float) -> tuple[str, ...]:
    scaled = grads * scale
    after = rounded(scaled, name)
    finite = torch.isfinite(after) & (after != 0)
    error = ((after[finite] - scaled[finite]) / scaled[finite]).abs().mean()
    tiny = torch.finfo(_DTYPES[name]).smallest_normal
    shares = (after == 0, torch.isinf(after), (after != 0) & (after.abs() < tiny))
    return (name, *(f"{float(part.float().mean()):.3%}" for part in shares), f"{error:.2g}")


def _histogram(grads: torch.Tensor, scale: float) -> Chart:
    """Return the shares of gradients by their power of two, after the formats."""
    curves = []
    for name in _DTYPES:
        after = rounded(grads * scale, name)
        after = after[torch.isfinite(after) & (after != 0)]
        powers = torch.frexp(after).exponent.long() + _LOWEST_POWER  # 2^(exponent - 1) and more
        counts = torch.bincount(powers.clamp(min=0), minlength=2 * _LOWEST_POWER).tolist()
        shares = [(place - _LOWEST_POWER - 1, n / len(grads)) for place, n in enumerate(counts)]
        points = [share for share in shares if -44 <= share[0] <= 20]
        curves.append(line(name, points, width=_WIDTHS[name]))
    return lines(
        "Gradients of a Llama of 2 layers, by size; all times the loss scale",
        curves,
        "power of two",
        "share",
        from_zero=True,
        height=320,
    )


def _number(text: str) -> Table:
    try:
        number = float(text)
    except ValueError:
        number = 0.1
    value = torch.tensor([number], dtype=torch.float64)
    rows = []
    for name, dtype in _DTYPES.items():
        there = float(value.to(dtype).double())
        bits = torch.tensor([number]).to(dtype).view(torch.int32 if name == "fp32" else torch.int16)
        width = 32 if name == "fp32" else 16
        pattern = f"{int(bits) % 2**width:0{width}b}"
        split = {"fp32": 9, "bf16": 9, "fp16": 6}[name]
        error = abs(there - number) / abs(number) if number and math.isfinite(there) else 0.0
        shown = f"{pattern[0]} {pattern[1:split]} {pattern[split:]}"
        rows.append((name, f"{there:.10g}", f"{error:.3g}", shown))
    return Table(
        f"{number:.10g} in each format",
        "format|becomes|relative error|bits: sign, exponent, fraction",
        rows,
    )


def _update(power: int) -> Table:
    """Return a weight of 1 after small updates: the reason for fp32 master weights."""
    update = 2.0**-power
    rows = []
    for name, dtype in _DTYPES.items():
        weight = torch.tensor(1.0, dtype=dtype)
        for _ in range(100):
            weight = weight + torch.tensor(update, dtype=dtype)
        rows.append((name, f"{float(weight):.8g}", f"{1 + 100 * update:.8g}"))
    return Table(
        f"A weight of 1 after 100 updates of 2^-{power} = {update:.3g}",
        "format|becomes|exactly",
        rows,
    )


def _described(name: str) -> tuple[str, ...]:
    info = torch.finfo(_DTYPES[name])
    bits = {"fp32": "8, 23", "bf16": "8, 7", "fp16": "5, 10"}[name]
    least = info.smallest_normal * info.eps
    numbers = (info.max, info.smallest_normal, least, info.eps)
    return (name, bits, *(f"{number:.4g}" for number in numbers))


PAGE = Page(
    "precision",
    (
        Slider("scale", "Loss scale, power of two", tuple(range(25)), 0),
        Slider("tokens", "Size of the gradients", (1e-5, 1e-4, 1e-3, 0.01, 0.1, 1, 10), 0.01, "x"),
        Slider("weight", "Small update, power of two", tuple(range(4, 25)), 9),
        Typed("number", "A number", "0.1", 40),
    ),
    figures,
    slow_at_first=({},),
)
