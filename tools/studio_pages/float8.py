"""float8 beside bf16: the error of a product, and the time of a layer."""

from dataclasses import replace

import torch

from harness.estimate.hardware import GPUS
from harness.estimate.step_time.layer import layer_passes
from harness.estimate.step_time.machine import machine_of
from harness.report.chart import line, lines
from tools.studio_app import plans
from tools.studio_app.figures import Bars, Figure, numbers
from tools.studio_app.page import Choice, Page, Slider, Values, powers_of_two

_TOKENS, _DEPTH, _COLUMNS = 128, 256, 128
_OUTLIERS = (1, 100, 1000, 10_000, 100_000, 1_000_000)
_LENGTHS = powers_of_two(128, 16384)
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALES = _TENSORWISE, _ROWWISE = "one scale a tensor", "one scale a row"
_WAYS = {
    "bf16": ("bf16", False),
    f"e4m3, {_TENSORWISE}": ("e4m3", False),
    f"e4m3, {_ROWWISE}": ("e4m3", True),
    f"e5m2, {_TENSORWISE}": ("e5m2", False),
}
_SPEEDS = {
    "bf16": (False, False),
    "bf16, compiled": (False, True),
    "float8": (True, False),
    "float8, compiled": (True, True),
}
"""Whether a layer multiplies in float8, and whether it is compiled."""


def figures(values: Values) -> list[Figure]:
    """Return errors of a product with an outlier, and a layer's time in both precisions."""
    here = {way: f"{error(way, values['outlier']):.2%}" for way in _WAYS}
    tokens = values["tokens"]

    def gain(length: int) -> float:
        slow, fast = (layer_seconds(values, length, f"{of}, compiled") for of in ("bf16", "float8"))
        return slow / fast

    return [
        numbers(
            ("Error of bf16", here["bf16"], "of a product, relative to fp32"),
            ("A scale a tensor", here[f"e4m3, {_TENSORWISE}"], "e4m3, as in the forward pass"),
            ("A scale a row", here[f"e4m3, {_ROWWISE}"], "outliers spoil only their row"),
            ("A layer", f"{gain(tokens):.2f} x as fast", "compiled, forward and backward"),
        ),
        lines(
            "Error of a product over the size of one outlier among its inputs",
            [line(way, [(n, error(way, n)) for n in _OUTLIERS]) for way in _WAYS],
            "outlier, relative to the largest of the others",
            "relative error",
            log_x=True,
            log_y=True,
            height=320,
        ),
        Bars(
            f"A layer of {values['model']}, {tokens:,} tokens, forward and backward",
            "ms",
            list(_SPEEDS),
            {"time": [1e3 * layer_seconds(values, tokens, speed) for speed in _SPEEDS]},
            height=280,
        ),
        lines(
            "float8 against bf16, both compiled, over the tokens of a micro-batch",
            [line("", [(length, gain(length)) for length in _LENGTHS])],
            "tokens",
            "x as fast",
            log_x=True,
            height=280,
        ),
    ]


def rounded(values: torch.Tensor, name: str, by_row: bool) -> torch.Tensor:
    """Return (rows, depth) numbers after a round trip through a format; those of 8 bits are scaled
    so that the largest of the tensor, or of each row, is the format's largest (torchao's tensorwise
    and rowwise recipes, whose scales are computed anew for each product).
    """
    if name == "bf16":
        return values.bfloat16().float()
    dtype = _DTYPES[name]
    most = values.abs().amax(1, keepdim=True) if by_row else values.abs().amax()
    scale = torch.finfo(dtype).max / most
    return (values * scale).to(dtype).float() / scale


def error(way: str, outlier: float) -> float:
    """Return the relative error of x @ w in a format: x (128, 256) and w (256, 128) are normal but
    for one element of x, whose row is left out: its own products are large.
    """
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, _DEPTH, generator=draws)
    w = torch.randn(_COLUMNS, _DEPTH, generator=draws)
    x[0, 0] = outlier * x.abs().amax()
    exact = (x @ w.T)[1:]
    product = (rounded(x, *_WAYS[way]) @ rounded(w, *_WAYS[way]).T)[1:]
    return float((product - exact).norm() / exact.norm())


def layer_seconds(values: Values, tokens: int, speed: str) -> float:
    """Return the planner's seconds of a layer, forward and backward, for a sample of `tokens`."""
    inputs = plans.estimate_of(plans.planned({"model": values["model"]})).inputs
    float8, compiled = _SPEEDS[speed]
    inputs = replace(inputs, seq_len=tokens, float8=float8, compiled=compiled)
    passes = layer_passes(inputs, 0, machine_of(values["gpu"], plans.PER_NODE, "bf16"))
    return passes.forward.total + passes.backward.total


PAGE = Page(
    "float8",
    (
        Slider("outlier", "Outlier", _OUTLIERS, 10_000, "x the largest"),
        Choice("model", "Model", plans.MODELS, "llama-3-8b"),
        Choice("gpu", "GPU", tuple(name for name, gpu in GPUS.items() if gpu.float8), "h100-sxm"),
        Slider("tokens", "Tokens of a micro-batch", _LENGTHS, 4096),
    ),
    figures,
)
