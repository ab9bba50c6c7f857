"""Data-set sizes: tokens against parameters, and the loss that scaling laws predict."""

from functools import lru_cache
from typing import NamedTuple

from harness.data.pair import bytes_per_id
from harness.layout.shape import Shape, flops_per_token, num_parameters
from harness.plan.model_config import find_model_config
from harness.report.chart import Chart, line, lines
from tools.studio_app.figures import Figure, Table, numbers
from tools.studio_app.page import Choice, Page, Slider, Values, powers_of_two
from tools.studio_app.plans import MODELS, name_of

_E, _A, _B, _ALPHA, _BETA = 1.69, 406.4, 410.7, 0.34, 0.28  # arXiv 2203.15556, equation 10
_RATIO = 20
"""Tokens per parameter by the rule of thumb (arXiv 2203.15556, table 3)."""


class Published(NamedTuple):
    """A model, and the tokens that it was trained on."""

    name: str
    parameters: float
    tokens: float
    source: str
    label: str = "right"
    """The side of its point where its name has room."""


PUBLISHED = (
    Published("GPT-3", 175e9, 300e9, "arXiv 2005.14165", "left"),
    Published("Gopher", 280e9, 300e9, "arXiv 2112.11446", "top"),
    Published("MT-NLG", 530e9, 270e9, "arXiv 2201.11990"),
    Published("Chinchilla", 70e9, 1.4e12, "arXiv 2203.15556", "right"),
    Published("OPT-175B", 175e9, 180e9, "arXiv 2205.01068", "bottom"),
    Published("PaLM", 540e9, 780e9, "arXiv 2204.02311"),
    Published("Pythia-12B", 12e9, 300e9, "arXiv 2304.01373"),
    Published("LLaMA-7B", 6.7e9, 1e12, "arXiv 2302.13971"),
    Published("LLaMA-65B", 65.2e9, 1.4e12, "arXiv 2302.13971", "left"),
    Published("Llama 2 70B", 70e9, 2e12, "arXiv 2307.09288", "top"),
    Published("Llama 3 8B", 8e9, 15e12, "arXiv 2407.21783"),
    Published("Llama 3.1 405B", 405e9, 15.6e12, "arXiv 2407.21783", "left"),
    Published("OLMo 2 7B", 7e9, 4e12, "arXiv 2501.00656"),
)


def figures(values: Values) -> list[Figure]:
    """Return a model and its tokens among published ones, and the loss that they predict."""
    shape = _shape(values["model"])
    count = num_parameters(shape)
    tokens, unique = values["tokens"] * 1e9, values["unique"] * 1e9
    flops = flops_per_token(shape, values["seq_len"]) * tokens
    size, best = optimum(flops)
    width = bytes_per_id(shape.vocab_size)
    epochs = tokens / unique
    then = f"and {best / 1e9:,.0f} billion tokens: {loss(size, best):.3f}"
    verdict = "good" if epochs <= 4 else "warning"
    rows = [
        (
            m.name,
            f"{m.parameters / 1e9:,.1f}",
            f"{m.tokens / 1e9:,.0f}",
            f"{m.tokens / m.parameters:,.1f}",
            m.source,
        )
        for m in PUBLISHED
    ]
    return [
        numbers(
            ("Parameters", f"{count / 1e9:,.2f} billion", values["model"]),
            ("Tokens per parameter", f"{tokens / count:,.1f}", f"rule of thumb: {_RATIO}"),
            ("Predicted loss", f"{loss(count, tokens):.3f}", "nats per token, their data"),
            ("Operations", f"{flops:.3g}", "of the whole run"),
            (f"{_RATIO} tokens per parameter", f"{size / 1e9:,.2f} billion", then),
            ("Epochs", f"{epochs:,.1f}", "up to 4 are nearly as good as new data", verdict),
            ("On disk", f"{unique * width / 2**30:,.0f} GiB", f"{width} bytes per token"),
        ),
        _map(count, tokens),
        _curve(count),
        Table(
            "Published models",
            "model|parameters, billion|tokens, billion|tokens per parameter|source",
            rows,
            [f"https://arxiv.org/abs/{m.source.removeprefix('arXiv ')}" for m in PUBLISHED],
        ),
    ]


def loss(parameters: float, tokens: float) -> float:
    """Return the loss in nats that Chinchilla's fit predicts (arXiv 2203.15556, equation 10)."""
    return _E + _A / parameters**_ALPHA + _B / tokens**_BETA


def optimum(flops: float) -> tuple[float, float]:
    """Return (parameters, tokens) with 20 tokens per parameter for a budget of 6 N D operations."""
    parameters = (flops / (6 * _RATIO)) ** 0.5
    return parameters, _RATIO * parameters


@lru_cache
def _shape(model: str) -> Shape:
    return Shape.from_hf(find_model_config(name_of(model))[0])


def _map(count: int, tokens: float) -> Chart:
    ratio = [(n, _RATIO * n) for n in (0.1, 1, 10, 100, 1000, 5000)]
    points = [(m.parameters / 1e9, m.tokens / 1e9) for m in PUBLISHED]
    names = [(m.name, m.label) for m in PUBLISHED]
    return lines(
        "Tokens against parameters, both in billions",
        [
            line(f"{_RATIO} tokens per parameter", ratio, "muted", "dashed"),
            line("published models", points, "series-1", "dots", names=names),
            line("this run", [(count / 1e9, tokens / 1e9)], "series-2", "dots"),
        ],
        "parameters, billion",
        "tokens, billion",
        log_x=True,
        log_y=True,
        x_range=(0.1, 10_000),
        y_range=(1, 100_000),
        height=400,
    )


def _curve(count: int) -> Chart:
    places = [10 ** (9 + step / 8) for step in range(41)]
    best = [(d / 1e9, loss(*optimum(6 * count * d))) for d in places]
    model = line("this model", [(d / 1e9, loss(count, d)) for d in places])
    return lines(
        "Predicted loss of this model over its tokens",
        [model, line(f"{_RATIO} tokens per parameter, same operations", best, style="dashed")],
        "tokens, billion",
        "nats",
        limits=[(f"no model is below {_E}", _E)],
        log_x=True,
        y_range=(1.5, 1.05 * max(y for curve in (model.y, [p[1] for p in best]) for y in curve)),
        height=300,
    )


PAGE = Page(
    "sizes",
    (
        Choice("model", "Model", MODELS, "llama-3-8b"),
        Slider("tokens", "Tokens to train on", powers_of_two(1, 16384), 256, "billion"),
        Slider("unique", "Unique tokens", powers_of_two(1, 16384), 256, "billion"),
        Slider("seq_len", "Sequence length", powers_of_two(512, 32768), 4096, "tokens"),
    ),
    figures,
)
