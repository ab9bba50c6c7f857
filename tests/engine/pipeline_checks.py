"""Checks of the pipeline engine on two ranks."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any
from unittest import mock

import torch

from harness.engine.deepspeed_0_19 import gradients, pipe_module
from harness.errors import ConfigError
from tests.engine.rank import (
    DEVICE,
    OUT,
    WORLD,
    all_batches,
    engine_of,
    losses,
    run_checks,
    save,
    share_of,
)
from tests.engine.small import EAGER, FAMILIES, SEQ_LEN
from tools.proofs import engines

SGD = {"name": "sgd", "lr": 1.0, "weight_decay": 0.0}


def pipeline(zero: int = 1, **json_keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": zero}, "pipeline": {"stages": 2}, **json_keys}


_BF16 = {"bf16": {"enabled": True}}
LAYOUTS = {
    "zero0": pipeline(0),
    "zero1": pipeline(1),
    "zero0-bf16": pipeline(0, **_BF16),  # which runs as stage 1
    "zero1-bf16": pipeline(1, **_BF16),
    "zero1-bf16-fp32-sums": pipeline(1, **_BF16, data_types={"grad_accum_dtype": "fp32"}),
    "zero1-fp16": pipeline(1, fp16={"enabled": True, "initial_scale_power": 8}),
}


def pipeline_weights() -> dict[str, Any]:
    from harness.models import initialize

    drawn, draw = [], initialize.draw

    def watched(model: Any, piece: Any, seed: int) -> Any:
        drawn.append(piece.name)
        return draw(model, piece, seed)

    with mock.patch.object(initialize, "draw", watched):
        engine = engine_of(pipeline())
    save("pipeline-initial", engine.masters())
    of_stage = sum(p.numel() for p in engine.stage.parameters())
    whole = sum(p.numel() for p in engine.module.parameters())
    real = sum(p.numel() for p in engine.module.parameters() if not p.is_meta)
    described = engine.describe()
    engine.close()
    return {"held": of_stage, "whole": whole, "real": real, "drawn": drawn, **described}


def pipeline_loads_given_weights() -> str:
    engine = engine_of(pipeline(), model={"init_from": str(OUT / "given")})
    save("pipeline-loaded", engine.masters())
    engine.close()
    try:
        engine_of(pipeline(), model={"init_from": str(OUT / "incomplete")})
    except ConfigError as error:
        return str(error)
    return "accepted"


def pipeline_clips_by_value() -> list[dict[str, float]]:
    """As without stages, under ZeRO 0 and 1."""
    results, limit = [], 1e-3
    for zero in (0, 1):
        engine = engine_of(pipeline(zero), optim={**SGD, "clip_value": limit})
        before = dict(engine.masters())
        engine.accumulate(*share_of(engine))
        gradients = dict(engine.gradients())
        norm = float(engine.apply(1.0))
        after = dict(engine.masters())
        engine.close()
        error = max(
            float((before[n] - after[n] - g.clamp(-limit, limit)).abs().max())
            for n, g in gradients.items()
        )
        true = torch.stack([g.norm() for g in gradients.values()]).norm()
        results.append({"error": error, "norm": norm, "true_norm": float(true)})
    return results


def pipeline_clips_stage_0() -> dict[str, float]:
    """Return the change of the weights in one SGD step of rate 1, with our mark and without."""
    norms = {"limit": 0.05}
    for name in ("ours", "deepspeeds"):
        with contextlib.ExitStack() as stack:
            if name == "deepspeeds":
                stack.enter_context(mock.patch.object(gradients, "count_every_stage"))
            engine = engine_of(pipeline(0), optim={**SGD, "clip_norm": norms["limit"]})
        before = dict(engine.masters())
        norms["norm"] = float(engine.train_batch(*share_of(engine), 1.0).grad_norm)
        moved = [before[name] - after for name, after in engine.masters()]
        norms[name] = float(torch.stack([m.norm() for m in moved]).norm())
        engine.close()
    return norms


def pipeline_groups_of_one_stage() -> dict[str, Any]:
    """Numbers of groups by stage; losses and norms of three steps in stages and unsplit."""
    rules = [{"pattern": "lm_head", "lr_multiplier": 0.5}]
    results: dict[str, Any] = {}
    for name, ds in LAYOUTS.items():
        engine = engine_of(ds, optim={**SGD, "groups": rules})
        groups = [0] * WORLD.world_size
        torch.distributed.all_gather_object(groups, len(engine.engine.optimizer.param_groups))
        results[name] = {"groups": groups, "stages": losses_and_norms(engine)}
        unsplit = engine_of({**ds, "pipeline": {}}, optim={**SGD, "groups": rules})
        results[name]["unsplit"] = losses_and_norms(unsplit)
    return results


def losses_and_norms(engine: Any) -> list[list[float]]:
    """Those of three steps; closes the engine."""
    pairs = []
    for number in range(3):
        result = engine.train_batch(*share_of(engine, number), 0.1)
        loss = engine.sum_over_ranks(result.loss_share.clone())
        pairs.append([float(loss), float(result.grad_norm)])
    engine.close()
    return pairs


def pipeline_sums_norms_by_group() -> dict[str, int]:
    """Count a stage's waits for the other one to know the gradient norm."""
    engine = engine_of(
        pipeline(1), optim={"groups": [{"pattern": "lm_head", "lr_multiplier": 0.5}]}
    )
    engine.accumulate(*share_of(engine))
    optimizer, calls = engine.engine.optimizer, {}
    reduce = mock.Mock()  # waits for nobody
    with mock.patch.object(type(optimizer), "_model_parallel_all_reduce", reduce):
        for name in ("deepspeeds", "ours"):
            vars(optimizer).pop("scaled_global_norm", None)
            if name == "ours":
                gradients.add_norms_over_stages_once(engine.engine)
            reduce.reset_mock()
            optimizer.scaled_global_norm()
            calls[name] = reduce.call_count
    engine.close()
    return calls


