"""Batch size: the gradient noise scale of a small run, and what a batch costs beside it."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from harness.report.chart import Mark, line, lines
from tools.studio_app import small
from tools.studio_app.figures import Figure, numbers
from tools.studio_app.page import Page, Slider, Values, powers_of_two

_STEPS, _PARTS, _SAMPLES = 100, 4, 2  # a batch: 4 micro-batches of 2 samples
_SMOOTHING, _LR = 0.9, 1e-3
_BATCHES = powers_of_two(16, 65536)  # tokens


class Measured(NamedTuple):
    """What one step of the small run tells of its gradient."""

    loss: float
    """Nats per token."""
    norm: float
    """Unbiased estimate of the squared norm of the true gradient."""
    variance: float
    """Trace of the gradient's covariance, for a batch of one token."""


def figures(values: Values) -> list[Figure]:
    """Return the noise scale over the run, and the price of each batch after some of its steps."""
    scales = noise_scales(trained())
    now, batch = scales[values["step"] - 1], values["batch"]
    steps, tokens = price(batch, now)
    loss = trained()[values["step"] - 1].loss
    marks = [Mark({"x": batch}, "var(--ink)", "this batch"), Mark({"x": now}, "var(--good)", "")]
    return [
        numbers(
            ("Noise scale", f"{now:,.0f} tokens", f"after step {values['step']}, loss {loss:.2f}"),
            ("Steps", f"{steps:.2f} x", "those of an infinite batch"),
            ("Tokens", f"{tokens:.2f} x", "those of a batch of one token"),
        ),
        lines(
            "Steps and tokens to the same loss; green: the noise scale, black: this batch",
            [
                line(name, [(b, price(b, now)[place]) for b in _BATCHES])
                for place, name in enumerate(("steps (time)", "tokens (cost)"))
            ],
            "tokens in a batch",
            "x the fewest",
            log_x=True,
            log_y=True,
            marks=marks,
            height=360,
        ),
        lines(
            "The noise scale during the small run: it grows as the loss falls",
            [line("", [*enumerate(scales, 1)])],
            "step",
            "tokens",
            log_y=True,
            height=280,
        ),
    ]


@lru_cache
def trained() -> tuple[Measured, ...]:
    """Train the small Llama, and measure every step's gradient."""
    model, draws = small.llama(), torch.Generator().manual_seed(0)
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=_LR)
    measured = []
    for _ in range(_STEPS):
        losses, gradients = [], []
        for _ in range(_PARTS):
            losses.append(small.backward(model, small.samples(_SAMPLES, draws)))
            gradients.append(small.flat_gradient(model))
        norm, variance = estimated(torch.stack(gradients), _SAMPLES * small.SEQ_LEN)
        measured.append(Measured(sum(losses) / _PARTS, norm, variance))
        means = torch.stack(gradients).mean(0).split([p.numel() for p in parameters])
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean.view_as(parameter)
        optimizer.step()
        model.zero_grad()
    return tuple(measured)


def estimated(gradients: torch.Tensor, tokens: int) -> tuple[float, float]:
    """Return the squared norm of the true gradient, and the trace of its covariance for one token,
    both unbiased (arXiv 1812.06162, appendix A.1), from (micro-batches, elements) gradients of so
    many tokens each: with b tokens in each and B in all, (B |G_B|^2 - b |G_b|^2) / (B - b), and
    (|G_b|^2 - |G_B|^2) / (1/b - 1/B).
    """
    part, whole = tokens, tokens * len(gradients)
    of_parts = float(gradients.square().sum(1).mean())
    of_whole = float(gradients.mean(0).square().sum())
    norm = (whole * of_whole - part * of_parts) / (whole - part)
    return norm, (of_parts - of_whole) / (1 / part - 1 / whole)


def noise_scales(measured: Sequence[Measured]) -> list[float]:
    """Return the simple noise scale after each step, in tokens: the variance over the squared norm,
    each smoothed by itself because their ratio is biased.
    """
    norm = variance = 0.0
    scales = []
    for each in measured:
        norm = _SMOOTHING * norm + (1 - _SMOOTHING) * each.norm
        variance = _SMOOTHING * variance + (1 - _SMOOTHING) * each.variance
        scales.append(max(1.0, variance / norm) if norm > 0 else scales[-1] if scales else 1.0)
    return scales


def price(batch: float, scale: float) -> tuple[float, float]:
    """Return the steps and the tokens to the same loss with a batch of so many tokens, relative to
    the fewest: 1 + scale / batch and 1 + batch / scale (arXiv 1812.06162, equation 2.11).
    """
    return 1 + scale / batch, 1 + batch / scale


PAGE = Page(
    "batch",
    (
        Slider("batch", "Batch", _BATCHES, 1024, "tokens"),
        Slider("step", "After step", tuple(range(5, _STEPS + 1, 5)), _STEPS, plays=True),
    ),
    figures,
    slow_at_first=({},),
)
