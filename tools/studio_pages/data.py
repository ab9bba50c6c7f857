"""Data parallelism: different samples on each GPU, the same gradient on all."""

from functools import lru_cache
from typing import NamedTuple

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
_LEGEND = (
    ("weights", "weights"),
    ("gradients", "gradients: of the GPU, then of all"),
    ("activations", "samples"),
)


class Step(NamedTuple):
    """A step of a linear model on all ranks."""

    before: torch.Tensor  # weights, (features,)
    samples: list[list[int]]  # of each rank
    tokens: list[int]  # of each rank
    means: torch.Tensor  # (ranks, features), gradient per token of a rank; 0 if it read none
    reduced: torch.Tensor  # (features,), gradient of all ranks after the all-reduce
    whole: torch.Tensor  # (features,), gradient of all samples on one GPU


def figures(values: Values) -> list[Figure]:
    """Return a frame of one step, and the gradients that it rests on."""
    ranks, samples, frame = values["ranks"], values["samples"], values["frame"] - 1
    step = trained_step(ranks, samples, values["micro_batch"])
    apart = float((step.reduced - step.whole).abs().max())
    biased = float((step.means.mean(0) - step.whole).norm() / step.whole.norm())
    names = [f"w{place}" for place in range(_FEATURES)]
    rows = {f"GPU {rank}": mean.tolist() for rank, mean in enumerate(step.means)}
    rows |= {"all-reduced": step.reduced.tolist(), "a single GPU": step.whole.tolist()}
    sent = f"{2 * (ranks - 1) / ranks:.2f} x"
    return [
        numbers(
            ("Samples of GPU 0", str(len(step.samples[0])), f"of {samples}"),
            ("Difference", f"{apart:.2g}", "all-reduced against one GPU, at most"),
            ("Mean of means", f"{biased:.1%} off", "if each divided by its own tokens"),
            ("Sent by each GPU", sent, "the gradient's bytes, by a ring"),
        ),
        Drawing(_FRAMES[frame], _picture(step, frame), _LEGEND),
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

    def gradient(chosen: list[int]) -> tuple[torch.Tensor, int]:
        """Return the gradient summed over the tokens of samples, and their number."""
        if not chosen:
            return torch.zeros(_FEATURES), 0
        w = weights.clone().requires_grad_()
        x = torch.cat([inputs[index] for index in chosen])
        loss = ((x @ (w - target)) ** 2).sum() / 2
        loss.backward()
        assert w.grad is not None, "the loss depends on the weights"
        return w.grad, len(x)

    dealt = [
        [
            index
            for start in Share(Grid(ranks), rank).starts(samples, micro_batch)
            for index in range(start, start + micro_batch)
            if index < samples
        ]
        for rank in range(ranks)
    ]
    gradients, counts = zip(*map(gradient, dealt), strict=True)
    means = [summed / max(1, tokens) for summed, tokens in zip(gradients, counts, strict=True)]
    reduced = torch.stack(gradients).sum(0) / sum(counts)
    whole, total = gradient([*range(samples)])
    return Step(weights, dealt, [*counts], torch.stack(means), reduced, whole / total)


def _picture(step: Step, frame: int) -> str:
    count = len(step.samples)
    columns = min(count, _PER_ROW)
    width, row = WIDTH / columns, _CARD + 14
    inside = width - 24
    picture = Svg(-(-count // columns) * row, _FRAMES[frame])
    most = max(float(step.before.abs().max()), float(step.means.abs().max()))
    weights = step.before if frame < 4 else step.before - _LR * step.reduced
    for number, samples in enumerate(step.samples):
        left, top = number % columns * width + 12, number // columns * row
        picture.rect(left - 8, top, width - 8, _CARD, "page", stroke="grid", radius=8)
        picture.text(left + 2, top + 16, f"GPU {number}", bold=True)
        if frame >= 1:
            text, end = f"{len(samples)} samples, {step.tokens[number]} tokens", left + width - 26
            picture.text(end, top + 16, text, size=12, fill="muted", anchor="end", room=width - 120)
            each = inside / _SHOWN
            for place, sample in enumerate(samples[:_SHOWN]):
                x = left + place * each
                picture.box(x, top + 28, each - 2, 16, "activations", [str(sample)], size=11)
        _bars(picture, weights, "weights", left, top + 88, inside, most)
        if frame in (2, 3):
            own = step.means[number] if frame == 2 else step.reduced
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
