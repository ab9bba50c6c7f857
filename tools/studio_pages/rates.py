"""Learning-rate finder: a range test of the small Llama, and the rates that it suggests, tried."""

from functools import lru_cache

import torch

from harness.report.chart import Mark, line, lines
from tools.find_lr import GIVE_UP, Found, judged, rates_to_try, smoothed
from tools.studio_app import small
from tools.studio_app.figures import Figure, numbers
from tools.studio_app.page import Choice, Page, Slider, Values
from tools.studio_pages.optimizers import build

_OPTIMIZERS = ("adamw", "adafactor", "lion", "momentum", "sgd")
_TRIED = (0.1, 1.0, 10.0)  # times the suggested rate
_TRIED_STEPS = 50


def figures(values: Values) -> list[Figure]:
    """Return the range test with its suggestion, and runs at and around the suggested rate."""
    name, batch = values["optimizer"], values["samples"]
    if values["lowest"] >= values["highest"]:
        raise ValueError('"From" must be below "To"')
    found = range_test(name, values["lowest"], values["highest"], values["steps"], batch)
    least = found.smooth[found.rates.index(found.lowest)]
    marks = [
        Mark({"x": found.suggested}, "var(--good)", "suggested", True),
        Mark({"x": found.lowest}, "var(--bad)", ""),
    ]
    tried = {
        f"{rate:.2g}": smoothed(trained(name, (rate,) * _TRIED_STEPS, batch))
        for rate in (found.suggested * times for times in _TRIED)
    }
    return [
        numbers(
            ("Suggested", f"{found.suggested:.2g}", "the smoothed loss falls fastest"),
            ("Lowest at", f"{found.lowest:.2g}", f"the smoothed loss: {least:.2f} nats"),
            ("Steps taken", f"{len(found.rates)} of {values['steps']}", "fewer if the loss rose"),
        ),
        lines(
            f"Range test of {name}; red: where the smoothed loss is lowest",
            [
                line("loss", [*zip(found.rates, found.losses, strict=True)], style="faint"),
                line("smoothed", [*zip(found.rates, found.smooth, strict=True)]),
            ],
            "learning rate",
            "nats",
            log_x=True,
            marks=marks,
            height=340,
        ),
        lines(
            f"{_TRIED_STEPS} steps at constant rates: a tenth, the suggested one, ten times it",
            [line(label, [*enumerate(losses, 1)]) for label, losses in tried.items()],
            "step",
            "nats, smoothed",
            height=300,
        ),
    ]


def range_test(name: str, lowest: float, highest: float, steps: int, batch: int) -> Found:
    """Return the result of a range test. Raises ConfigError if it suggests nothing."""
    rates = rates_to_try(lowest, highest, steps)
    losses = trained(name, tuple(rates), batch)
    return judged(rates[: len(losses)], list(losses))


@lru_cache(maxsize=64)
def trained(name: str, rates: tuple[float, ...], batch: int) -> tuple[float, ...]:
    """Return the loss before each step of a run of the small Llama, one rate for each step, on
    `batch` samples each; it ends early as a range test does.
    """
    model, draws = small.llama(), torch.Generator().manual_seed(0)
    optimizer = build(name, [*model.parameters()], rates[0], 0.0)
    losses: list[float] = []
    for rate in rates:
        loss = small.backward(model, small.samples(batch, draws))
        if not loss < float("inf"):
            break
        losses.append(loss)
        smooth = smoothed(losses)
        if smooth[-1] > min(smooth) + GIVE_UP:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        model.zero_grad()
    return tuple(losses)


PAGE = Page(
    "rates",
    (
        Choice("optimizer", "Optimizer", _OPTIMIZERS, "adamw"),
        Slider("lowest", "From", (1e-6, 1e-5, 1e-4, 1e-3), 1e-5),
        Slider("highest", "To", (1e-3, 0.01, 0.1, 1.0, 10.0), 1.0),
        Slider("steps", "Steps", (50, 75, 100), 100),
        Slider("samples", "Batch", (1, 2, 4), 4, "samples", "sample"),
    ),
    figures,
    slow_at_first=({},),
)
