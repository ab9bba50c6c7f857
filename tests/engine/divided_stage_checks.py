"""Checks of pipeline stages whose tensors are divided, on four ranks.

`python -m tests.engine.divided_stage_checks OUT` under four ranks writes OUT/NAME.RANK.json and
OUT/NAME.safetensors, which test_divided_stages.py reads.
"""

from __future__ import annotations

import itertools
import json
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.utils import PartitionedTensor

from harness.engine import reading
from harness.errors import ConfigError
from harness.models.pieces import decoder_layers
from tests.engine.held import building, expected_elements, tensor_shares
from tests.engine.pipeline_checks import SGD, losses_and_norms
from tests.engine.rank import OUT, WORLD, engine_of, fp16, losses, run_checks, save, share_of, stage
from tests.engine.small import MODEL
from tools.proofs import engines

# Folders of models: tied, fused projections; experts that files have one by one; a saved buffer.
GIVEN = ("llama", "gpt2", "mixtral", "deepseek_v3")
DIVIDED = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}


def divided(zero: int = 1, **json_keys: Any) -> dict[str, Any]:
    return {**stage(zero), **DIVIDED, **json_keys}


def model_with(**values: Any) -> dict[str, Any]:
    """The run config's section of the model with other values."""
    name = "-".join(values)
    path = OUT / f"{name}.rank-{WORLD.rank}.json"
    path.write_text(json.dumps({**MODEL, **values}))
    return {"name": str(path)}


def weights() -> dict[int, dict[str, Any]]:
    """Save each ZeRO stage's initial weights; return their sizes, in all and here."""
    elements = {}
    for zero in (0, 1):
        engine = engine_of(divided(zero))
        save(f"divided-initial-{zero}", engine.masters())
        parts = [p.part for p in engine.stage.parameters()]
        elements[zero] = {
            **engine.describe(),
            "whole": sum(p.numel() for p in engine.module.parameters()),
            "undivided": sum(part.numel for part in parts if part.is_whole),
            "expected": expected_elements(engine.plan),
        }
        engine.close()
    return elements


def first_step() -> dict[str, Any]:
    """Loss, norms and logits, by layout: of stages sending whole states, and of odd ones, too."""
    layouts = {
        "unsplit": (stage(1), {}),
        "divided": (divided(), {}),
        "undivided sends": (
            divided(pipeline={"stages": 2, "pipe_partitioned": False, "grad_partitioned": False}),
            {},
        ),
        "clipped by value": (divided(), {"optim": {**SGD, "clip_value": 1e-3}}),
    }
    odd = {"model_type": "qwen3", "hidden_size": 33, "head_dim": 8, "tie_word_embeddings": True}
    layouts |= {
        "odd unsplit": (stage(1), {"model": model_with(**odd)}),
        "odd divided": (divided(), {"model": model_with(**odd)}),
    }
    results = {}
    for name, (ds, sections) in layouts.items():
        engine = engine_of(ds, **{"optim": SGD, **sections})
        sums = engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0])).tolist()
        logits = [engine.next_token_logits(torch.arange(n)[None]).tolist() for n in (1, 5)]
        partitioned = getattr(engine.engine, "is_pipe_partitioned", None)
        results[name] = {
            "partitioned": partitioned,
            "sums": sums,
            "logits": logits,
            "steps": losses_and_norms(engine),
        }
    return results


def clipping() -> dict[str, dict[str, float]]:
    """Return the change of a tied model's weights in one SGD step of rate 1, by ZeRO stage."""
    tied = model_with(tie_word_embeddings=True)
    moved = {}
    for zero in (0, 1):
        engine = engine_of(divided(zero), model=tied, optim={**SGD, "clip_norm": 0.05})
        before = dict(engine.masters())
        engine.accumulate(*share_of(engine))
        gradients = [gradient.norm() for _, gradient in engine.gradients()]
        own = float(engine.grad_norm())
        norm = float(engine.apply(1.0))
        steps = [(before[name] - after).norm() for name, after in engine.masters()]
        engine.close()
        moved[str(zero)] = {
            "norm": norm,
            "own": own,
            "true": float(torch.stack(gradients).norm()),
            "moved": float(torch.stack(steps).norm()),
        }
    return moved


def overflow() -> list[dict[str, Any]]:
    """Return the first steps in fp16: applied or not, and the loss scale."""
    engine, steps = engine_of({**divided(), **fp16()}), []
    for number in range(3):
        engine.train_batch(*share_of(engine, number), 1e-3)
        steps.append({"applied": engine.step_applied, "scale": engine.loss_scale})
    engine.close()
    return steps


