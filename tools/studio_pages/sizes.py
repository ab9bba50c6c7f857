"""The page of data-set sizes: tokens against parameters, and the loss that scaling laws predict."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from harness.layout.shape import Shape, flops_per_token, num_parameters
from harness.plan.model_config import find_model_config
from tools.studio_app.charts import Axis, Line, lines
from tools.studio_app.page import (
    Chart,
    Choice,
    Figure,
    Number,
    Numbers,
    Page,
    Slider,
    Table,
    Values,
    powers_of_two,
)
from tools.studio_app.plans import MODELS, name_of

_E, _A, _B, _ALPHA, _BETA = 1.69, 406.4, 410.7, 0.34, 0.28  # arXiv 2203.15556, equation 10
_RATIO = 20
"""Tokens per parameter at the optimum of a budget, roughly (arXiv 2203.15556, table 3)."""


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
    best, best_tokens = optimum(flops)
    width = 2 if shape.vocab_size <= 65536 else 4
    epochs = tokens / unique
    return [
        Numbers(
            [
                Number("Parameters", f"{count / 1e9:,.2f} billion", values["model"]),
                Number(
                    "Tokens per parameter", f"{tokens / count:,.1f}", f"{_RATIO} at the optimum"
                ),
                Number(
                    "Predicted loss", f"{loss(count, tokens):.3f}", "nats per token, their data"
                ),
                Number("Operations", f"{flops:.3g}", "of the whole run"),
                Number(
                    "Best for that budget",
                    f"{best / 1e9:,.2f} billion",
                    f"and {best_tokens / 1e9:,.0f} billion tokens: {loss(best, best_tokens):.3f}",
                ),
                Number(
                    "Epochs",
                    f"{epochs:,.1f}",
                    "up to 4 are nearly as good as new data",
                    "good" if epochs <= 4 else "warning",
                ),
                Number("On disk", f"{unique * width / 2**30:,.0f} GiB", f"{width} bytes a token"),
            ]
        ),
        Chart("Tokens against parameters, both in billions", _map(count, tokens), 400),
        Chart("Predicted loss of this model over its tokens", _curve(count, flops), 300),
        Table(
            "Published models",
            ("model", "parameters, billion", "tokens, billion", "tokens per parameter", "source"),
            [
                (
                    m.name,
                    f"{m.parameters / 1e9:,.1f}",
                    f"{m.tokens / 1e9:,.0f}",
                    f"{m.tokens / m.parameters:,.1f}",
                    m.source,
                )
                for m in PUBLISHED
            ],
            [f"https://arxiv.org/abs/{m.source.removeprefix('arXiv ')}" for m in PUBLISHED],
        ),
    ]


def loss(parameters: float, tokens: float) -> float:
    """Return the loss in nats that Chinchilla's fit predicts (arXiv 2203.15556, equation 10)."""
    return _E + _A / parameters**_ALPHA + _B / tokens**_BETA


def optimum(flops: float) -> tuple[float, float]:
    """Return (parameters, tokens) with 20 tokens a parameter for a budget of 6 N D operations."""
    parameters = (flops / (6 * _RATIO)) ** 0.5
    return parameters, _RATIO * parameters


@lru_cache
def _shape(model: str) -> Shape:
    return Shape.from_hf(find_model_config(name_of(model))[0])


def _map(count: int, tokens: float) -> dict[str, object]:
    ratio = [(n, _RATIO * n) for n in (0.1, 1, 10, 100, 1000)]
    points = [(m.parameters / 1e9, m.tokens / 1e9) for m in PUBLISHED]
    others = Line("published models", points, "series-1", dots=True)
    own = Line("this run", [(count / 1e9, tokens / 1e9)], "series-2", dots=True)
    line = Line(f"{_RATIO} tokens a parameter", ratio, "muted", dashed=True)
    options = lines(
        [own, line, others],
        Axis("parameters, billion", "log", low=0.1, high=3000),
        Axis("tokens, billion", "log", low=1),
    )
    options["tooltip"] = {**options["tooltip"], "trigger": "item", "formatter": "{b}: {c}"}
    shown = options["series"][2]
    shown["data"] = [
        {"name": m.name, "value": point, "label": {"position": m.label}}
        for m, point in zip(PUBLISHED, points, strict=True)
    ]
    shown["label"] = {"show": True, "formatter": "{b}", "color": "var(--muted)", "fontSize": 11}
    shown["labelLayout"] = {"hideOverlap": True}
    return options


def _curve(count: int, flops: float) -> dict[str, object]:
    places = [10 ** (9 + step / 8) for step in range(41)]
    model = Line("this model", [(d / 1e9, loss(count, d)) for d in places])
    best = [optimum(6 * count * d) for d in places]
    front = Line(
        "best size for the same operations",
        [(d / 1e9, loss(*pair)) for d, pair in zip(places, best, strict=True)],
        "series-2",
        dashed=True,
    )
    floor = {f"no model is below {_E}": _E}
    return lines(
        [model, front], Axis("tokens, billion", "log"), Axis("nats", low=1.5), limits=floor
    )


PAGE = Page(
    slug="sizes",
    title="Data-set sizes",
    controls=(
        Choice("model", "Model", MODELS, "llama-3-8b"),
        Slider("tokens", "Tokens to train on", powers_of_two(1, 16384), 256, "billion"),
        Slider("unique", "Tokens that are different", powers_of_two(1, 16384), 256, "billion"),
        Slider("seq_len", "Sequence length", powers_of_two(512, 32768), 4096, "tokens"),
    ),
    figures=figures,
    computed_by=(
        "tools.studio_pages.sizes.loss",
        "harness.layout.shape.num_parameters",
        "harness.layout.shape.flops_per_token",
    ),
    formula="Loss = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28 for N parameters and D tokens of their "
    "data; the optimum of a budget C = 6 N D has about 20 tokens a parameter. Operations are those "
    "of the plan, attention included. Up to 4 epochs are nearly as good as new tokens.",
    sources=(
        ("Chinchilla, arXiv 2203.15556", "https://arxiv.org/abs/2203.15556"),
        ("Muennighoff et al., arXiv 2305.16264", "https://arxiv.org/abs/2305.16264"),
    ),
)
