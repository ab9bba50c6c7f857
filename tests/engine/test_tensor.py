"""Tensor parallelism on two ranks: the same weights and logits, half of each matrix on a rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from harness.models.vocabulary_loss import Vocabulary
from tests.engine.engines import (
    STAGES,
    WORLD,
    different,
    drawn_weights,
    engine_of,
    gathered,
    share_of,
    stage,
)
from tests.engine.small import SEQ_LEN, VOCAB_SIZE
from tests.ranks import ranks


def tensor(zero: int = 1) -> dict[str, Any]:
    return {**stage(zero), "tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize("zero", STAGES)
@ranks(2)
def test_ranks_start_from_the_weights_that_one_process_draws(zero: int) -> None:
    """Each rank has half of what is divided and all other parameters."""
    drawn = drawn_weights()
    engine = engine_of(tensor(zero))
    assert different(engine.masters(), drawn) == []
    whole = sum(weight.numel() for weight in drawn.values())
    undivided = sum(weight.numel() for weight in drawn.values() if weight.ndim < 2)
    parts = [parameter.part for parameter in engine.module.parameters()]
    assert sum(part.numel for part in parts if part.is_whole) == undivided
    assert engine.describe()["elements_held"] == undivided + (whole - undivided) // 2
    engine.close()


@ranks(2)
def test_the_last_tokens_logits_and_an_evaluation_are_the_undivided_models() -> None:
    ids = torch.arange(5)[None] + 3
    outputs = []
    for ds in (stage(1), tensor(1)):
        engine = engine_of(ds)
        sums = engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0]))
        outputs.append((engine.next_token_logits(ids), sums))
        engine.close()
    (logits, sums), (divided, divided_sums) = outputs
    assert len(divided) == VOCAB_SIZE
    assert (logits - divided).abs().max() < 1e-6
    assert (sums - divided_sums).abs().max() < 1e-4  # sum of some hundred tokens, nats


@ranks(2)
def test_a_divided_vocabulary_has_torchs_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(2, SEQ_LEN, VOCAB_SIZE, generator=generator)
    labels = torch.randint(0, VOCAB_SIZE, (2, SEQ_LEN), generator=generator)
    labels[0, :5] = -100
    size = VOCAB_SIZE // WORLD.world_size
    part = Vocabulary(WORLD.rank * size, size, VOCAB_SIZE, dist.group.WORLD)
    own = slice(part.first, part.first + size)
    for smoothing in (0.0, 0.1):
        whole = logits.clone().requires_grad_()
        expected = functional.cross_entropy(
            whole.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing
        )
        expected.backward()
        mine = logits[..., own].clone().requires_grad_()
        loss = part.token_losses(mine, labels, smoothing)
        loss.backward()
        assert abs(float(loss.detach()) / float(expected.detach()) - 1) < 1e-6, smoothing
        assert mine.grad is not None
        assert whole.grad is not None
        assert (mine.grad - whole.grad[..., own]).abs().max() < 1e-6, smoothing


@ranks(2)
def test_each_rank_draws_dropout_for_its_own_heads_and_all_else_alike() -> None:
    """A layer that is recomputed in the backward pass draws the same dropout."""
    model = {"attention": "eager", "attention_dropout": 0.5, "checkpointing": "full"}
    engine = engine_of(tensor(1), model=model)
    kept: list[torch.Tensor] = []
    dropout = functional.dropout

    def noted(weights: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        dropped = dropout(weights, p=p, training=training)
        kept.append((dropped != 0) | (weights == 0))
        return dropped

    torch.manual_seed(5)
    batches, targets = share_of(engine)
    with mock.patch.object(functional, "dropout", noted):
        engine.accumulate(batches[:1], targets)
    after = torch.rand(4)
    engine.close()
    layers = 3
    assert len(kept) == 2 * layers  # each is recomputed, the last one first
    again = kept[layers:][::-1]
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=False))
    assert not torch.equal(kept[0], kept[1])
    assert kept[0].shape[1] == 2  # of four heads
    masks, other_masks = gathered([int(mask.sum()) for mask in kept[:layers]])
    assert masks != other_masks
    own, other = gathered(after.tolist())
    assert own == other
