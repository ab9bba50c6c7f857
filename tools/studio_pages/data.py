"""Data parallelism: different samples on each GPU, the same gradient on all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from harness.layout.grid import Grid, Share
from tools.studio_app.figures import Bars, Drawing, Figure, numbers
from tools.studio_app.page import Page, Slider, Values
from tools.studio_app.svg import WIDTH, Svg

_FEATURES = 6
_LR = 0.1
_CARD, _PER_ROW, _SHOWN = 150.0, 2, 12
_FRAMES = (
    "every GPU has the same weights",
    "every GPU reads its own samples",
    "each computes the gradient of its samples",
    "all-reduce: gradients are added, and divided by the tokens of all",
    "each takes the same step; the weights stay equal",
)


@dataclass(frozen=True)
class Rank:
    """One GPU's part of a step."""

    samples: tuple[int, ...]
    tokens: int
    gradient: torch.Tensor  # (features,), summed over its tokens

    @property
    def mean(self) -> torch.Tensor:
        """The gradient per token; zero if it read none."""
        return self.gradient / max(1, self.tokens)


@dataclass(frozen=True)
class Step:
    """A step of a linear model on all ranks."""

    before: torch.Tensor  # (features,)
    ranks: tuple[Rank, ...]
    whole: torch.Tensor  # (features,), of all samples on one GPU

    @property
    def reduced(self) -> torch.Tensor:
        """The gradient that all ranks have after the all-reduce."""
        total = sum(rank.tokens for rank in self.ranks)
        return torch.stack([rank.gradient for rank in self.ranks]).sum(0) / total

    @property
    def mean_of_means(self) -> torch.Tensor:
        """The gradient if each rank divided by its own tokens first."""
        return torch.stack([rank.mean for rank in self.ranks]).mean(0)


def figures(values: Values) -> list[Figure]:
    """Return a frame of one step, and the gradients that it rests on."""
    ranks, samples, frame = values["ranks"], values["samples"], values["frame"] - 1
    step = trained_step(ranks, samples, values["micro_batch"])
    apart = float((step.reduced - step.whole).abs().max())
    biased = float((step.mean_of_means - step.whole).norm() / step.whole.norm())
    names = [f"w{place}" for place in range(_FEATURES)]
    rows = {f"GPU {n}": r.mean.tolist() for n, r in enumerate(step.ranks)}
    rows |= {"all-reduced": step.reduced.tolist(), "a single GPU": step.whole.tolist()}
    sent = f"{2 * (ranks - 1) / ranks:.2f} x"
    return [
        numbers(
            ("Samples of GPU 0", str(len(step.ranks[0].samples)), f"of {samples}"),
            ("Difference", f"{apart:.2g}", "all-reduced against one GPU, at most"),
            ("Mean of means", f"{biased:.1%} off", "if each divided by its own tokens"),
            ("Sent by each GPU", sent, "the gradient's bytes, by a ring"),
        ),
        Drawing(_FRAMES[frame], _picture(step, frame)),
        Bars("Gradient of each weight", "", names, rows, together=False, height=340),
    ]


@lru_cache(maxsize=64)
def trained_step(ranks: int, samples: int, micro_batch: int) -> Step:
    """Return one step: samples as the harness deals them out, gradients by autograd."""
    draws = torch.Generator().manual_seed(0)
    weights = torch.randn(_FEATURES, generator=draws)
    target = torch.randn(_FEATURES, generator=draws)
    lengths = torch.randint(1, 9, (samples,), generator=draws)  # tokens of each sample
    inputs = [torch.randn(int(length), _FEATURES, generator=draws) for length in lengths]

    def gradient(chosen: tuple[int, ...]) -> tuple[torch.Tensor, int]:
        if not chosen:
            return torch.zeros(_FEATURES), 0
        w = weights.clone().requires_grad_()
        x = torch.cat([inputs[index] for index in chosen])
        loss = ((x @ (w - target)) ** 2).sum() / 2
        loss.backward()
        assert w.grad is not None, "the loss depends on the weights"
        return w.grad, len(x)

    parts = []
    for rank in range(ranks):
        share = Share(Grid(ranks), rank)
        chosen = tuple(
            index
            for start in share.starts(samples, micro_batch)
            for index in range(start, start + micro_batch)
            if index < samples
        )
        summed, tokens = gradient(chosen)
        parts.append(Rank(chosen, tokens, summed))
    whole, tokens = gradient(tuple(range(samples)))
    return Step(weights, tuple(parts), whole / tokens)


def _picture(step: Step, frame: int) -> str:
    count = len(step.ranks)
    columns = min(count, _PER_ROW)
    width, row = WIDTH / columns, _CARD + 14
    inside = width - 24
    picture = Svg(-(-count // columns) * row, _FRAMES[frame])
    means = [float(rank.mean.abs().max()) for rank in step.ranks]
    most = max(float(step.before.abs().max()), *means)
    weights = step.before if frame < 4 else step.before - _LR * step.reduced
    for number, rank in enumerate(step.ranks):
        left, top = number % columns * width + 12, number // columns * row
        picture.rect(left - 8, top, width - 8, _CARD, "page", stroke="grid", radius=8)
        picture.text(left + 2, top + 16, f"GPU {number}", bold=True)
        if frame >= 1:
            text, end = f"{len(rank.samples)} samples, {rank.tokens} tokens", left + width - 26
            picture.text(end, top + 16, text, size=12, fill="muted", anchor="end", room=width - 120)
            each = inside / _SHOWN
            for place, sample in enumerate(rank.samples[:_SHOWN]):
                x = left + place * each
                picture.box(x, top + 28, each - 2, 16, "activations", [str(sample)], size=11)
        _bars(picture, weights, "weights", left, top + 88, inside, most)
        if frame in (2, 3):
            own = rank.mean if frame == 2 else step.reduced
            _bars(picture, own, "gradients", left, top + 130, inside, most)
    return str(picture)


def _bars(
    picture: Svg, values: torch.Tensor, colour: str, left: float, middle: float, width: float,
    most: float,
) -> None:  # fmt: skip
    each, high = width / _FEATURES, 18.0
    picture.line([(left, middle), (left + width, middle)], "faint", width=1)
    for place, value in enumerate(values.tolist()):
        size = high * min(1.0, abs(value) / most)
        top = middle - size if value > 0 else middle
        picture.rect(left + place * each, top, each - 4, size, colour, title=f"{value:.4f}")


PAGE = Page(
    "data",
    (
        Slider("ranks", "GPUs", (1, 2, 3, 4, 6, 8), 4),
        Slider("samples", "Global batch", (8, 12, 16, 24, 32, 48), 16, "samples"),
        Slider("micro_batch", "Micro-batch", (1, 2, 4), 2, "samples", "sample"),
        Slider("frame", "Step of the animation", (1, 2, 3, 4, 5), 4, "of 5", plays=True),
    ),
    figures,
)
