"""Learning-rate schedules, all of them over one run."""

from harness.config.optim_and_schedule import DECAYS, OptimConfig, Schedule
from harness.report.chart import line, lines
from tools.studio_app.figures import Figure, Table
from tools.studio_app.page import Choice, Page, Slider, Values
from tools.studio_app.svg import series

_POINTS = 240
_ALL = "all"
_LENGTHS = (100, 300, 1000, 3000, 10_000, 100_000, 1_000_000)
_RATES = (1e-5, 3e-5, 1e-4, 3e-4, 6e-4, 1e-3, 3e-3, 1e-2)


def figures(values: Values) -> list[Figure]:
    """Return the rate at every step of each schedule, and the same in numbers."""
    total, curves, rows = values["steps"], [], []
    for place, (name, decay) in enumerate(DECAYS.items()):
        if values["schedule"] in (_ALL, name):
            points, schedule = rates(name, values), Schedule(_config(name, values), total)
            curves.append(line(name, points, series(place)))
            mean = sum(rate for _, rate in points) / len(points) / values["lr"]
            at = (schedule.lr(step) for step in (1, max(1, total // 2), total))
            keys = ", ".join(f"optim.{key}" for key in decay.settings)
            rows.append((name, *(f"{rate:.3g}" for rate in at), f"{mean:.1%}", keys))
    most = max(rate for curve in curves for rate in curve.y)
    return [
        lines(
            "Learning rate over the run",
            curves,
            "step",
            x_range=(0, total),
            y_range=(0, 1.05 * most),
            height=400,
        ),
        Table(
            "The same in numbers",
            "optim.schedule|first step|half of the run|last step|mean|its keys",
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
    "schedules",
    (
        Choice("schedule", "Schedule", (_ALL, *DECAYS), _ALL),
        Slider("steps", "Length", _LENGTHS, 1000, "steps"),
        Slider("lr", "Maximum rate", _RATES, 3e-3),
        Slider("warmup", "Warm-up", tuple(range(51)), 5, "% of the steps"),
        Choice("warmup_type", "Warm-up curve", ("linear", "log"), "linear"),
        Slider("floor", "Rate at the end", tuple(range(0, 101, 5)), 10, "% of the maximum"),
        Slider("decay", "Decay of wsd", tuple(range(0, 101, 5)), 20, "% of the steps"),
        Slider("power", "Power of polynomial", (0.5, 1.0, 1.5, 2.0, 3.0, 4.0), 2.0),
        Slider("cycles", "Cycles of cosine_restarts", tuple(range(1, 11)), 4),
        Slider("growth", "Growth of a cycle", (1.0, 1.5, 2.0, 3.0), 1.0, "x the last"),
    ),
    figures,
)
