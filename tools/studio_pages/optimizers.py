"""Optimizers: their own steps over a surface with several minima, and their memory."""

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from harness.estimate.states import moment_bytes
from harness.layout.optimizer_table import OPTIMIZERS
from harness.report.chart import line, lines
from tools.studio_app.figures import Drawing, Figure, Table
from tools.studio_app.page import Choice, Page, Slider, Values
from tools.studio_app.plans import MODELS, estimate_of, planned
from tools.studio_app.svg import WIDTH, Svg, series

Point = tuple[float, float]
Points = tuple[Point, Point]
"""The rows of the weights, a matrix of 2 x 2."""
_NAMES = ("sgd", "momentum", "adam", "adamw", "adafactor", "lion", "muon")
_BY_GRADIENT = ("sgd", "momentum")
"""Their steps grow with the gradient; those of the others hardly depend on its length."""
_TIMES = {"muon": 5}
"""Its factor of 0.2 fits the steps of Adam in a large model, which are a fifth of those here."""
_STEPS = 80
_ALL = "all"
_HEIGHT = 470.0
_COLUMNS, _ROWS, _LEVELS = 96, 60, 9
_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


class Surface(NamedTuple):
    """A function of two weights."""

    value: Callable[[Any, Any], Any]
    """Takes numbers, or tensors if its gradient is needed."""
    x: Point
    """Range of the first weight that is shown."""
    y: Point
    starts: Points
    """Starting points of the two rows."""

    def sum(self, points: Any) -> Any:
        """Return the loss of both rows."""
        return sum(self.value(*point) for point in points)


SURFACES = {
    "four minima (Himmelblau / 100)": Surface(
        lambda x, y: (x * x + y - 11) ** 2 / 100 + (x + y * y - 7) ** 2 / 100,
        *((-5.5, 5.5), (-5.0, 5.0), ((-0.6, -1.2), (0.4, 4.4))),
    ),
    "curved valley (Rosenbrock)": Surface(
        lambda x, y: ((1 - x) ** 2 + 20 * (y - x * x) ** 2) / 10,
        *((-2.0, 2.0), (-1.0, 3.0), ((-1.5, 2.4), (1.7, -0.6))),
    ),
    "saddle between two minima": Surface(
        lambda x, y: x**4 / 4 - x * x / 2 + 2 * y * y + 0.25,
        *((-1.8, 1.8), (-1.2, 1.2), ((-0.02, 1.0), (0.5, -1.0))),
    ),
}


def figures(values: Values) -> list[Figure]:
    """Return the paths of the optimizers up to a step, their losses, and their memory."""
    name, surface = values["surface"], SURFACES[values["surface"]]
    names = [each for each in _NAMES if values["name"] in (_ALL, each)]
    paths = {}
    for each in names:
        rate = values["sgd_rate"] if each in _BY_GRADIENT else values["rate"] * _TIMES.get(each, 1)
        path = trajectory(each, name, rate, values["noise"], values["decay"])
        paths[each] = [*path[: values["steps"] + 1]]
    curves = [
        line(each, [(n, surface.sum(points)) for n, points in enumerate(path)], _colour(each))
        for each, path in paths.items()
    ]
    return [
        Drawing(
            f"{name}: the stronger the colour, the lower; paths begin at the rings",
            _picture(name, paths),
            [(_colour(each), each) for each in paths],
        ),
        lines("Loss, of both rows", curves, "step", from_zero=True, height=280),
        _memory(values["model"], paths, surface),
    ]


@lru_cache(maxsize=256)
def trajectory(
    name: str, surface: str, rate: float, noise: float, decay: float
) -> tuple[Points, ...]:
    """Return every point of the path of an optimizer, built as in train.py, on a 2 x 2 matrix.

    The loss is a sum over rows: only optimizers that use the whole matrix couple them. A path ends
    where it diverges.
    """
    world = SURFACES[surface]
    weights = torch.nn.Parameter(torch.tensor(world.starts, dtype=torch.float32))
    optimizer = build(name, [weights], rate, decay)
    noises = noise * torch.randn(_STEPS, 2, 2, generator=torch.Generator().manual_seed(0))
    points = [world.starts]
    for step in range(_STEPS):
        weights.grad = noises[step].clone()
        world.sum(weights).backward()
        optimizer.step()
        if not float(weights.detach().abs().max()) < 1e3:  # or NaN
            break
        (a, b), (c, d) = weights.detach().tolist()
        points.append(((a, b), (c, d)))
    return tuple(points)


