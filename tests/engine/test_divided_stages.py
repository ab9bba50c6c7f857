"""Pipeline stages with tensor parallelism on four ranks: the same weights, steps and texts."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.errors import ConfigError
from harness.models.units import decoder_layers
from tests.engine.engines import (
    SGD,
    different,
    drawn_weights,
    engine_of,
    folder,
    fp16,
    gathered,
    losses,
    losses_and_norms,
    share_of,
    stage,
    written,
)
from tests.engine.small import MODEL
from tests.ranks import ranks

pytestmark = pytest.mark.gate("engine")


def divided(zero: int = 1, **json_keys: Any) -> dict[str, Any]:
    layout = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}
    return {**stage(zero), **layout, **json_keys}


def model_with(**values: Any) -> dict[str, Any]:
    """Return the run config's model section with other values."""
    return {"name": written("-".join(values), {**MODEL, **values})}


@pytest.mark.parametrize("zero", [0, 1])
@ranks(4)
def test_ranks_start_from_the_weights_that_one_process_draws(zero: int) -> None:
    engine = engine_of(divided(zero))
    assert different(engine.masters(), drawn_weights()) == []
    engine.close()


@ranks(4)
def test_weights_that_one_stage_lacks_are_refused_by_all() -> None:
    with pytest.raises(ConfigError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        engine_of(divided(), model={"init_from": str(folder() / "incomplete")})


_WHOLE_SENDS = {"stages": 2, "pipe_partitioned": False, "grad_partitioned": False}
SPLIT = {
    "divided": divided(),
    "whole sends": divided(pipeline=_WHOLE_SENDS),
    "clipped by value": divided(),
    "odd": divided(),  # states of 33 elements
}
ODD = {"model_type": "qwen3", "hidden_size": 33, "head_dim": 8, "tie_word_embeddings": True}


def first_steps(ds: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Return an evaluation's sums, logits of two prompts, and losses and norms of three steps."""
    engine = engine_of(ds, **{"optim": SGD, **sections})
    return {
        "sums": engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0])).tolist(),
        "logits": [engine.next_token_logits(torch.arange(n)[None]).tolist() for n in (1, 5)],
        "sends_parts": getattr(engine.engine, "is_pipe_partitioned", None),
        "steps": losses_and_norms(engine),
    }


@functools.cache
def undivided_steps(is_odd: bool) -> dict[str, Any]:
    return first_steps(stage(1), **({"model": model_with(**ODD)} if is_odd else {}))


@pytest.mark.parametrize("name", SPLIT)
@ranks(4)
def test_evaluation_texts_losses_and_norms_are_the_undivided_models(name: str) -> None:
    """Stages send parts of states, unless the parts would be uneven."""
    clipped = {"optim": {**SGD, "clip_value": 1e-3}} if name == "clipped by value" else {}
    model = {"model": model_with(**ODD)} if name == "odd" else {}
    whole = undivided_steps(name == "odd")
    own = first_steps(SPLIT[name], **clipped, **model)
    assert own["sums"] == pytest.approx(whole["sums"], rel=1e-6)
    for logits, whole_logits in zip(own["logits"], whole["logits"], strict=True):
        assert logits == pytest.approx(whole_logits, abs=2e-6)
    if not clipped:
        assert own["sends_parts"] is (name == "divided")
        for step, whole_step in zip(own["steps"], whole["steps"], strict=True):
            assert step == pytest.approx(whole_step, rel=2e-6)


@ranks(4)
def test_deepspeed_puts_no_uneven_parts_together() -> None:
    """Once it does, plan/parallelism.py no longer needs to make stages send whole states."""
    from deepspeed.runtime.utils import PartitionedTensor

    engine = engine_of(divided())
    group = engine.groups.of("tensor")
    outcomes = {}
    for numel in (6, 5):
        whole = torch.arange(float(numel))
        sent = PartitionedTensor(whole, group)
        try:
            received = PartitionedTensor.from_meta(sent.to_meta(), sent.data(), group)
            outcomes[numel] = "equal" if torch.equal(received.full(), whole) else "other"
        except Exception as error:
            outcomes[numel] = f"{type(error).__name__}: {error}"
    dist.barrier()
    engine.close()
    assert outcomes[6] == "equal"
    assert outcomes[5] != "equal"


