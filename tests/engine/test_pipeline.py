"""Pipeline stages, also with tensor parallelism: the same weights, steps and texts as without."""

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.errors import ConfigError
from harness.models import initialize
from tests.engine.engines import (
    SGD,
    TESTED,
    WORLD,
    all_batches,
    cells,
    different,
    drawn_weights,
    engine_of,
    folder,
    fp16,
    gathered,
    layout,
    losses,
    losses_and_norms,
    share_of,
    written,
)
from tests.engine.small import EAGER, FAMILIES, MODEL, SEQ_LEN
from tests.ranks import ranks

REFUSED = {"rwkv"}
STAGES = "zero1 pipeline2"


@ranks(2)
def test_stages_start_from_the_weights_that_one_process_draws() -> None:
    """Each rank draws only its own stage, about half of the model."""
    folder()  # rank 0 draws its models, once
    pieces, draw = [], initialize.draw

    def watched(model: Any, piece: Any, *how: Any) -> Any:
        pieces.append(piece.name)
        return draw(model, piece, *how)

    with mock.patch.object(initialize, "draw", watched):
        engine = engine_of(STAGES)
    first, last = gathered(pieces)
    assert first == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    assert last == ["model.layers.2", "model.norm", "lm_head"]
    assert different(engine.masters(), drawn_weights()) == []
    whole = sum(p.numel() for p in engine.module.parameters())
    own_stage = sum(p.numel() for p in engine.stage.parameters())
    assert all(p.is_meta for p in engine.module.parameters())
    assert 0.3 < own_stage / whole < 0.7
    described = engine.describe()
    assert described["engine"] == "PipelineEngine"
    assert described["pipeline_stage"] == WORLD.rank
    assert sum(gathered(described["elements_held"])) == whole


@pytest.mark.parametrize("layout", cells(TESTED["groups_of_stages"], ("zero0", "zero1 bf16")))
@ranks(2)
def test_parameter_groups_of_one_stage_alone_change_nothing(layout: str) -> None:
    """With a rule of `optim.groups` for the head, losses and norms equal those without stages."""
    optim = {**SGD, "groups": [{"pattern": "lm_head", "lr_multiplier": 0.5}]}
    engine = engine_of(f"{layout} pipeline2", optim=optim)
    assert gathered(len(engine.engine.optimizer.param_groups)) == [2, 3]
    in_stages = losses_and_norms(engine)
    unsplit = losses_and_norms(engine_of(layout, optim=optim))
    bit = 2**-8 if "16" in layout else 1e-5
    for step, unsplit_step in zip(in_stages, unsplit, strict=True):
        assert step == pytest.approx(unsplit_step, rel=bit)


@ranks(2)
def test_batches_with_and_without_positions_take_turns() -> None:
    """The stages send each other one tensor more, of the same shape."""
    sums = []
    for ds in (STAGES, "zero1"):
        engine = engine_of(ds)
        plain = share_of(engine)[0]
        positions = torch.arange(SEQ_LEN).remainder(5).expand(2, -1).contiguous()
        packed = [replace(batch, position_ids=positions) for batch in plain]
        turns = (plain, packed, plain, packed)
        sums.append([engine.sum_over_ranks(engine.eval_batch(turn)).tolist() for turn in turns])
        engine.close()
    in_stages, unsplit = sums
    assert in_stages[0] == in_stages[2] != in_stages[1] == in_stages[3]
    for stages, whole in zip(in_stages, unsplit, strict=True):
        assert stages == pytest.approx(whole, rel=1e-6)


@ranks(2)
def test_pipeline_checkpointing_changes_no_value() -> None:
    curves = []
    for checkpointing in ("none", "full"):
        engine = engine_of(STAGES, model={"checkpointing": checkpointing})
        curves.append([*losses(engine, 4), float(engine.accumulate(share_of(engine)[0][:1], 32))])
        engine.close()
    assert curves[0] == curves[1]


def model_of(family: str) -> dict[str, str]:
    """Return the run config's model section for a family's small model."""
    attention = "eager" if family in EAGER else "sdpa"
    return {"name": written(family, FAMILIES[family]), "attention": attention}


@pytest.mark.parametrize("family", cells(sorted(FAMILIES.keys() - REFUSED), ("bloom", "qwen2_moe")))
@ranks(2)
def test_a_family_trains_in_stages_as_without(family: str) -> None:
    from harness.engine.stages import unsplit_loss_and_norm  # imports DeepSpeed

    engine = engine_of(STAGES, model=model_of(family))
    batches, targets = share_of(engine)
    loss = engine.sum_over_ranks(engine.accumulate(batches, targets))
    norm = engine.apply(1e-3)
    unsplit = unsplit_loss_and_norm(engine, engine.module, all_batches(), targets)
    assert [float(loss), float(norm)] == pytest.approx(unsplit, rel=2e-6)


