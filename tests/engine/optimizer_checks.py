"""Every optimizer on two ranks, beside the same optimizer on whole tensors of one process."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import _muon

from harness.checkpoint.files import write_fragments
from harness.checkpoint.index import Index, merged, to_index
from harness.checkpoint.reader import Reader
from harness.engine.deepspeed_0_19.internals import inner_optimizer
from tests.engine.rank import OUT, WORLD, engine_of, run_checks, share_of, stage
from tests.engine.small import FAMILIES

EIGHT_BIT = importlib.util.find_spec("bitsandbytes") is not None

LR, STEPS, DECAY, BETAS, EPS, MOMENTUM = 1e-2, 3, 0.1, (0.9, 0.95), 1e-8, 0.9
Tensors = dict[str, torch.Tensor]
Reference = Callable[[Tensors, Tensors], None]  # steps weights, in place, with gradients


def decays(name: str) -> bool:
    return "norm" not in name and "embed" not in name


def groups(weights: Tensors) -> list[dict[str, Any]]:
    """The head has half the rate, and what has `up_proj` in its name does not decay."""
    return [
        {
            "params": [weight],
            "weight_decay": DECAY if decays(name) and "up_proj" not in name else 0.0,
            "lr": LR / 2 if "lm_head" in name else LR,
        }
        for name, weight in weights.items()
    ]


def torchs(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[..., Reference]:
    """A reference by torch's own class, made anew for the weights of a run."""

    def of(weights: Tensors) -> Reference:
        optimizer = make(groups(weights), **settings)

        def step(weights: Tensors, gradients: Tensors) -> None:
            for name, weight in weights.items():
                weight.grad = gradients[name]
            optimizer.step()

        return step

    return of


def lion(weights: Tensors) -> Reference:
    """Program 1 of arXiv 2302.06675, line by line."""
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
    """A matrix, or those of a stack of experts, in the same memory."""
    return list(tensor.view(-1, *tensor.shape[-2:]))


def muon(weights: Tensors) -> Reference:
    """torch.optim.Muon for the layers' matrices, each expert's by itself, AdamW for the rest."""
    settings = dict(zip(weights, groups(weights), strict=True))
    by_muon = {n: matrices(weights[n]) for n in weights if "layers" in n and weights[n].ndim > 1}
    optimizers = [
        torch.optim.Muon(
            [{**settings[n], "params": parts} for n, parts in by_muon.items()],
            momentum=MOMENTUM,
            adjust_lr_fn="match_rms_adamw",
        ),
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
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": list(BETAS), "eps": EPS},
    "adam": {"betas": list(BETAS), "eps": EPS},
    "adagrad": {"eps": EPS},
    "lion": {"betas": list(BETAS)},
    "muon": {"betas": list(BETAS), "eps": EPS, "momentum": MOMENTUM},
}
_HOST = {"offload_optimizer": {"device": "cpu"}}
_BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": stage(0),
    "zero1": stage(1),
    "zero2": stage(2),
    "zero2-offload": {"zero_optimization": {"stage": 2, **_HOST}},
    "zero3": stage(3),
    "zero3-offload": {"zero_optimization": {**stage(3)["zero_optimization"], **_HOST}},
    "zero1-bf16": {**stage(1), **_BF16},
    "zero2-bf16": {**stage(2), **_BF16},
    "zero3-bf16": {**stage(3), **_BF16},
    "pipeline2": {**stage(0), "pipeline": {"stages": 2}},
    "pipeline2-zero1": {**stage(1), "pipeline": {"stages": 2}},
    "pipeline2-zero1-bf16": {**stage(1), **_BF16, "pipeline": {"stages": 2}},
}
# As on GPUs, whose kernel for the CPU rounds otherwise.
FUSED = {"optimizer": {"params": {"fused": True}}}
LAYOUTS |= {
    f"{name}-fused": {**LAYOUTS[name], **FUSED}
    for name in ("zero0", "zero2", "zero3", "zero1-bf16", "pipeline2-zero1")
}
EXPERTS: dict[str, dict[str, Any]] = {f"zero{n}-experts": stage(n) for n in (0, 1, 3)}
"""Of a mixture, whose experts' matrices are stacked: for Muon."""


def layouts_of(name: str) -> list[str]:
    if name == "adafactor":
        return ["zero0", "pipeline2"]
    if name == "muon":
        return [*LAYOUTS, *EXPERTS]
    if name == "lion":
        return [layout for layout in LAYOUTS if not layout.endswith("fused")]
    fused = {
        "adamw": [layout for layout in LAYOUTS if layout.endswith("fused")],
        "adam": ["zero0-fused", "zero3-fused"],
    }
    return ["zero0", "zero2-offload", "zero3", *fused.get(name, ())]


