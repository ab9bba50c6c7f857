"""Elements and bytes that a rank of the engine's checks holds: between steps and while it builds.

The checks are those of a launch of four ranks (divided_stage_checks.py).
"""

from __future__ import annotations

import gc
import itertools
import time
from typing import Any
from unittest import mock

import torch.distributed as dist
from transformers import AutoModelForCausalLM

from harness.engine import module
from harness.layout.stages import stage_shape
from harness.models.pieces import pieces
from harness.models.skeleton import hf_config
from harness.plan.plan import Plan
from tests.engine.rank import OUT, WORLD, engine_of, stage
from tests.engine.small import MODEL
from tools.proofs.memory.live import rise

_TENSORS = {"tensor_parallel": {"autotp_size": 2}}
_LARGER = {
    **MODEL,
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
}
"""Whose layers are large beside the rest that is allocated."""


def expected_elements(plan: Plan) -> int:
    """Return what the layout says that this rank holds: of each parameter of its stage the part
    that the boxes name, under ZeRO 3 a share of that.
    """
    assert plan.shape is not None
    shape, share, shards = plan.shape, plan.share, 1
    if plan.stages is not None:
        shape = stage_shape(shape, plan.stages, plan.grid.coords(share.rank).pipeline)
    if plan.zero_stage == 3:
        shards = len(share.ranks("replicas"))
    parts = (share.part(tensor.name, tensor.shape).numel for tensor in shape.tensors())
    return sum(-(-part // shards) for part in parts)


def tensor_shares() -> dict[str, int]:
    """Elements on a rank of two data ranks of two tensor ranks under ZeRO 3."""
    engine = engine_of({**stage(3), **_TENSORS})
    elements = {
        "held": engine.describe()["elements_held"],
        "expected": expected_elements(engine.plan),
        "whole": engine.plan.shape.parameters,
        "undivided": sum(p.part.numel for p in engine.module.parameters() if p.part.is_whole),
    }
    engine.close()
    return elements


def building() -> dict[str, dict[str, int]]:
    """Bytes while a model's weights are drawn or read: the share that is kept, of it what no rank
    divides, the peak, and the largest piece of the whole model.
    """
    folder = OUT / "larger"
    model = AutoModelForCausalLM.from_config(hf_config(_LARGER))
    if WORLD.rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    piece = max(sum(p.nbytes for *_, p in piece.parameters()) for piece in pieces(model))
    del model
    mapped = (folder / "model.safetensors").stat().st_size
    ways = {"drawn": {}, "given": {"init_from": str(folder)}}
    stages = {"pipeline": {"stages": 2}, **_TENSORS}
    layouts = {
        "tensors": {**stage(1), **_TENSORS},
        "tensors under ZeRO 3": {**stage(3), **_TENSORS},
        "stages of tensors": {**stage(1), **stages},
    }
    results = {}
    for (name, ds), (way, keys) in itertools.product(layouts.items(), ways.items()):
        share, whole, peak = _build(ds, {"name": str(folder), **keys}, mapped)
        sizes = {"share": share, "whole": whole, "peak": peak, "piece": piece}
        results[f"{name}, {way}"] = sizes
    return results


def _build(ds: dict[str, Any], model: dict[str, str], mapped: int) -> tuple[int, int, int]:
    """Bytes that a rank holds of a model, those of undivided weights among them, and the highest
    while it is built.
    """
    peaks: list[int] = []
    with (
        mock.patch.object(dist, "broadcast", _let_go(dist.broadcast)),
        mock.patch.object(module, "build_whole", _measured(module.build_whole, peaks, mapped)),
        mock.patch.object(module, "build_stage", _measured(module.build_stage, peaks, mapped)),
    ):
        engine = engine_of(ds, model=model)
    share = 4 * engine.describe()["elements_held"]
    whole = sum(p.nbytes for p in engine.module.parameters() if p.ndim == 1)  # norms
    dist.barrier()  # gloo's other ranks may still connect to this one's groups
    engine.close()
    return share, whole, peaks[0]


def _let_go(function: Any) -> Any:
    """A collective after which gloo's threads have time to let go of what they sent."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        time.sleep(0.002)
        return work

    return collective


def _measured(function: Any, peaks: list[int], mapped: int) -> Any:
    def measured(*args: Any) -> Any:
        gc.collect()  # what was built before is not freed while this is measured
        with rise(mapped) as highest:
            built = function(*args)
        peaks.append(highest.bytes)
        return built

    return measured
