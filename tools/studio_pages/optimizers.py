"""The page of optimizers: their own steps over a surface with several minima, and their memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from harness.layout.optimizer_table import OPTIMIZERS
from harness.layout.shape import num_parameters
from tools.studio_app.charts import Axis, Line, lines, series_colour
from tools.studio_app.page import (
    Chart,
    Choice,
    Drawing,
    Figure,
    Page,
    Slider,
    Table,
    Values,
)
from tools.studio_app.plans import MODELS, planned
from tools.studio_app.svg import Svg

Point = tuple[float, float]
Points = tuple[Point, Point]
"""The rows of the weights, a matrix of 2 x 2."""
_NAMES = ("sgd", "momentum", "adam", "adamw", "adafactor", "lion", "muon")
_BY_GRADIENT = ("sgd", "momentum")
"""Their steps are as long as the gradient; those of the others hardly depend on its length."""
_TIMES = {"muon": 5}
"""Its factor of 0.2 fits the steps of Adam in a large model, which are a fifth of those here."""
_STEPS = 80
_ALL = "all"
_WIDTH, _HEIGHT = 760.0, 470.0
_COLUMNS, _ROWS, _LEVELS = 96, 60, 9
_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


class Surface(NamedTuple):
    """A function of two weights, with its gradient."""

    value: Callable[[float, float], float]
    gradient: Callable[[float, float], Point]
    x: Point
    """Range of the first weight that is shown."""
    y: Point
    starts: Points
    """Of the two rows."""

    def sum(self, points: Points) -> float:
        """The loss of both rows."""
        return sum(self.value(*point) for point in points)


def _himmelblau(x: float, y: float) -> float:
    return (x * x + y - 11) ** 2 / 100 + (x + y * y - 7) ** 2 / 100


def _himmelblau_gradient(x: float, y: float) -> Point:
    a, b = x * x + y - 11, x + y * y - 7
    return (4 * x * a + 2 * b) / 100, (2 * a + 4 * y * b) / 100


def _valley(x: float, y: float) -> float:
    return ((1 - x) ** 2 + 20 * (y - x * x) ** 2) / 10


def _valley_gradient(x: float, y: float) -> Point:
    bend = y - x * x
    return (-2 * (1 - x) - 80 * x * bend) / 10, 4 * bend


def _saddle(x: float, y: float) -> float:
    return x**4 / 4 - x * x / 2 + 2 * y * y + 0.25


def _saddle_gradient(x: float, y: float) -> Point:
    return x**3 - x, 4 * y


SURFACES = {
    "four minima (Himmelblau / 100)": Surface(
        _himmelblau, _himmelblau_gradient, (-5.5, 5.5), (-5.0, 5.0), ((-0.6, -1.2), (0.4, 4.4))
    ),
    "curved valley (Rosenbrock)": Surface(
        _valley, _valley_gradient, (-2.0, 2.0), (-1.0, 3.0), ((-1.5, 2.4), (1.7, -0.6))
    ),
    "saddle between two minima": Surface(
        _saddle, _saddle_gradient, (-1.8, 1.8), (-1.2, 1.2), ((-0.02, 1.0), (0.5, -1.0))
    ),
}


def figures(values: Values) -> list[Figure]:
    """Return the paths of all optimizers up to a step, their losses, and their memory."""
    surface = SURFACES[values["surface"]]
    names = [name for name in _NAMES if values["name"] in (_ALL, name)]
    steps = values["steps"]
    paths = {name: _path(name, values)[: steps + 1] for name in names}
    losses = {
        name: [(n, surface.sum(points)) for n, points in enumerate(path)]
        for name, path in paths.items()
    }
    return [
        Drawing(
            f"{values['surface']}: the stronger the colour, the lower; paths begin at the rings",
            _picture(values["surface"], paths),
            [(_colour(name), name) for name in paths],
        ),
        Chart(
            "Loss, of both rows",
            lines(
                [Line(name, points, _colour(name)) for name, points in losses.items()],
                Axis("step"),
                Axis("", low=0),
            ),
            280,
        ),
        _memory(values["model"], paths, surface),
    ]


def _path(name: str, values: Values) -> list[Points]:
    rate = values["sgd_rate"] if name in _BY_GRADIENT else values["rate"] * _TIMES.get(name, 1)
    return list(trajectory(name, values["surface"], rate, values["noise"], values["decay"]))


@lru_cache(maxsize=256)
def trajectory(
    name: str, surface: str, rate: float, noise: float, decay: float
) -> tuple[Points, ...]:
    """Return the start and every step of an optimizer, as train.py builds it, on a 2 x 2 matrix.

    The loss is the sum over its rows, so only an optimizer that looks at the whole matrix steps
    otherwise than it would with each row alone. A path that leaves all bounds ends there.
    """
    world = SURFACES[surface]
    weights = torch.nn.Parameter(torch.tensor(world.starts, dtype=torch.float32))
    optimizer = build(name, weights, rate, decay)
    noises = noise * torch.randn(_STEPS, 2, 2, generator=torch.Generator().manual_seed(0))
    points = [world.starts]
    for step in range(_STEPS):
        weights.grad = noises[step] + torch.tensor([world.gradient(*row) for row in points[-1]])
        optimizer.step()
        if not float(weights.detach().abs().max()) < 1e3:  # NaN is not, either
            break
        (a, b), (c, d) = weights.detach().tolist()
        points.append(((a, b), (c, d)))
    return tuple(points)


class _Whole:
    """Stands for harness.engine.optimizers.Matrices where no rank has a part: all are whole."""

    def orthogonalized(self, flat: torch.Tensor, update: torch.Tensor) -> Any:
        """Yield the orthogonal factor of a matrix, the matrix, and its larger dimension."""
        from harness.engine.optimizers import _orthogonal

        yield _orthogonal(update), flat.detach(), max(flat.shape)


def build(name: str, weights: torch.nn.Parameter, rate: float, decay: float) -> Any:
    """Return an optimizer: the harness's own, or torch's, which DeepSpeed and it build."""
    # Takes seconds, as DeepSpeed comes with it.
    from harness.engine.optimizers import BUILT_HERE

    entry = OPTIMIZERS[name]
    settings: dict[str, Any] = {"lr": rate, "weight_decay": decay}
    if "betas" in entry.takes:
        settings["betas"] = (0.9, 0.95)
    if "eps" in entry.takes:
        settings["eps"] = 1e-8
    if "momentum" in entry.takes:
        settings["momentum"] = entry.momentum
    classes = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if name in classes:
        return classes[name]([weights], **settings)
    made = BUILT_HERE[entry.json_type]
    if name != "muon":
        return made([weights], **settings)
    optimizer: Any = made([{"params": [weights], "muon": True}], **settings)
    optimizer.matrices = _Whole()
    return optimizer


def _colour(name: str) -> str:
    return series_colour(_NAMES.index(name))


def _memory(model: str, paths: dict[str, list[Points]], surface: Surface) -> Table:
    plan = planned(model=model, ds_json="zero1", gpu=None, gpus=1, seq_len=512, micro_batch=1)
    assert plan.shape is not None, "the tensors of every preset are known"
    count = num_parameters(plan.shape)
    rows = []
    for name, path in paths.items():
        state = OPTIMIZERS[name].state_bytes
        last = surface.sum(path[-1])
        bounds = "" if len(path) > 1 else "left all bounds"
        rows.append((name, str(state), f"{count * state / 2**30:,.2f}", f"{last:.4f}", bounds))
    head = ("optimizer", "bytes a weight", f"GiB for {model}", "loss here", "")
    return Table("States beside the fp32 master weights, over all ranks", head, rows)


def _picture(name: str, paths: dict[str, list[Points]]) -> str:
    surface = SURFACES[name]
    picture = Svg(_WIDTH, _HEIGHT, f"Paths of {', '.join(paths)} over {name}")
    for level, path in enumerate(_levels(name)):
        picture.path(path, "series-1", opacity=0.05 + 0.06 * (_LEVELS - 1 - level))

    def at(point: Point) -> Point:
        (x0, x1), (y0, y1) = surface.x, surface.y
        return (point[0] - x0) / (x1 - x0) * _WIDTH, (y1 - point[1]) / (y1 - y0) * _HEIGHT

    for (label, path), row in itertools.product(paths.items(), range(2)):
        inside = [at(points[row]) for points in path if _is_near(points[row], surface)]
        if len(inside) > 1:
            picture.line(inside, _colour(label), width=2.2)
        if inside:
            x, y = inside[-1]
            picture.circle(x, y, 4.5, _colour(label), title=f"{label}, row {row}")
    for x, y in map(at, surface.starts):
        picture.circle(x, y, 6, "ink")
        picture.circle(x, y, 3.5, "surface")
    return str(picture)


def _is_near(point: Point, surface: Surface) -> bool:
    """Return True for points within the picture, or at most its size beyond it."""
    spans = zip(point, (surface.x, surface.y), strict=True)
    return all(2 * low - high <= place <= 2 * high - low for place, (low, high) in spans)


@lru_cache
def _levels(name: str) -> tuple[str, ...]:
    """Return an SVG path of cells for each level of a surface, the lowest first."""
    surface = SURFACES[name]
    (x0, x1), (y0, y1) = surface.x, surface.y
    width, height = _WIDTH / _COLUMNS, _HEIGHT / _ROWS
    values = [
        [
            math.log1p(
                5 * surface.value(
                    x0 + (column + 0.5) / _COLUMNS * (x1 - x0),
                    y1 - (row + 0.5) / _ROWS * (y1 - y0),
                )
            )
            for column in range(_COLUMNS)
        ]
        for row in range(_ROWS)
    ]  # fmt: skip
    most = max(map(max, values))
    paths = [""] * _LEVELS
    for row, line in enumerate(values):
        levels = [min(_LEVELS - 1, int(value / most * _LEVELS)) for value in line]
        begin = 0
        for column in range(1, _COLUMNS + 1):
            if column == _COLUMNS or levels[column] != levels[begin]:
                run = (column - begin) * width
                corner = f"M{begin * width:.1f} {row * height:.1f}"
                paths[levels[begin]] += f"{corner}h{run:.1f}v{height:.1f}h{-run:.1f}z"
                begin = column
    return tuple(paths)


PAGE = Page(
    slug="optimizers",
    title="Optimizers",
    controls=(
        Choice("surface", "Surface", tuple(SURFACES), next(iter(SURFACES))),
        Choice("name", "Optimizer", (_ALL, *_NAMES), _ALL),
        Slider("rate", "Rate of Adam and its like", _RATES, 0.1),
        Slider("sgd_rate", "Rate of sgd and momentum", _RATES, 0.03),
        Slider("noise", "Noise of the gradient", (0.0, 0.1, 0.3, 1.0, 3.0), 0.3, "std"),
        Slider("decay", "Weight decay", (0.0, 0.01, 0.1, 0.3), 0.1),
        Slider("steps", "Steps", tuple(range(0, _STEPS + 1, 5)), _STEPS, plays=True),
        Choice("model", "Memory of", MODELS, "llama-3-8b"),
    ),
    figures=figures,
    computed_by=(
        "tools.studio_pages.optimizers.trajectory",
        "harness.engine.optimizers.Lion",
        "harness.engine.optimizers.Orthogonalizing",
    ),
    formula="sgd: w - r g; momentum: w - r m; Adam, AdamW: w - r m / (sqrt(v) + eps), with "
    "decay in the gradient or beside it; Adafactor: v by its rows and columns; Lion: "
    "w - r sign(m); Muon: w - r 0.2 sqrt(width) times the orthogonal factor of m, "
    "with 5 times the rate here, as Adam's steps are longer on few weights.",
    sources=(
        ("AdamW, arXiv 1711.05101", "https://arxiv.org/abs/1711.05101"),
        ("Adafactor, arXiv 1804.04235", "https://arxiv.org/abs/1804.04235"),
        ("Lion, arXiv 2302.06675", "https://arxiv.org/abs/2302.06675"),
        ("Muon at scale, arXiv 2502.16982", "https://arxiv.org/abs/2502.16982"),
    ),
    slow_at_first=({},),
)
