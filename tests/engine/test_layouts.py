"""Each layout on two ranks: the same weights, clipping, evaluations and losses as undivided."""

import functools
import weakref
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from harness.config.ds_json import read_ds_json
from harness.data.batch import Batch
from harness.engine import residuals
from harness.models.chunked_loss import _HeadAndLoss, _How
from harness.models.loss import PLAIN
from harness.models.token_losses import Vocabulary
from tests.engine.engines import (
    SGD,
    TESTED,
    WORLD,
    all_batches,
    cells,
    different,
    drawn_weights,
    engine_of,
    fp16,
    gathered,
    losses,
    share_of,
    written,
)
from tests.engine.small import MIXTURES, MODEL, SEQ_LEN, VOCAB_SIZE
from tests.ranks import ranks
from tests.shipped import DS_CONFIGS, fewest_ranks

# zero3_nvme needs a library that may be missing: tests/plan/test_swap_space.py.
SHIPPED = sorted(
    path.stem
    for path in DS_CONFIGS.glob("*.json")
    if fewest_ranks(read_ds_json(path)) <= 2 and path.stem != "zero3_nvme"
)


def mixture() -> dict[str, Any]:
    """Return a run config's section of a small mixture of experts."""
    return {"model": {"name": written("mixtral", MIXTURES["mixtral"])}}


@pytest.mark.parametrize("layout", TESTED["drawn"])
@ranks(2)
def test_ranks_start_from_the_weights_that_one_process_draws(layout: str) -> None:
    """Each rank has half of what an axis divides and, without ZeRO 3, all other parameters."""
    has_experts = "experts2" in layout
    drawn = drawn_weights(MIXTURES["mixtral"] if has_experts else MODEL)
    engine = engine_of(layout, **(mixture() if has_experts else {}))
    assert different(engine.masters(), drawn) == []
    elements = engine.describe()["elements_held"]
    is_divided = {
        name: ".experts." in name if has_experts else "tensor2" in layout and weight.ndim > 1
        for name, weight in drawn.items()
    }
    divided = sum(drawn[name].numel() for name in drawn if is_divided[name])
    rest = sum(weight.numel() for weight in drawn.values()) - divided
    shards = 2 if layout in ("zero3", "zero3 experts2") else 1
    assert elements == divided // 2 + rest // shards
    experts = [p for name, p in engine.module.named_parameters() if ".experts." in name]
    assert all(2 * p.part.shape[0] == p.part.whole[0] for p in experts if "experts2" in layout)


@pytest.mark.parametrize("layout", TESTED["clipped"])
@ranks(2)
def test_value_clipping_clamps_elements_and_reports_prior_norm(layout: str) -> None:
    """One SGD step with rate 1 moves every weight by its clamped gradient."""
    limit = 1e-3
    engine = engine_of(layout, optim={**SGD, "clip_value": limit})
    before = dict(engine.masters())
    engine.accumulate(*share_of(engine))
    gradients = dict(engine.gradients())
    norm = float(engine.apply(1.0))
    moved = {name: before[name] - after for name, after in engine.masters()}
    for name, gradient in gradients.items():
        assert (moved[name] - gradient.clamp(-limit, limit)).abs().max() < 1e-6, name
    assert sum(int((g.abs() > limit).sum()) for g in gradients.values()) > 100
    true_norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert norm == pytest.approx(float(true_norm), rel=1e-5)


@ranks(2)
def test_a_step_without_clipping_is_of_unscaled_gradients() -> None:
    moved = []
    for layout in ("zero1", "zero1 fp16"):
        engine = engine_of(layout, optim={**SGD, "clip_norm": 0.0})
        before = dict(engine.masters())
        engine.train_batch(*share_of(engine), 1.0)
        moved.append({name: before[name] - after for name, after in engine.masters()})
        engine.close()
    for name, step in moved[0].items():
        assert (moved[1][name] - step).norm() < 0.05 * step.norm(), name


@ranks(2)
def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    engine = engine_of(fp16())
    before, scale = dict(engine.masters()), engine.loss_scale
    engine.train_batch(*share_of(engine), 1e-3)
    assert (engine.step_applied, engine.loss_scale / scale) == (False, 0.5)
    engine.train_batch(*share_of(engine), 1e-3, lambda *_: True)  # a spike halves nothing
    assert (engine.skipped_steps, engine.loss_scale / scale) == (2, 0.5)
    assert all(torch.equal(before[name], after) for name, after in engine.masters())


