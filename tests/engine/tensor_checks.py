"""Checks of divided tensors on two ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional

from harness.models.vocabulary_loss import Vocabulary
from tests.engine.rank import DEVICE, WORLD, engine_of, run_checks, save, share_of, stage
from tests.engine.small import SEQ_LEN, VOCAB_SIZE


def tensor(zero: int = 1) -> dict[str, Any]:
    return {**stage(zero), "tensor_parallel": {"autotp_size": 2}}


def tensor_weights() -> dict[str, Any]:
    """Save each stage's initial weights; return their sizes, in all and here."""
    sizes = {}
    for zero in (0, 1, 2, 3):
        engine = engine_of(tensor(zero))
        save(f"tensor-initial-{zero}", engine.masters())
        undivided = sum(p.part.numel for p in engine.module.parameters() if p.part.is_whole)
        sizes[zero] = {**engine.describe(), "undivided": undivided}
        engine.close()
    return sizes


def tensor_logits() -> dict[str, float]:
    """The largest distance from the undivided model's: logits, and an evaluation's sums."""
    ids = torch.arange(5)[None] + 3
    outputs = []
    for ds in (stage(1), tensor(1)):
        engine = engine_of(ds)
        sums = engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0]))
        outputs.append((engine.next_token_logits(ids), sums))
        engine.close()
    (logits, sums), (divided, divided_sums) = outputs
    return {
        "logits": float((logits - divided).abs().max()),
        "sums": float((sums - divided_sums).abs().max()),
        "size": len(divided),
    }


def divided_cross_entropy() -> dict[str, dict[str, float]]:
    """The distance of loss and gradient from torch's, with and without label smoothing."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(2, SEQ_LEN, VOCAB_SIZE, generator=generator)
    labels = torch.randint(0, VOCAB_SIZE, (2, SEQ_LEN), generator=generator)
    labels[0, :5] = -100
    size = VOCAB_SIZE // WORLD.world_size
    part = Vocabulary(WORLD.rank * size, size, VOCAB_SIZE, dist.group.WORLD)
    own = slice(part.first, part.first + size)
    distances = {}
    for smoothing in (0.0, 0.1):
        whole = logits.clone().to(DEVICE).requires_grad_()
        expected = functional.cross_entropy(
            whole.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing
        )
        expected.backward()
        mine = logits[..., own].clone().to(DEVICE).requires_grad_()
        loss = part.token_losses(mine, labels.to(DEVICE), smoothing)
        loss.backward()
        assert whole.grad is not None
        assert mine.grad is not None
        distances[str(smoothing)] = {
            "loss": abs(float(loss.detach()) / float(expected.detach()) - 1),
            "gradient": float((mine.grad - whole.grad[..., own]).abs().max()),
        }
    return distances


def divided_dropout() -> dict[str, Any]:
    """Draws of each rank for its heads in a forward and in a recomputed one, and after them."""
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
    layers = len(kept) // 2  # each is computed again, the last one first
    again = kept[layers:][::-1]
    return {
        "layers": layers,
        "again": all(torch.equal(a, b) for a, b in zip(kept, again, strict=False)),
        "masks": [int(mask.sum()) for mask in kept[:layers]],
        "between_layers": not torch.equal(kept[0], kept[1]),
        "shape": list(kept[0].shape),
        "after": after.tolist(),
    }


CHECKS = (divided_dropout, tensor_weights, tensor_logits, divided_cross_entropy)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
