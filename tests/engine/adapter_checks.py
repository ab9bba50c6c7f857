"""Checks of adapters and frozen parameters on two ranks.

`python -m tests.engine.adapter_checks OUT` under two ranks writes OUT/NAME.RANK.json and
OUT/NAME.safetensors, which test_adapters.py reads.
"""

from __future__ import annotations

from typing import Any

import torch

from harness.engine.deepspeed_0_19 import internals
from harness.estimate.states import model_states
from harness.plan.memory import memory_inputs
from tests.engine.rank import OUT, engine_of, losses, run_checks, save, stage

BASE = str(OUT / "base")
LORA = {"rank": 4, "alpha": 6.0}
STEPS = 4
OFFLOADED = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
EVERYTHING = {**OFFLOADED, "offload_param": {"device": "cpu", "pin_memory": False}}
LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"zero{number}": stage(number) for number in range(4)},
    "zero2_offload": {"zero_optimization": {**stage(2)["zero_optimization"], **OFFLOADED}},
    "zero3_offload": {"zero_optimization": {**stage(3)["zero_optimization"], **EVERYTHING}},
    "sequence2": {**stage(1), "sequence_parallel_size": 2},
    "zero1_bf16": {**stage(1), "bf16": {"enabled": True}},
    "zero3_bf16": {**stage(3), "bf16": {"enabled": True}},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {**LORA, "rslora": True},
    "dora": {**LORA, "dora": True},
    "targets": {**LORA, "targets": ["q_proj", "v_proj"]},
}


def adapted(ds: dict[str, Any], lora: dict[str, Any] = LORA, **model: Any) -> Any:
    return engine_of(ds, model={"name": BASE, "init_from": BASE, "lora": lora, **model})


def bytes_of(engine: Any) -> int:
    """Return the bytes of weights, master weights and moments on this rank, each storage once."""
    tensors = [getattr(p, "ds_tensor", p).data for p in engine.module.parameters()]
    tensors += [t for p in engine.module.parameters() for t in scales_of(p)]
    inner = internals.inner_optimizer(engine.engine)
    tensors += [p.data for group in inner.param_groups for p in group["params"]]
    if internals.is_zero3(engine.engine.optimizer):
        tensors += internals.zero3_flats(engine.engine.optimizer)
    for state in inner.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value) and value.ndim]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def scales_of(parameter: Any) -> list[torch.Tensor]:
    """Return the tensors beside the codes of a weight in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    states = [] if state is None else [state, *([state.state2] if state.nested else [])]
    return [value for each in states for value in vars(each).values() if torch.is_tensor(value)]


def estimated(engine: Any) -> int:
    """Return what the estimate has for the same."""
    inputs = memory_inputs(engine.plan)
    counted = ("parameters", "master", "moments")
    states = model_states(inputs, engine.share.data_rank)
    return sum(part.bytes for part in states if part.component in counted)


def trained() -> dict[str, Any]:
    """Losses by layout, what the ranks hold and what they save."""
    results = {}
    for name, ds in LAYOUTS.items():
        engine = adapted(ds)
        results[name] = {
            "losses": losses(engine, STEPS),
            "saved": sorted({fragment.name for fragment in engine.fragments()}),
            "elements_held": engine.describe()["elements_held"],
            "bytes": bytes_of(engine),
            "estimated": estimated(engine),
        }
        save(f"trained-{name}", (pair for pair in engine.masters() if "lora" in pair[0]))
        engine.close()
    return results


def variants() -> dict[str, list[float]]:
    """Losses under ZeRO 3, or 2 for DoRA; with activation checkpointing in one of them."""
    results = {}
    for name, lora in VARIANTS.items():
        zero = 2 if name == "dora" else 3
        engine = adapted(stage(zero), lora, checkpointing="full" if name == "targets" else "none")
        results[name] = losses(engine, STEPS)
        engine.close()
    return results


def resumed() -> dict[str, list[float]]:
    """Losses of steps after those of other ranks, whose fragments are all that is handed over."""
    results = {}
    for name in ("zero1", "zero3"):
        first, second = adapted(LAYOUTS[name]), adapted(LAYOUTS[name])
        losses(first, STEPS)
        kept = {
            (f.name, kind, f.offset): tensor.clone()
            for f in first.fragments()
            for kind, tensor in f.tensors.items()
        }

        def fill(name: str, kind: str, offset: int, flat: Any, part: Any, kept: Any = kept) -> None:
            if (name, kind, offset) in kept:  # of replicated parameters the other rank has a half
                flat.copy_(kept[name, kind, offset])

        second.restore(fill, lambda name: () if ":" in name else ("exp_avg", "exp_avg_sq"))
        second.refresh_weights()
        second.restore_scalars(first.scalars())
        results[name] = [*losses(first, 2), *losses(second, 2)]
        first.close()
        second.close()
    return results


def frozen() -> dict[str, Any]:
    """Losses where rules freeze parameters; whether those changed; what the ranks hold."""
    results: dict[str, Any] = {}
    rules = [{"pattern": "embed|layers.1.", "frozen": True}]
    for name in ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero1_bf16"):
        engine = engine_of(LAYOUTS[name], optim={"groups": rules})
        before = dict(engine.masters())
        results[name] = {
            "losses": losses(engine, STEPS),
            "changed": sorted(n for n, after in engine.masters() if not after.equal(before[n])),
            "bytes": bytes_of(engine),
            "estimated": estimated(engine),
        }
        engine.close()
    return results


CHECKS = (trained, variants, resumed, frozen)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