def shared_key_head() -> dict[str, list[float]]:
    """Losses of a model whose ranks share a key head, recomputed and not, and undivided."""
    model = model_with(num_key_value_heads=1)
    results = {}
    for name, ds, checkpointing in (
        ("unsplit", stage(1), "none"),
        ("divided", divided(), "none"),
        ("recomputed", divided(), "full"),
    ):
        engine = engine_of(ds, model={**model, "checkpointing": checkpointing})
        results[name] = losses(engine, 4)
        engine.close()
    return results


class _Watched:
    """Reads weights, and notes how many elements each time."""

    def __init__(self) -> None:
        self.elements: list[int] = []
        self._read = reading.read_weights

    def __call__(self, *args: Any) -> Any:
        reduced, report = self._read(*args)
        self.elements.append(sum(parameter.numel() for parameter in reduced.parameters()))
        return reduced, report


def given() -> dict[str, Any]:
    """Weights read into stages and into divided tensors go to OUT; how much was read at a time,
    and buffers.
    """
    layouts = {"stages": divided(), "zero3": {**stage(3), "tensor_parallel": {"autotp_size": 2}}}
    experts = {**stage(3), "expert_parallel": {"enabled": True, "autoep_size": 2}}
    reads: dict[str, Any] = {}
    for (name, ds), model in (
        *itertools.product(layouts.items(), GIVEN),
        (("experts", experts), "mixtral"),
        (("experts", experts), "deepseek_v3"),
    ):
        folder = OUT / model
        with mock.patch.object(reading, "read_weights", _Watched()) as watched:
            engine = engine_of(ds, model={"name": str(folder), "init_from": str(folder)})
        save(f"given-{name}-{model}", engine.masters())
        built = engine.stage.model if name == "stages" else engine.module
        buffers = {n: b.tolist() for n, b in built.named_buffers() if n.endswith("correction_bias")}
        reads[f"{name}-{model}"] = {"read": watched.elements, "buffers": buffers}
        engine.close()
    try:
        engine_of(divided(), model={"init_from": str(OUT / "incomplete")})
    except ConfigError as error:
        reads["refused"] = str(error)
    return reads


def traffic() -> dict[str, Any]:
    """Bytes that one micro-batch sends to the other stage, and within the stage's tensor ranks."""
    engine = engine_of(divided())
    batches, targets = share_of(engine)
    engine.accumulate(batches, targets)  # in which stages agree on shapes
    sent: dict[str, list[int]] = {"stages": [], "summed": [], "gathered": []}
    group = engine.groups.of("tensor")
    send, all_reduce, gather = p2p.send, dist.all_reduce, ds_comm.all_gather_into_tensor

    def sending(tensor: torch.Tensor, *args: Any) -> Any:
        if tensor.is_floating_point():  # and not the shapes
            sent["stages"].append(tensor.nbytes)
        return send(tensor, *args)

    def summing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is group:
            sent["summed"].append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    def gathering(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent["gathered"].append(output.nbytes)
        return gather(output, *args, **kwargs)

    with (
        mock.patch.object(p2p, "send", sending),
        mock.patch.object(dist, "all_reduce", summing),
        mock.patch.object(ds_comm, "all_gather_into_tensor", gathering),
    ):
        engine.accumulate(batches, targets)
    config, stage_of = engine.module.config, engine.describe()["pipeline_stage"]
    _, layers = decoder_layers(engine.stage.model)
    own = sum(bool([*layer.parameters()]) for layer in layers)
    engine.close()
    return {
        "stage": stage_of,
        "micro_batches": len(batches),
        "states": batches[0].input_ids.numel() * config.hidden_size * 4,
        "losses": batches[0].input_ids.numel() * 4 * 4,
        "layers": own,
        **{name: sum(sizes) for name, sizes in sent.items()},
    }


def uneven_parts() -> dict[int, str]:
    """Return, by the number of elements that DeepSpeed's receiving ranks put together of parts,
    "equal" or how it fails.
    """
    engine, results = engine_of(divided()), {}
    group = engine.groups.of("tensor")
    for numel in (6, 5):
        whole = torch.arange(float(numel))
        sent = PartitionedTensor(whole, group)
        try:
            received = PartitionedTensor.from_meta(sent.to_meta(), sent.data(), group)
            results[numel] = "equal" if torch.equal(received.full(), whole) else "other"
        except Exception as error:
            results[numel] = f"{type(error).__name__}: {error}"
    dist.barrier()
    engine.close()
    return results


def groups_left() -> int:
    """Process groups that a closed engine leaves."""
    before = engines.process_groups()
    engine = engine_of(divided())
    losses(engine, 1)  # until all ranks have been here, none may end
    engine.close()
    return len(engines.process_groups() - before)


CHECKS = (
    weights,
    given,
    first_step,
    clipping,
    overflow,
    shared_key_head,
    traffic,
    uneven_parts,
    groups_left,
    tensor_shares,
    building,
)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
