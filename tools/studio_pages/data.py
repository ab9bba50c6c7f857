"""The page of data parallelism: other samples on each GPU, one gradient on all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from harness.layout.grid import Grid, Share
from tools.studio_app.charts import Axis, stacked
from tools.studio_app.page import Chart, Drawing, Figure, Number, Numbers, Page, Slider, Values
from tools.studio_app.svg import Svg

_FEATURES = 6
_LR = 0.1
_WIDTH, _CARD, _PER_ROW = 760.0, 150.0, 2
_FRAMES = (
    "every GPU has the same weights",
    "every GPU reads samples of its own",
    "each computes the gradient of its own samples",
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
    after = {"all-reduced": step.reduced.tolist(), "one GPU alone": step.whole.tolist()}
    return [
        Numbers(
            [
                Number("Samples of GPU 0", str(len(step.ranks[0].samples)), f"of {samples}"),
                Number("Difference", f"{apart:.2g}", "all-reduced against one GPU, at most"),
                Number("Mean of means", f"{biased:.1%} off", "if each divided by its own tokens"),
                Number(
                    "Sent by each GPU",
                    f"{2 * (ranks - 1) / ranks:.2f} x",
                    "the gradient's bytes, by a ring",
                ),
            ]
        ),
        Drawing(_FRAMES[frame], _picture(step, frame)),
        Chart(
            "Gradient of each weight", stacked(names, {**rows, **after}, Axis(""), together=False)
        ),
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
    width = _WIDTH / columns
    lines = -(-count // columns)
    picture = Svg(_WIDTH, lines * (_CARD + 14), _FRAMES[frame])
    most = max(
        float(step.before.abs().max()),
        *(float(rank.mean.abs().max()) for rank in step.ranks),
    )
    for number, rank in enumerate(step.ranks):
        left, top = number % columns * width, number // columns * (_CARD + 14)
        picture.rect(left + 4, top, width - 8, _CARD, "page", stroke="grid", radius=8)
        picture.text(left + 14, top + 16, f"GPU {number}", size=13, bold=True)
        if frame >= 1:
            picture.text(
                left + width - 14, top + 16, f"{len(rank.samples)} samples, {rank.tokens} tokens",
                size=12, fill="muted", anchor="end", room=width - 120,
            )  # fmt: skip
            for place, sample in enumerate(rank.samples[:12]):
                x = left + 12 + place * (width - 24) / 12
                picture.rect(x, top + 28, (width - 24) / 12 - 2, 16, "activations")
                middle = x + (width - 24) / 24 - 1
                text = str(sample)
                room = (width - 24) / 12 - 2
                picture.text(
                    middle, top + 36, text, size=11, fill="on-colour", anchor="middle", room=room
                )
        weights = step.before if frame < 4 else step.before - _LR * step.reduced
        _bars(picture, weights, "weights", left + 12, top + 88, width - 24, most)
        if frame in (2, 3):
            own = rank.mean if frame == 2 else step.reduced
            _bars(picture, own, "gradients", left + 12, top + 130, width - 24, most)
    return str(picture)


def _bars(
    picture: Svg,
    values: torch.Tensor,
    colour: str,
    left: float,
    middle: float,
    width: float,
    most: float,
) -> None:
    each, high = width / _FEATURES, 18.0
    picture.line([(left, middle), (left + width, middle)], "faint", width=1)
    for place, value in enumerate(values.tolist()):
        size = high * min(1.0, abs(value) / most)
        top = middle - size if value > 0 else middle
        picture.rect(left + place * each, top, each - 4, size, colour, title=f"{value:.4f}")


PAGE = Page(
    slug="data",
    title="Data parallelism",
    controls=(
        Slider("ranks", "GPUs", (1, 2, 3, 4, 6, 8), 4),
        Slider("samples", "Global batch", (8, 12, 16, 24, 32, 48), 16, "samples"),
        Slider("micro_batch", "Micro-batch", (1, 2, 4), 2, "samples", "sample"),
        Slider("frame", "Step of the animation", (1, 2, 3, 4, 5), 4, "of 5", plays=True),
    ),
    figures=figures,
    computed_by=(
        "harness.layout.grid.Share",
        "harness.layout.grid.Grid",
        "tools.studio_pages.data.trained_step",
    ),
    formula="Gradient of the batch = sum over GPUs of their tokens' gradients / tokens of all "
    "GPUs. Samples have unequal numbers of tokens here, so the mean of the GPUs' means is another "
    "gradient. A ring all-reduce sends 2 (r - 1) / r of the gradient's bytes from each GPU.",
    sources=(
        ("Li et al., PyTorch Distributed, arXiv 2006.15704", "https://arxiv.org/abs/2006.15704"),
        ("Goyal et al., arXiv 1706.02677", "https://arxiv.org/abs/1706.02677"),
    ),
)