@pytest.mark.parametrize("name", cells(SHIPPED, ("zero1", "zero2_offload")))
@ranks(2)
def test_shipped_ds_json_trains(name: str) -> None:
    """Offload runs the optimizer that steps on the CPU."""
    engine = engine_of(read_ds_json(DS_CONFIGS / f"{name}.json"))
    falling = losses(engine, 12)
    if name in ("zero2_offload", "zero3_offload"):
        assert engine.describe()["inner_optimizer"] == "DeepSpeedCPUAdam"
    assert gathered(falling) == [falling, falling]
    assert falling[-1] < falling[0] - 0.3


def outputs(layout: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return logits of prompts of several lengths, an evaluation's sums, and three losses."""
    engine = engine_of(layout, **sections)
    prompts = [torch.arange(n)[None] + 3 for n in (1, 5, SEQ_LEN)]
    seen = {
        "logits": [engine.next_token_logits(ids) for ids in prompts],
        "sums": engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0])),
        "losses": losses(engine, 3),
        "after": engine.next_token_logits(prompts[0]),
    }
    engine.close()
    return seen


@functools.cache
def undivided_outputs(has_experts: bool) -> dict[str, Any]:
    return outputs("zero1", **(mixture() if has_experts else {}))


@pytest.mark.parametrize("layout", ["zero1 experts2", "zero1 pipeline2"])
@ranks(2)
def test_undivided_model_masks_padding_as_the_sharded_one(layout: str) -> None:
    from harness.engine.stages import unsplit_loss_and_norm  # imports DeepSpeed

    model = {**mixture()["model"], "overrides": {"router_aux_loss_coef": 0.5}}
    engine = engine_of(layout, True, model=model, train={"label_smoothing": 0.2})
    half = torch.arange(SEQ_LEN // 2).expand(2, -1)
    positions = torch.cat([half, half + 1], 1)  # a document, then padding
    every = [replace(batch, position_ids=positions) for batch in all_batches()]
    engine.accumulate(every[engine.share.data_rank :: engine.plan.grid.data], 8 * SEQ_LEN)
    own = float(engine.grad_norm())
    for setup, is_same in ((engine.setup, True), (PLAIN, False)):
        engine.setup = setup
        _, norm = unsplit_loss_and_norm(engine, engine.undivided(), every, 8 * SEQ_LEN)
        assert (norm == pytest.approx(own, rel=1e-4)) == is_same


@pytest.mark.parametrize("layout", TESTED["divided"])
@ranks(2)
def test_logits_evaluation_and_losses_are_the_undivided_models(layout: str) -> None:
    """The lengths of prompts differ from those of training rows."""
    has_experts = "experts2" in layout
    own = outputs(layout, **(mixture() if has_experts else {}))
    whole = undivided_outputs(has_experts)
    for logits, whole_logits in zip(own["logits"], whole["logits"], strict=True):
        assert len(logits) == VOCAB_SIZE
        assert (logits - whole_logits).abs().max() < 1e-6
    assert (own["sums"] - whole["sums"]).abs().max() < 1e-4  # of some hundred tokens, nats
    assert own["losses"] == pytest.approx(whole["losses"], abs=1e-5)
    assert (own["after"] - whole["after"]).abs().max() < 1e-4
    assert (own["after"] - own["logits"][0]).abs().max() > 0.01


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
            whole.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
        )
        weights = torch.rand(expected.shape, generator=generator)  # as pairs weigh their tokens
        expected.backward(weights)
        mine = logits[..., own].clone().requires_grad_()
        losses = part.token_losses(mine, labels, smoothing)
        losses.backward(weights)
        how = _How(24, (), smoothing, part)
        weight = torch.eye(VOCAB_SIZE)[own]  # so that the hidden states are the logits
        hidden = logits.flatten(0, 1).clone().requires_grad_()
        chunked = _HeadAndLoss.apply(hidden, weight, None, labels.flatten(), how)  # type: ignore[no-untyped-call]
        chunked.backward(weights)
        for each in (losses, chunked):
            assert torch.allclose(each, expected, rtol=1e-5, atol=1e-6), smoothing
        assert mine.grad is not None
        assert whole.grad is not None
        assert hidden.grad is not None
        slopes = hidden.grad.view_as(whole)[..., own]
        assert (slopes - whole.grad[..., own]).abs().max() < 1e-6, smoothing
        assert (mine.grad - whole.grad[..., own]).abs().max() < 1e-6, smoothing


