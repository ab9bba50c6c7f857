"""Every optimizer in the real engine on two ranks, compared with torch's own on whole tensors."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import _muon

from harness.checkpoint.index import Index, merged, to_index
from harness.checkpoint.reader import Reader
from harness.checkpoint.tensor_file import write_fragments
from harness.engine.deepspeed_0_19.internals import inner_optimizer
from harness.engine.optimizers import BUILT_HERE
from harness.engine.state import set_steps
from harness.layout.optimizer_table import OPTIMIZERS
from tests.engine.engines import WORLD, cells, engine_of, folder, gathered, share_of, written
from tests.engine.small import FAMILIES
from tests.ranks import ranks
from tests.tables import beside

EIGHT_BIT = importlib.util.find_spec("bitsandbytes") is not None

LR, STEPS, DECAY, BETAS, EPS, MOMENTUM = 1e-2, 3, 0.1, (0.9, 0.95), 1e-8, 0.9
WIDE = 64  # the longest side of a layer's matrix
Tensors = dict[str, torch.Tensor]
Reference = Callable[[Tensors, Tensors], None]  # applies gradients to weights, in place


def decays(name: str) -> bool:
    return "norm" not in name and "embed" not in name


RULES = [{"pattern": "lm_head", "lr_multiplier": 0.5}, {"pattern": "up_proj", "weight_decay": 0.0}]


def groups(weights: Tensors) -> list[dict[str, Any]]:
    """Return groups according to RULES."""
    return [
        {
            "params": [weight],
            "weight_decay": DECAY if decays(name) and "up_proj" not in name else 0.0,
            "lr": LR / 2 if "lm_head" in name else LR,
        }
        for name, weight in weights.items()
    ]


def torchs(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[..., Reference]:
    """Return a function that creates references from torch's own class for a run's weights."""

    def reference(weights: Tensors) -> Reference:
        optimizer = make(groups(weights), **settings)

        def step(weights: Tensors, gradients: Tensors) -> None:
            for name, weight in weights.items():
                weight.grad = gradients[name]
            optimizer.step()

        return step

    return reference


def lion(weights: Tensors) -> Reference:
    """Return program 1 of arXiv 2302.06675, line by line."""
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    settings = dict(zip(weights, groups(weights), strict=True))

    def step(weights: Tensors, gradients: Tensors) -> None:
        for name, weight in weights.items():
            update = BETAS[0] * momenta[name] + (1 - BETAS[0]) * gradients[name]
            momenta[name] = BETAS[1] * momenta[name] + (1 - BETAS[1]) * gradients[name]
            decay, lr = settings[name]["weight_decay"], settings[name]["lr"]
            weight -= lr * (update.sign() + decay * weight)

    return step


def matrices(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a matrix, or those of a stack of experts, in the same memory."""
    return list(tensor.view(-1, *tensor.shape[-2:]))