class _Whole:
    """Stands in for harness.engine.optimizers.Matrices on one rank, where matrices are whole."""

    def orthogonalized(self, flat: torch.Tensor, update: torch.Tensor) -> Any:
        """Yield the orthogonal factor of a matrix, the matrix, and its larger dimension."""
        from harness.engine.optimizers import _orthogonal

        yield _orthogonal(update), flat.detach(), max(flat.shape)


def build(name: str, weights: list[torch.nn.Parameter], rate: float, decay: float) -> Any:
    """Return an optimizer: the harness's own, or torch's, as DeepSpeed and the harness build it."""
    from harness.engine.optimizers import BUILT_HERE  # takes seconds: it imports DeepSpeed

    entry = OPTIMIZERS[name]
    known = {"betas": (0.9, 0.95), "eps": 1e-8, "momentum": entry.momentum}
    settings: dict[str, Any] = {"lr": rate, "weight_decay": decay}
    settings |= {key: value for key, value in known.items() if key in entry.takes}
    classes = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if name in classes:
        return classes[name](weights, **settings)
    made = BUILT_HERE[entry.json_type]
    if name != "muon":
        return made(weights, **settings)
    optimizer: Any = made([{"params": weights, "muon": True}], **settings)
    optimizer.matrices = _Whole()
    return optimizer


def _colour(name: str) -> str:
    return series(_NAMES.index(name))


def _memory(model: str, paths: dict[str, list[Points]], surface: Surface) -> Table:
    rows = []
    for name, path in paths.items():
        inputs = estimate_of(planned({"model": model, "optimizer": name, "json": "zero0"})).inputs
        count, state, last = inputs.trained, moment_bytes(inputs), surface.sum(path[-1])
        bounds = "" if len(path) > 1 else "diverged"
        rows.append((name, f"{state:.4g}", f"{count * state / 2**30:,.2f}", f"{last:.4f}", bounds))
    head = f"optimizer|bytes per weight|GiB for {model}|loss here|"
    return Table("States beside the fp32 master weights, over all ranks", head, rows)


def _picture(name: str, paths: dict[str, list[Points]]) -> str:
    surface = SURFACES[name]
    (x0, x1), (y0, y1) = surface.x, surface.y
    picture = Svg(_HEIGHT, f"Paths of {', '.join(paths)} over {name}")
    for level, path in enumerate(_levels(name)):
        picture.path(path, "series-1", opacity=0.05 + 0.06 * (_LEVELS - 1 - level))

    def at(point: Point) -> Point:
        return (point[0] - x0) / (x1 - x0) * WIDTH, (y1 - point[1]) / (y1 - y0) * _HEIGHT

    for (label, points), row in itertools.product(paths.items(), range(2)):
        inside = [at(each[row]) for each in points if _is_near(each[row], surface)]
        if len(inside) > 1:
            picture.line(inside, _colour(label), width=2.2)
        if inside:
            picture.circle(*inside[-1], 4.5, _colour(label), title=f"{label}, row {row}")
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
    width, height = WIDTH / _COLUMNS, _HEIGHT / _ROWS
    xs = [x0 + (column + 0.5) / _COLUMNS * (x1 - x0) for column in range(_COLUMNS)]
    ys = [y1 - (row + 0.5) / _ROWS * (y1 - y0) for row in range(_ROWS)]
    values = [[math.log1p(5 * surface.value(x, y)) for x in xs] for y in ys]
    most = max(map(max, values))
    paths = [""] * _LEVELS
    for row, of_row in enumerate(values):
        levels = (min(_LEVELS - 1, int(value / most * _LEVELS)) for value in of_row)
        begin = 0
        for level, run in itertools.groupby(levels):
            end = begin + len(list(run))
            across = (end - begin) * width
            corner = f"M{begin * width:.1f} {row * height:.1f}"
            paths[level] += f"{corner}h{across:.1f}v{height:.1f}h{-across:.1f}z"
            begin = end
    return tuple(paths)


PAGE = Page(
    "optimizers",
    (
        Choice("surface", "Surface", tuple(SURFACES), next(iter(SURFACES))),
        Choice("name", "Optimizer", (_ALL, *_NAMES), _ALL),
        Slider("rate", "Rate of Adam and its like", _RATES, 0.1),
        Slider("sgd_rate", "Rate of sgd and momentum", _RATES, 0.03),
        Slider("noise", "Noise of the gradient", (0.0, 0.1, 0.3, 1.0, 3.0), 0.3, "std"),
        Slider("decay", "Weight decay", (0.0, 0.01, 0.1, 0.3), 0.1),
        Slider("steps", "Steps", tuple(range(0, _STEPS + 1, 5)), _STEPS, plays=True),
        Choice("model", "Memory of", MODELS, "llama-3-8b"),
    ),
    figures,
    slow_at_first=({},),
)