@ranks(2)
def test_divided_rows_are_dropped_as_whole_rows() -> None:
    own: Any = mock.Mock(_shape=torch.Size((2, 3, 8)), group=dist.group.WORLD)
    torch.manual_seed(5)
    whole = functional.dropout(torch.ones(2, 6, 8), 0.5)
    torch.manual_seed(5)
    dropped = residuals.Residuals.dropped(own, torch.ones(2, 3, 8), 0.5)
    assert torch.equal(dropped, whole.chunk(2, 1)[dist.get_rank()])
    with residuals._WholeDraws(own):
        assert functional.dropout(whole, 0.5, training=False) is whole


@ranks(2)
def test_tensor_ranks_draw_dropout_per_head_and_share_the_rest() -> None:
    """A layer that is recomputed in the backward pass draws the same dropout."""
    model = {"attention": "eager", "attention_dropout": 0.5, "checkpointing": "full"}
    engine = engine_of("zero1 whole_tensor2", model=model)
    kept: list[torch.Tensor] = []
    dropout = functional.dropout

    def noted(weights: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        dropped = dropout(weights, p=p, training=training)
        kept.append((dropped != 0) | (weights == 0))
        return dropped

    batches, targets = share_of(engine)
    assert torch.equal(*(engine.next_token_logits(batches[0].input_ids[:1]) for _ in range(2)))
    torch.manual_seed(5)
    with mock.patch.object(functional, "dropout", noted):
        engine.accumulate(batches[:1], targets)
    after = torch.rand(4)
    layers = 3
    assert len(kept) == 2 * layers  # each is recomputed, the last one first
    assert all(map(torch.equal, kept, kept[layers:][::-1]))
    assert not torch.equal(kept[0], kept[1])
    assert kept[0].shape[1] == 2  # of four heads
    masks, other_masks = gathered([int(mask.sum()) for mask in kept[:layers]])
    assert masks != other_masks
    own, other = gathered(after.tolist())
    assert own == other


@ranks(2)
def test_shorter_rows_at_the_start_of_a_ramp_are_divided_too() -> None:
    sums = []
    for layout in ("zero1", "zero1 sequence2"):
        engine = engine_of(layout)
        batches = [batch.cut(4) for batch in share_of(engine)[0]]  # rows of a quarter of the length
        sums.append(engine.sum_over_ranks(engine.eval_batch(batches)))
        engine.close()
    assert (sums[0] - sums[1]).abs().max() < 1e-4


@ranks(2)
def test_sequence_ranks_attend_within_documents() -> None:
    """The first half of the previous document is on another rank."""
    engine = engine_of("zero1 sequence2")
    ids = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) % 24
    end = SEQ_LEN // 2 - 2  # of the first document
    other = ids.clone()
    other[:, :end] = 23 - other[:, :end]
    labels = torch.full_like(ids, -100)
    labels[:, -1] = 3
    apart = torch.cat([torch.arange(end), torch.arange(SEQ_LEN - end)]).expand(2, -1).contiguous()

    def change_by_first_document(positions: torch.Tensor | None) -> float:
        first, second = (
            engine.sum_over_ranks(engine.eval_batch([Batch(tokens, labels, positions)]))[0]
            for tokens in (ids, other)
        )
        return abs(float(first - second))

    assert change_by_first_document(apart) == 0
    assert change_by_first_document(None) > 1e-4


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@ranks(2)
def test_gathered_tokens_do_not_outlive_their_layer(checkpointing: str) -> None:
    engine = engine_of("zero1 tensor2", model={"checkpointing": checkpointing})
    made: list[weakref.ref[torch.Tensor]] = []
    gather = residuals.gathered_for_parts

    def noted(*args: Any) -> torch.Tensor:
        made.append(weakref.ref(whole := gather(*args)))
        return whole

    with mock.patch.object(residuals, "gathered_for_parts", noted):
        engine.accumulate(*share_of(engine))
    assert made
    assert [whole for each in made if (whole := each()) is not None] == []