def muon(weights: Tensors) -> Reference:
    """Return torch.optim.Muon for the layers' matrices, AdamW for the rest."""
    settings = dict(zip(weights, groups(weights), strict=True))
    by_muon = {n: matrices(weights[n]) for n in weights if "layers" in n and weights[n].ndim > 1}
    of_layers = [{**settings[n], "params": parts} for n, parts in by_muon.items()]
    optimizers = [
        torch.optim.Muon(of_layers, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([settings[n] for n in weights if n not in by_muon], betas=BETAS, eps=EPS),
    ]

    def step(weights: Tensors, gradients: Tensors) -> None:
        for name, weight in weights.items():
            weight.grad = gradients[name]
        for name, parts in by_muon.items():
            for part, gradient in zip(parts, matrices(gradients[name]), strict=True):
                part.grad = gradient
        for optimizer in optimizers:
            optimizer.step()

    return step


_ADAM = {"betas": BETAS, "eps": EPS}
REFERENCES: dict[str, Callable[[Tensors], Reference]] = {
    "adamw": torchs(torch.optim.AdamW, **_ADAM),
    "adam": torchs(torch.optim.Adam, **_ADAM),
    "sgd": torchs(torch.optim.SGD),
    "momentum": torchs(torch.optim.SGD, momentum=MOMENTUM),
    "adagrad": torchs(torch.optim.Adagrad, eps=EPS),
    "lion": lion,
    "muon": muon,
    "adafactor": torchs(torch.optim.Adafactor),
}
_VALUES = {"betas": list(BETAS), "eps": EPS, "momentum": MOMENTUM}
SETTINGS = {name: {key: _VALUES[key] for key in row.takes} for name, row in OPTIMIZERS.items()}
SETTINGS |= {"sgd": {}, "adam8bit": {}}
TESTED = beside(__file__, "layouts.toml")["tested"]
LAYOUTS, FUSED = TESTED["optimizers"], TESTED["fused"]
# Of a mixture, whose experts' matrices are stacked, for Muon.
EXPERTS = tuple(f"zero{n} mixture" for n in (0, 1, 3))


def layouts_of(name: str) -> list[str]:
    usual, fused = ["zero0", "zero2 offload", "zero3"], ["zero0 fused", "zero3 fused"]
    many = {"muon": [*LAYOUTS, *FUSED, *EXPERTS], "lion": LAYOUTS, "adamw": [*usual, *FUSED]}
    few = {"adam": [*usual, *fused], "adafactor": ["zero0", "zero0 pipeline2"]}
    return (many | few).get(name, usual)


def engine_with(name: str, layout: str, **more: Any) -> Any:
    """Build an engine of a layout with an optimizer. Collective."""
    optim = {"name": name, "lr": LR, "weight_decay": DECAY, **SETTINGS[name], **more}
    if layout not in EXPERTS:
        return engine_of(layout, optim=optim)
    model = {"name": written("qwen3_moe", FAMILIES["qwen3_moe"])}
    return engine_of(layout.removesuffix(" mixture"), optim=optim, model=model)


def take(engine: Any, steps: range) -> Tensors:
    """Return the weights after some steps. Collective."""
    for number in steps:
        engine.accumulate(*share_of(engine, number))
        engine.apply(LR)
    return dict(engine.masters())


def distance(weights: Tensors, others: Tensors) -> float:
    """Return the largest difference between two sets of weights."""
    assert weights.keys() == others.keys()
    return max(float((weights[name] - other).abs().max()) for name, other in others.items())


USUAL = (
    *("adafactor: zero0 pipeline2", "adamw: zero3 fused", "momentum: zero2 offload"),
    "muon: zero2 bf16 fp32_sums",
)
CELLS = [f"{name}: {layout}" for name in REFERENCES for layout in layouts_of(name)]
# Muon computes in bf16, where the last bit of a gradient can be the last bit of an update: four
# times that of the largest update.
BF16_BITS = 4 * LR * 0.2 * WIDE**0.5 * 2**-8


def test_every_optimizer_has_a_reference() -> None:
    assert REFERENCES.keys() == OPTIMIZERS.keys() - {"adam8bit"}


@pytest.mark.parametrize("cell", cells(CELLS, USUAL))
@ranks(2)
def test_every_optimizer_is_torchs_in_every_layout(cell: str) -> None:
    name, layout = cell.split(": ")
    engine = engine_with(name, layout, groups=RULES)
    start = dict(engine.masters())
    weights = {n: w.clone() for n, w in start.items()}
    step = REFERENCES[name](weights)
    for number in range(STEPS):
        engine.accumulate(*share_of(engine, number))
        gradients = dict(engine.gradients())
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        engine.apply(LR)
        factor = min(1.0, 1.0 / (float(norm) + 1e-6))
        with torch.no_grad():
            step(weights, {n: g * factor for n, g in gradients.items()})
    masters = dict(engine.masters())
    assert bool(inner_optimizer(engine.engine).defaults.get("fused")) is layout.endswith("fused")
    assert distance(masters, start) > 1e-3
    assert distance(masters, weights) < (BF16_BITS if name == "muon" else 3e-7)


@pytest.mark.parametrize("name", ["adagrad", "lion"])
def test_own_optimizers_match_their_references(name: str) -> None:
    """Both are compared in every layout by the gate."""
    start = {key: torch.linspace(-1, 1, 12) for key in ("embed", "mlp.up_proj", "lm_head")}
    weights, expected = ({n: w.clone() for n, w in start.items()} for _ in range(2))
    json_type, settings = OPTIMIZERS[name].json_type, SETTINGS[name]
    optimizer = BUILT_HERE[json_type](groups(weights), lr=LR, weight_decay=DECAY, **settings)
    reference = REFERENCES[name](expected)
    for number in range(STEPS):
        gradients = {n: torch.sin(5.0 * w + number) for n, w in start.items()}
        for key, weight in weights.items():
            weight.grad = gradients[key]
        optimizer.step()
        with torch.no_grad():
            reference(expected, gradients)
    assert distance(weights, expected) < 1e-6
    assert distance(weights, start) > 1e-3


TRIPS = beside(__file__, "optimizers.toml")
if not EIGHT_BIT:
    del TRIPS["adam8bit"]
RESUMES = [f"{name}: {trip}" for name, trips in TRIPS.items() for trip in trips]


def most_apart(name: str) -> float:
    """Return the bound of a weight's change two steps after a layout change. Collective."""
    if name == "adam8bit":
        return LR  # blocks have other bounds, and are requantized
    # The effect of last bits on a step of Muon depends on the CPU's bf16 products.
    return 2 * 5 * muon_spread() if name == "muon" else 3e-7


@pytest.mark.parametrize("cell", cells(RESUMES, ("lion: zero3 > zero2 offload",)))
@ranks(2)
def test_every_optimizer_resumes_exactly(cell: str) -> None:
    """In the same layout, bit for bit."""
    name, _, trip = cell.partition(": ")
    layout, other = trip.split(" > ")
    engine = engine_with(name, layout)
    take(engine, range(2))
    saved = folder() / f"saved {cell}"
    saved.mkdir(exist_ok=True)
    _, entries = write_fragments(saved, WORLD.rank, engine.fragments())
    scalars = engine.scalars()
    index = Index(merged(gathered(to_index(entries))))
    undisturbed = take(engine, range(2, 4))
    engine.close()
    engine = engine_with(name, other)
    reader = Reader(saved, index)
    engine.restore(reader.fill, reader.optimizer_kinds)
    engine.refresh_weights()
    engine.restore_scalars(scalars)
    error = distance(take(engine, range(2, 4)), undisturbed)
    engine.close()
    assert error == 0.0 if layout == other else error < most_apart(name)


@pytest.mark.gate("engine")
@pytest.mark.skipif(not EIGHT_BIT, reason="bitsandbytes is not installed")
@ranks(2)
def test_eight_bit_moments_train_as_adamw() -> None:
    changes = {}
    for name in ("adamw", "adam8bit"):
        engine = engine_with(name, "zero2")
        start = dict(engine.masters())
        after = take(engine, range(10))
        changes[name] = torch.cat([(w - start[n]).view(-1) for n, w in after.items()])
        engine.close()
    error = (changes["adam8bit"] - changes["adamw"]).norm() / changes["adamw"].norm()
    assert 0 < error < 0.1


def orthogonalized(gradient: torch.Tensor) -> torch.Tensor:
    """Return torch's Newton-Schulz steps of a matrix, in bf16."""
    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    return _muon._zeropower_via_newtonschulz(gradient.clone(), coefficients, 5, 1e-7).float()


@functools.cache
def muon_spread() -> float:
    """Return the largest change of a weight in one of Muon's steps if only the last bits of
    gradients change, over enough draws that one crosses a bf16 boundary: Muon's bf16 products
    amplify them if a gradient almost has a lower rank. Collective.
    """
    engine = engine_with("muon", "zero1")
    engine.accumulate(*share_of(engine, 2))
    matrices = [g for n, g in engine.gradients() if g.ndim == 2 and ".layers." in n]
    engine.close()
    generator, spread = torch.Generator().manual_seed(0), 0.0
    for gradient in matrices:
        scale = LR * 0.2 * max(gradient.shape) ** 0.5
        as_it_is = orthogonalized(gradient)
        for _ in range(256):
            noise = torch.randn(gradient.shape, generator=generator) * torch.finfo().eps
            change = orthogonalized(gradient * (1 + noise)) - as_it_is
            spread = max(spread, scale * float(change.abs().max()))
    return spread


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_a_fused_optimizer_counts_its_steps_on_the_device(fused: bool, device: str) -> None:
    """Its kernel reads the count: the first resumed step would reject a count on the host."""
    flat = torch.nn.Parameter(torch.empty(4, device="meta"))
    inner = torch.optim.AdamW([flat], fused=fused)
    inner.state[flat]["exp_avg"] = torch.empty_like(flat)
    set_steps(inner, 7)
    assert inner.state[flat]["step"].device.type == device
    assert inner.state[flat]["step"].dtype == torch.float32