@pytest.mark.parametrize("zero", [0, 1])
@ranks(4)
def test_the_norm_that_clips_counts_everything_once(zero: int) -> None:
    """A tied weight is on both stages, norms are on both ranks of one."""
    tied = model_with(tie_word_embeddings=True)
    engine = engine_of(divided(zero), model=tied, optim={**SGD, "clip_norm": 0.05})
    before = dict(engine.masters())
    engine.accumulate(*share_of(engine))
    true_norm = float(torch.stack([g.norm() for _, g in engine.gradients()]).norm())
    assert float(engine.grad_norm()) == pytest.approx(true_norm, rel=1e-6)
    assert float(engine.apply(1.0)) == pytest.approx(true_norm, rel=1e-6)
    steps = [(before[name] - after).norm() for name, after in engine.masters()]
    assert float(torch.stack(steps).norm()) == pytest.approx(0.05, rel=1e-4)
    engine.close()


@ranks(4)
def test_all_ranks_skip_the_same_steps() -> None:
    engine, steps = engine_of({**divided(), **fp16()}), []
    for number in range(3):
        engine.train_batch(*share_of(engine, number), 1e-3)
        steps.append((engine.step_applied, engine.loss_scale))
    engine.close()
    assert not steps[0][0]
    assert gathered(steps) == [steps] * 4


@ranks(4)
def test_ranks_of_a_stage_may_share_a_key_head() -> None:
    model = model_with(num_key_value_heads=1)

    def falling(ds: dict[str, Any], checkpointing: str = "none") -> list[float]:
        engine = engine_of(ds, model={**model, "checkpointing": checkpointing})
        means = losses(engine, 4)
        engine.close()
        return means

    unsplit, own = falling(stage(1)), falling(divided())
    assert own == pytest.approx(unsplit, rel=1e-6)
    assert falling(divided(), "full") == pytest.approx(own, rel=1e-6)


@ranks(4)
def test_a_micro_batch_sends_what_the_documents_say() -> None:
    """As in docs/layouts.md: a part of the hidden states to the other stage; within a stage, the
    states four times per layer and once more at either end, gathered once in the forward pass and
    twice in the backward pass.
    """
    from deepspeed import comm as ds_comm
    from deepspeed.runtime.pipe import p2p

    engine = engine_of(divided())
    batches, targets = share_of(engine)
    engine.accumulate(batches, targets)  # in which stages agree on shapes
    sent = dict.fromkeys(("stages", "summed", "gathered"), 0)
    group = engine.groups.of("tensor")
    send, all_reduce, gather = p2p.send, dist.all_reduce, ds_comm.all_gather_into_tensor

    def sending(tensor: torch.Tensor, *args: Any) -> Any:
        if tensor.is_floating_point():  # but not the shapes
            sent["stages"] += tensor.nbytes
        return send(tensor, *args)

    def summing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is group:
            sent["summed"] += tensor.nbytes
        return all_reduce(tensor, *args, **kwargs)

    def gathering(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent["gathered"] += output.nbytes
        return gather(output, *args, **kwargs)

    with (
        mock.patch.object(p2p, "send", sending),
        mock.patch.object(dist, "all_reduce", summing),
        mock.patch.object(ds_comm, "all_gather_into_tensor", gathering),
    ):
        engine.accumulate(batches, targets)
    is_last = engine.describe()["pipeline_stage"] == 1
    _, layers = decoder_layers(engine.stage.model)
    own_layers = sum(bool([*layer.parameters()]) for layer in layers)
    tokens = batches[0].input_ids.numel()
    states = tokens * engine.module.config.hidden_size * 4
    engine.close()
    of_micro_batch = {
        "stages": states // 2,
        "summed": (4 * own_layers + 1) * states + (tokens * 4 * 4 if is_last else 0),  # losses
        "gathered": (1 if is_last else 2) * states,
    }
    assert sent == {kind: len(batches) * size for kind, size in of_micro_batch.items()}


@ranks(4)
def test_a_closed_engine_leaves_no_groups() -> None:
    from tests.gates.engines import process_groups

    before = process_groups()
    engine = engine_of(divided())
    losses(engine, 1)  # no rank may end before all have been here
    engine.close()
    assert process_groups() <= before