@pytest.mark.parametrize("family", sorted(REFUSED))
@ranks(2)
def test_a_family_that_cannot_be_cut_is_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match="cannot be traced") as caught:
        engine_of(STAGES, model=model_of(family))
    assert f"{family}.rank-" in str(caught.value)
    assert "use ZeRO 3 instead of stages" in str(caught.value)


# With tensor parallelism, on four ranks.
GATE = pytest.mark.gate("engine")
DIVIDED = "zero1 pipeline2 tensor2"


def model_with(**values: Any) -> dict[str, Any]:
    """Return the run config's model section with other values."""
    return {"name": written("-".join(values), {**MODEL, **values})}


_WHOLE_SENDS = {"stages": 2, "pipe_partitioned": False, "grad_partitioned": False}
SPLIT = ("divided", "whole sends", "clipped by value", "odd")  # odd: states of 33 elements
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
    return first_steps(layout("zero1"), **({"model": model_with(**ODD)} if is_odd else {}))


@GATE
@pytest.mark.parametrize("name", SPLIT)
@ranks(4)
def test_pipeline_evaluation_and_losses_equal_undivided_model(name: str) -> None:
    """Stages send parts of states, unless the parts would be uneven."""
    clipped = {"optim": {**SGD, "clip_value": 1e-3}} if name == "clipped by value" else {}
    model = {"model": model_with(**ODD)} if name == "odd" else {}
    whole = undivided_steps(name == "odd")
    sends = {"pipeline": _WHOLE_SENDS} if name == "whole sends" else {}
    own = first_steps(layout(DIVIDED, **sends), **clipped, **model)
    assert own["sums"] == pytest.approx(whole["sums"], rel=1e-6)
    for logits, whole_logits in zip(own["logits"], whole["logits"], strict=True):
        assert logits == pytest.approx(whole_logits, abs=2e-6)
    if not clipped:
        assert own["sends_parts"] is (name == "divided")
        for step, whole_step in zip(own["steps"], whole["steps"], strict=True):
            assert step == pytest.approx(whole_step, rel=2e-6)


@GATE
@ranks(4)
def test_deepspeed_puts_no_uneven_parts_together() -> None:
    """Once it does, plan/parallelism.py no longer needs to make stages send whole states."""
    from deepspeed.runtime.utils import PartitionedTensor

    engine = engine_of(DIVIDED)
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
    assert outcomes[6] == "equal"
    assert outcomes[5] != "equal"


@GATE
@pytest.mark.parametrize("zero", [0, 1])
@ranks(4)
def test_pipeline_grad_norm_counts_every_parameter_once(zero: int) -> None:
    """A tied weight is on both stages, norms are on both ranks of one."""
    sections = {"model": model_with(tie_word_embeddings=True), "optim": {**SGD, "clip_norm": 0.05}}
    engine = engine_of(f"zero{zero} pipeline2 tensor2", **sections)
    before = dict(engine.masters())
    engine.accumulate(*share_of(engine))
    true_norm = float(torch.stack([g.norm() for _, g in engine.gradients()]).norm())
    assert float(engine.grad_norm()) == pytest.approx(true_norm, rel=1e-6)
    assert float(engine.apply(1.0)) == pytest.approx(true_norm, rel=1e-6)
    steps = [(before[name] - after).norm() for name, after in engine.masters()]
    assert float(torch.stack(steps).norm()) == pytest.approx(0.05, rel=1e-4)


@GATE
@ranks(4)
def test_all_ranks_skip_the_same_steps() -> None:
    engine, steps = engine_of(fp16(DIVIDED)), []
    for number in range(3):
        engine.train_batch(*share_of(engine, number), 1e-3)
        steps.append((engine.step_applied, engine.loss_scale))
    assert not steps[0][0]
    assert gathered(steps) == [steps] * 4


@GATE
@ranks(4)
def test_ranks_of_a_stage_may_share_a_key_head() -> None:
    model = model_with(num_key_value_heads=1)

    def falling(ds: str, checkpointing: str = "none") -> list[float]:
        engine = engine_of(ds, model={**model, "checkpointing": checkpointing})
        means = losses(engine, 4)
        engine.close()
        return means

    unsplit, own = falling("zero1"), falling(DIVIDED)
    assert own == pytest.approx(unsplit, rel=1e-6)
    assert falling(DIVIDED, "full") == pytest.approx(own, rel=1e-6)


@GATE
@ranks(4)
def test_a_closed_engine_leaves_no_groups() -> None:
    from tests.gates.engines import process_groups

    before = process_groups()
    engine = engine_of(DIVIDED)
    losses(engine, 1)  # no rank may end before all have been here
    engine.close()
    assert process_groups() <= before