def pipeline_generates_and_trains_on() -> dict[str, Any]:
    """Logits after prompts of other lengths than the training's, then a step, against no stages."""
    results: dict[str, Any] = {}
    for name, ds in (("stages", pipeline()), ("whole", {"zero_optimization": {"stage": 1}})):
        engine = engine_of(ds)
        prompts = [torch.arange(n)[None] for n in (1, 5, SEQ_LEN)]
        logits = [engine.next_token_logits(ids).tolist() for ids in prompts]
        sums = engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0])).tolist()
        results[name] = {"logits": logits, "eval": sums, "losses": losses(engine, 3)}
        engine.close()
    return results


def pipeline_recomputes() -> list[list[float]]:
    """Losses with and without activation checkpointing."""
    curves = []
    for checkpointing in ("none", "full"):
        engine = engine_of(pipeline(), model={"checkpointing": checkpointing})
        curves.append(losses(engine, 4))
        engine.close()
    return curves


def pipeline_families() -> dict[str, Any]:
    """Loss and gradient norm in stages and unsplit, or why a model has no stages."""
    from harness.engine.unsplit import unsplit_loss_and_norm

    results: dict[str, Any] = {}
    for name, config in FAMILIES.items():
        path = OUT / f"{name}.rank-{WORLD.rank}.json"
        path.write_text(json.dumps(config))
        attention = "eager" if name in EAGER else "sdpa"
        model = {"name": str(path), "attention": attention}
        try:
            engine = engine_of(pipeline(), model=model)
        except ConfigError as error:
            results[name] = {"refused": str(error)}
            continue
        batches, targets = share_of(engine)
        loss = engine.sum_over_ranks(engine.accumulate(batches, targets))
        norm = engine.apply(1e-3)
        unsplit = unsplit_loss_and_norm(
            engine.plan, engine.module, DEVICE, all_batches(), targets, 1.0
        )
        results[name] = {"stages": [float(loss), float(norm)], "unsplit": unsplit}
        engine.close()
    return results


def pipeline_leaves_its_grid() -> dict[str, list[Any]]:
    """(a grid, groups) that are left of a destroyed engine by DeepSpeed, and of a closed one."""
    from deepspeed.utils import groups

    def left() -> list[Any]:
        return [groups.mpu is not None, len(engines.process_groups() - before)]

    before = engines.process_groups()
    engine = engine_of(pipeline())
    engine.engine.destroy()
    groups_left = {"deepspeeds": left()}
    engine.close()
    return {**groups_left, "ours": left()}


def pipeline_prints() -> dict[str, str]:
    texts = {}
    for name in ("ours", "deepspeeds"):
        quiet = pipe_module.printing_nothing if name == "ours" else contextlib.nullcontext
        with (
            mock.patch.object(pipe_module, "printing_nothing", quiet),
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            engine_of(pipeline()).close()
        texts[name] = printed.getvalue()
    return texts


CHECKS = (
    pipeline_weights,
    pipeline_loads_given_weights,
    pipeline_clips_by_value,
    pipeline_clips_stage_0,
    pipeline_groups_of_one_stage,
    pipeline_sums_norms_by_group,
    pipeline_generates_and_trains_on,
    pipeline_recomputes,
    pipeline_families,
    pipeline_leaves_its_grid,
    pipeline_prints,
)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
