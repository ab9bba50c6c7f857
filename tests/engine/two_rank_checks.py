"""Small checks of ZeRO's engine on two ranks."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any
from unittest import mock

import torch

from harness.config.ds_file import read_ds_json
from harness.errors import ConfigError, RunStopped
from tests.engine.rank import (
    OUT,
    STAGES,
    WORLD,
    batches,
    engine_of,
    fp16,
    losses,
    run_checks,
    save,
    stage,
)
from tests.shipped import DS_CONFIGS, fewest_ranks
from tools.proofs import engines


def initial_weights(number: int) -> None:
    engine = engine_of(stage(number))
    save(f"initial-{number}", engine.masters())
    engine.close()


def initial_weights_0() -> None:
    initial_weights(0)


def initial_weights_1() -> None:
    initial_weights(1)


def initial_weights_3() -> None:
    initial_weights(3)


def weights_whole_while_building() -> dict[str, Any]:
    """Parameter elements in full on this rank before and after each piece is cut up."""
    from harness.engine import whole as room

    before, after = [], []

    def watched(model: Any, *args: Any, placed: Any, **kwargs: Any) -> None:
        def whole() -> int:
            return sum(p.numel() for p in model.parameters() if not p.is_meta)

        def place(parameters: list[Any]) -> None:
            before.append(whole())
            placed(parameters)
            after.append(whole())

        materialize(model, *args, placed=place, **kwargs)

    materialize = room.materialize
    with mock.patch.object(room, "materialize", watched):
        engine = engine_of(stage(3))
    shares = [parameter.ds_tensor.numel() for parameter in engine.module.parameters()]
    total = sum(parameter.ds_numel for parameter in engine.module.parameters())
    engine.close()
    return {"before": before, "after": after, "held": sum(shares), "total": total}


def loads_given_weights() -> None:
    for number in (0, 3):
        engine = engine_of(stage(number), model={"init_from": str(OUT / "given")})
        save(f"loaded-{number}", engine.masters())
        engine.close()


def missing_weights() -> list[str]:
    messages = []
    for number in (1, 3):
        try:
            engine_of(stage(number), model={"init_from": str(OUT / "incomplete")})
        except ConfigError as error:
            messages.append(str(error))
    return messages


def clips_by_value(number: int) -> dict[str, float]:
    """One SGD step of rate 1 moves every weight by its clamped gradient."""
    limit = 1e-3
    optim = {"name": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip_value": limit}
    engine = engine_of(stage(number), optim=optim)
    before = dict(engine.masters())
    engine.accumulate(*batches())
    gradients = dict(engine.gradients())
    norm = float(engine.apply(1.0))
    moved = {name: before[name] - after for name, after in engine.masters()}
    engine.close()
    error = max(
        float((moved[n] - g.clamp(-limit, limit)).abs().max()) for n, g in gradients.items()
    )
    clamped = sum(int((g.abs() > limit).sum()) for g in gradients.values())
    true = torch.stack([g.norm() for g in gradients.values()]).norm()
    return {"error": error, "clamped": clamped, "norm": norm, "true_norm": float(true)}


def clip_by_value_at_every_stage() -> list[dict[str, float]]:
    return [clips_by_value(number) for number in STAGES]


def grad_norm_of_stage_0() -> dict[str, Any]:
    engine = engine_of(stage(0))
    engine.accumulate(*batches())
    true = torch.stack([g.norm() for _, g in engine.gradients()]).norm()
    reported = float(engine.apply(1e-3))
    deepspeeds = engine.engine.get_global_grad_norm()
    engine.close()
    return {"deepspeeds": deepspeeds, "reported": reported, "true": float(true)}


def overflow_is_skipped() -> dict[str, Any]:
    engine = engine_of(fp16())
    before = dict(engine.masters())
    scale = engine.loss_scale
    engine.train_batch(*batches(), 1e-3)
    moved = any(not torch.equal(before[name], after) for name, after in engine.masters())
    facts = {
        "applied": engine.step_applied,
        "skipped": engine.skipped_steps,
        "ratio": engine.loss_scale / scale,
        "moved": moved,
    }
    engine.close()
    return facts


def minimum_loss_scale() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    engine = engine_of(fp16(min_loss_scale=2**32))
    engine.accumulate(*batches())
    try:
        engine.engine.step()
    except Exception as error:
        facts["deepspeeds"] = [type(error).__name__, str(error)]
    engine = engine_of(fp16(min_loss_scale=2**32))
    try:
        engine.train_batch(*batches(), 1e-3)
    except RunStopped as stop:
        facts["ours"] = [int(stop.code), stop.message]
    return facts


def fp16_refused() -> dict[str, Any]:
    """Return DeepSpeed's error on fp16 without our permission."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    ours = accelerator.__dict__.pop("is_fp16_supported")
    try:
        supported = bool(accelerator.is_fp16_supported())
        engine_of(fp16(initial_scale_power=8)).close()
        error = None
    except ValueError as refusal:
        error = str(refusal)
    finally:
        accelerator.is_fp16_supported = ours
    return {"supported": supported, "error": error}


def bf16_optimizer_prints() -> dict[str, str]:
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.utils import see_memory_usage

    ds = {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    facts = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine_of(ds).close()
    facts["ours"] = printed.getvalue()
    with (
        mock.patch.object(bf16_optimizer, "see_memory_usage", see_memory_usage),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        engine_of(ds).close()
    facts["deepspeeds"] = printed.getvalue()
    return facts


def offload_without_compiler() -> str | None:
    """Return the error on a machine without g++."""
    offloaded = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    with mock.patch.dict(os.environ, CXX="/nonexistent/c++"):
        try:
            engine_of(offloaded)
        except ConfigError as error:
            return str(error)
    return None


def shipped_configs() -> dict[str, Any]:
    runs = {}
    for path in sorted(DS_CONFIGS.glob("*.json")):
        ds = read_ds_json(path)
        if fewest_ranks(ds) > WORLD.world_size or path.stem == "zero3_nvme":
            continue
        engine = engine_of(ds)
        runs[path.stem] = {"losses": losses(engine, 12), **engine.describe()}
        engine.close()
    return runs


def second_copy_leaves_its_group() -> dict[str, bool]:
    """Return whether hpZ's group outlives a destroyed engine, and a closed one."""
    from deepspeed.utils import groups

    engine = engine_of({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})
    engine.engine.destroy()
    left = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is not None
    engines.forget_nodes()
    return {"deepspeeds": left, "ours": groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is not None}


def packed_to_be_reduced() -> dict[str, list[int]]:
    """Count BF16_Optimizer's flat gradients that are reduced at a time."""
    half = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    engine, packed, counts = engine_of({**stage(1), **half}), [], {}
    flatten = engine.engine.flatten
    engine.engine.flatten = lambda tensors: packed.append(len(tensors)) or flatten(tensors)
    for who in ("ours", "deepspeeds"):
        packed.clear()
        engine.train_batch(*batches(), 1e-3)
        counts[who] = [*packed]
        vars(engine.engine).pop("allreduce_and_copy", None)
    engine.close()
    return counts


CHECKS = (
    initial_weights_0,
    initial_weights_1,
    initial_weights_3,
    weights_whole_while_building,
    loads_given_weights,
    missing_weights,
    clip_by_value_at_every_stage,
    grad_norm_of_stage_0,
    overflow_is_skipped,
    fp16_refused,
    bf16_optimizer_prints,
    offload_without_compiler,
    shipped_configs,
    second_copy_leaves_its_group,
    packed_to_be_reduced,
    minimum_loss_scale,  # leaves an engine in the middle of a step
)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