def error_of(name: str, layout: str) -> dict[str, float]:
    """The largest difference of a weight after three steps, how far weights went, and whether the
    optimizer is fused.
    """
    rules = [
        {"pattern": "lm_head", "lr_multiplier": 0.5},
        {"pattern": "up_proj", "weight_decay": 0.0},
    ]
    engine = engine_with(name, layout, groups=rules)
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
    inner = inner_optimizer(engine.engine)
    engine.close()
    return {
        "fused": bool(inner.defaults.get("fused")),
        "error": max(float((masters[n] - w).abs().max()) for n, w in weights.items()),
        "moved": max(float((start[n] - w).abs().max()) for n, w in masters.items()),
    }


def engine_with(name: str, layout: str, **more: Any) -> Any:
    optim = {"name": name, "lr": LR, "weight_decay": DECAY, **SETTINGS.get(name, {}), **more}
    if layout not in EXPERTS:
        return engine_of(LAYOUTS[layout], optim=optim)
    path = OUT / f"qwen3_moe.rank-{WORLD.rank}.json"
    path.write_text(json.dumps(FAMILIES["qwen3_moe"]))
    return engine_of(EXPERTS[layout], optim=optim, model={"name": str(path)})


def steps(engine: Any, numbers: range) -> Tensors:
    for number in numbers:
        engine.accumulate(*share_of(engine, number))
        engine.apply(LR)
    return dict(engine.masters())


def resumed(name: str, layout: str, other: str) -> float:
    """The largest difference of a weight after a save, a load in another layout, and two steps."""
    engine = engine_with(name, layout)
    steps(engine, range(2))
    folder = OUT / f"saved-{name}-{layout}-{other}"
    folder.mkdir(exist_ok=True)
    _, entries = write_fragments(folder, WORLD.rank, engine.fragments())
    scalars = engine.scalars()
    indices: list[Any] = [None] * WORLD.world_size
    torch.distributed.all_gather_object(indices, to_index(entries))
    undisturbed = steps(engine, range(2, 4))
    engine.close()
    engine = engine_with(name, other)
    reader = Reader(folder, Index(merged(indices)))
    engine.restore(reader.fill, reader.optimizer_kinds)
    engine.refresh_weights()
    engine.restore_scalars(scalars)
    resumed = steps(engine, range(2, 4))
    engine.close()
    return max(float((resumed[n] - w).abs().max()) for n, w in undisturbed.items())


TRIPS = [("zero1", "zero1"), ("zero3", "zero3"), ("zero1", "zero3"), ("zero3", "zero2-offload")]
RESUMED = {
    "adamw": [("zero1-bf16-fused", "zero1-bf16-fused"), ("zero3-fused", "zero0-fused")],
    "adafactor": [("zero0", "zero0")],
    "adagrad": TRIPS[:3],
    "lion": TRIPS,
    "momentum": TRIPS[:3],
    "muon": TRIPS,
    **({"adam8bit": TRIPS[:3]} if EIGHT_BIT else {}),
}


def resumed_optimizers() -> dict[str, list[float]]:
    """By optimizer, an error for each of its trips."""
    return {name: [resumed(name, *trip) for trip in trips] for name, trips in RESUMED.items()}


def every_optimizer() -> dict[str, dict[str, dict[str, float]]]:
    return {name: {key: error_of(name, key) for key in layouts_of(name)} for name in REFERENCES}


def eight_bit_beside_adamw() -> float | None:
    """Return the distance of 8-bit Adam's weights from AdamW's after ten steps, relative."""
    if not EIGHT_BIT:
        return None
    changes = {}
    for name in ("adamw", "adam8bit"):
        engine = engine_with(name, "zero2")
        start = dict(engine.masters())
        changes[name] = {n: w - start[n] for n, w in steps(engine, range(10)).items()}
        engine.close()
    theirs = torch.cat([w.view(-1) for w in changes["adamw"].values()])
    ours = torch.cat([w.view(-1) for w in changes["adam8bit"].values()])
    return float((ours - theirs).norm() / theirs.norm())


def orthogonalized(gradient: torch.Tensor) -> torch.Tensor:
    """Return torch's Newton-Schulz steps of a matrix, in bf16."""
    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    return _muon._zeropower_via_newtonschulz(gradient.clone(), coefficients, 5, 1e-7).float()


def muon_spread() -> float:
    """The largest change of a weight in one of Muon's steps when only the last bits of gradients
    change, over enough draws that one crosses a boundary of bf16: its products in bf16 make more of
    them where a gradient is almost of a lower rank.
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


CHECKS = (every_optimizer, resumed_optimizers, eight_bit_beside_adamw, muon_spread)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
