"""Pipeline stages on two ranks: the same weights, gradients and texts, half of the model each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from harness.errors import ConfigError
from harness.models import initialize
from tests.engine.engines import (
    SGD,
    WORLD,
    all_batches,
    cells,
    different,
    drawn_weights,
    engine_of,
    folder,
    gathered,
    given_weights,
    losses,
    losses_and_norms,
    pipeline,
    share_of,
    stage,
    written,
)
from tests.engine.small import EAGER, FAMILIES, SEQ_LEN
from tests.ranks import ranks

REFUSED = {"rwkv"}
_BF16 = {"bf16": {"enabled": True}}
LAYOUTS = {
    "zero0": pipeline(0),
    "zero1": pipeline(1),
    "zero0-bf16": pipeline(0, **_BF16),  # which runs as stage 1
    "zero1-bf16": pipeline(1, **_BF16),
    "zero1-bf16-fp32-sums": pipeline(1, **_BF16, data_types={"grad_accum_dtype": "fp32"}),
    "zero1-fp16": pipeline(1, fp16={"enabled": True, "initial_scale_power": 8}),
}


@ranks(2)
def test_stages_start_from_the_weights_that_one_process_draws() -> None:
    """Each rank draws only its own stage, about half of the model."""
    folder()  # rank 0 draws its models, once
    pieces, draw = [], initialize.draw

    def watched(model: Any, piece: Any, seed: int) -> Any:
        pieces.append(piece.name)
        return draw(model, piece, seed)

    with mock.patch.object(initialize, "draw", watched):
        engine = engine_of(pipeline())
    first, last = gathered(pieces)
    assert first == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    assert last == ["model.layers.2", "model.norm", "lm_head"]
    assert different(engine.masters(), drawn_weights()) == []
    whole = sum(p.numel() for p in engine.module.parameters())
    own_stage = sum(p.numel() for p in engine.stage.parameters())
    assert all(p.is_meta for p in engine.module.parameters())
    assert 0.3 < own_stage / whole < 0.7
    described = engine.describe()
    engine.close()
    assert described["engine"] == "PipelineEngine"
    assert described["pipeline_stage"] == WORLD.rank
    assert sum(gathered(described["elements_held"])) == whole


@ranks(2)
def test_given_weights_are_loaded_exactly_or_refused_by_all() -> None:
    """Only one stage lacks weights of the incomplete model."""
    engine = engine_of(pipeline(), model={"init_from": str(folder() / "given")})
    assert different(engine.masters(), given_weights()) == []
    engine.close()
    with pytest.raises(ConfigError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        engine_of(pipeline(), model={"init_from": str(folder() / "incomplete")})


@pytest.mark.parametrize("zero", [0, 1])
@ranks(2)
def test_clipping_by_value_clamps_every_element_and_reports_the_norm(zero: int) -> None:
    limit = 1e-3
    engine = engine_of(pipeline(zero), optim={**SGD, "clip_value": limit})
    before = dict(engine.masters())
    engine.accumulate(*share_of(engine))
    gradients = dict(engine.gradients())
    norm = float(engine.apply(1.0))
    after = dict(engine.masters())
    engine.close()
    for name, gradient in gradients.items():
        moved = before[name] - after[name]
        assert (moved - gradient.clamp(-limit, limit)).abs().max() < 1e-6, name
    true_norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert norm == pytest.approx(float(true_norm), rel=1e-5)


@pytest.mark.parametrize("layout", cells(LAYOUTS, ("zero0", "zero1-bf16")))
@ranks(2)
def test_parameter_groups_of_one_stage_alone_change_nothing(layout: str) -> None:
    """With a rule of `optim.groups` for the head, losses and norms equal those without stages."""
    ds = LAYOUTS[layout]
    optim = {**SGD, "groups": [{"pattern": "lm_head", "lr_multiplier": 0.5}]}
    engine = engine_of(ds, optim=optim)
    assert gathered(len(engine.engine.optimizer.param_groups)) == [2, 3]
    in_stages = losses_and_norms(engine)
    unsplit = losses_and_norms(engine_of({**ds, "pipeline": {}}, optim=optim))
    bit = 2**-8 if "16" in layout else 1e-5
    for step, unsplit_step in zip(in_stages, unsplit, strict=True):
        assert step == pytest.approx(unsplit_step, rel=bit)


@ranks(2)
def test_logits_evaluation_and_losses_are_those_of_the_unsplit_model() -> None:
    """The lengths of prompts differ from those of training rows."""
    results = []
    for ds in (pipeline(), stage(1)):
        engine = engine_of(ds)
        prompts = [torch.arange(n)[None] for n in (1, 5, SEQ_LEN)]
        logits = [engine.next_token_logits(ids).tolist() for ids in prompts]
        sums = engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0])).tolist()
        results.append((logits, sums, losses(engine, 3)))
        engine.close()
    (logits, sums, falling), (whole_logits, whole_sums, whole_falling) = results
    for own, whole in zip(logits, whole_logits, strict=True):
        assert own == pytest.approx(whole, abs=1e-5)
    assert sums == pytest.approx(whole_sums, rel=1e-6)
    assert falling == pytest.approx(whole_falling, rel=1e-5)


@ranks(2)
def test_batches_with_and_without_positions_take_turns() -> None:
    """The stages send each other one tensor more, of the same shape."""
    sums = []
    for ds in (pipeline(), stage(1)):
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
def test_activation_checkpointing_changes_nothing() -> None:
    curves = []
    for checkpointing in ("none", "full"):
        engine = engine_of(pipeline(), model={"checkpointing": checkpointing})
        curves.append(losses(engine, 4))
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

    engine = engine_of(pipeline(), model=model_of(family))
    batches, targets = share_of(engine)
    loss = engine.sum_over_ranks(engine.accumulate(batches, targets))
    norm = engine.apply(1e-3)
    cpu = torch.device("cpu")
    unsplit = unsplit_loss_and_norm(engine.plan, engine.module, cpu, all_batches(), targets, 1.0)
    engine.close()
    assert [float(loss), float(norm)] == pytest.approx(unsplit, rel=2e-6)


@pytest.mark.parametrize("family", sorted(REFUSED))
@ranks(2)
def test_a_family_that_cannot_be_cut_is_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match="cannot be traced") as caught:
        engine_of(pipeline(), model=model_of(family))
    assert f"{family}.rank-" in str(caught.value)
    assert "use ZeRO 3 instead of stages" in str(caught.value)
