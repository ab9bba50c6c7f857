"""The page of learning-rate schedules, all of them over one run."""

from __future__ import annotations

from harness.config.optim_and_schedule import DECAYS, OptimConfig, Schedule
from tools.studio_app.charts import Axis, Line, lines
from tools.studio_app.page import (
    Chart,
    Choice,
    Figure,
    Page,
    Slider,
    Table,
    Values,
)

_POINTS = 240
_ALL = "all"
_RATES = (1e-5, 3e-5, 1e-4, 3e-4, 6e-4, 1e-3, 3e-3, 1e-2)


def figures(values: Values) -> list[Figure]:
    """Return the rate at every step of each schedule, and a table of what they come to."""
    names = [name for name in DECAYS if values["schedule"] in (_ALL, name)]
    total = values["steps"]
    curves = {name: rates(name, values) for name in names}
    rows = []
    for name, points in curves.items():
        schedule = Schedule(_config(name, values), total)
        mean = sum(rate for _, rate in points) / len(points) / values["lr"]
        half = schedule.lr(max(1, total // 2))
        cells = (schedule.lr(1), half, schedule.lr(total))
        settings = ", ".join(f"optim.{key}" for key in DECAYS[name].settings)
        rows.append((name, *(f"{rate:.3g}" for rate in cells), f"{mean:.1%}", settings))
    places = {name: f"series-{n + 1}" for n, name in enumerate(DECAYS)}
    return [
        Chart(
            "Learning rate over the run",
            lines(
                [Line(name, points, places[name]) for name, points in curves.items()],
                Axis("step", low=0, high=total, ends=True),
                Axis("rate", low=0),
            ),
            400,
        ),
        Table(
            "The same in numbers",
            ("optim.schedule", "first step", "half of the run", "last step", "mean", "its keys"),
            rows,
        ),
    ]


def rates(name: str, values: Values) -> list[tuple[int, float]]:
    """Return (step, rate) of a schedule at some steps, the first and the last among them."""
    total = values["steps"]
    schedule = Schedule(_config(name, values), total)
    steps = sorted({1 + (total - 1) * point // _POINTS for point in range(_POINTS + 1)})
    return [(step, schedule.lr(step)) for step in steps]


def _config(name: str, values: Values) -> OptimConfig:
    return OptimConfig.model_validate(
        {
            "schedule": name,
            "lr": values["lr"],
            "warmup_steps": round(values["warmup"] / 100 * values["steps"]),
            "warmup_type": values["warmup_type"],
            "min_lr_ratio": values["floor"] / 100,
            "decay_fraction": values["decay"] / 100,
            "power": values["power"],
            "cycles": values["cycles"],
            "cycle_growth": values["growth"],
        }
    )


PAGE = Page(
    slug="schedules",
    title="Learning-rate schedules",
    controls=(
        Choice("schedule", "Schedule", (_ALL, *DECAYS), _ALL),
        Slider(
            "steps", "Length", (100, 300, 1000, 3000, 10_000, 100_000, 1_000_000), 1000, "steps"
        ),
        Slider("lr", "Maximum rate", _RATES, 3e-3),
        Slider("warmup", "Warm-up", tuple(range(51)), 5, "% of the steps"),
        Choice("warmup_type", "Warm-up curve", ("linear", "log"), "linear"),
        Slider("floor", "Rate at the end", tuple(range(0, 101, 5)), 10, "% of the maximum"),
        Slider("decay", "Decay of wsd", tuple(range(0, 101, 5)), 20, "% of the steps"),
        Slider("power", "Power of polynomial", (0.5, 1.0, 1.5, 2.0, 3.0, 4.0), 2.0),
        Slider("cycles", "Cycles of cosine_restarts", tuple(range(1, 11)), 4),
        Slider("growth", "Growth of a cycle", (1.0, 1.5, 2.0, 3.0), 1.0, "x the last"),
    ),
    figures=figures,
    computed_by=("harness.config.optim_and_schedule.Schedule",),
    formula="Warm-up rises to the maximum; then rate = maximum x (floor + (1 - floor) x share), "
    "share falling from 1 to 0: cosine 0.5 (1 + cos(pi x)), linear 1 - x, "
    "polynomial (1 - x)^power, wsd 1 and then linear; inverse_sqrt is "
    "sqrt(warm-up / step), whatever the length.",
    sources=(
        ("SGDR, arXiv 1608.03983", "https://arxiv.org/abs/1608.03983"),
        ("MiniCPM (wsd), arXiv 2404.06395", "https://arxiv.org/abs/2404.06395"),
        ("Attention is all you need, arXiv 1706.03762", "https://arxiv.org/abs/1706.03762"),
    ),
)
