"""Pipeline stages on two ranks: the same weights, gradients and texts, half of the model each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.small import FAMILIES

pytestmark = pytest.mark.slow

Result = Callable[[str], list[Any]]
Tensors = Callable[[str, str], dict[str, torch.Tensor]]
REFUSED = {"rwkv"}


def test_stages_start_from_the_weights_that_one_process_draws(
    tensors: Tensors, drawn_weights: dict[str, torch.Tensor]
) -> None:
    found = tensors("pipeline_weights", "pipeline-initial")
    assert found.keys() == drawn_weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in drawn_weights.items())


def test_each_stage_holds_about_half_of_the_model_and_nobody_all(result: Result) -> None:
    ranks = result("pipeline_weights")
    assert [rank["engine"] for rank in ranks] == ["PipelineEngine"] * 2
    assert [rank["pipeline_stage"] for rank in ranks] == [0, 1]
    assert sum(rank["elements_held"] for rank in ranks) == ranks[0]["whole"]
    for rank in ranks:
        assert 0.3 < rank["held"] / rank["whole"] < 0.7
        assert rank["real"] == 0


def test_given_weights_are_loaded_exactly(
    tensors: Tensors, given_weights: dict[str, torch.Tensor]
) -> None:
    found = tensors("pipeline_loads_given_weights", "pipeline-loaded")
    assert found.keys() == given_weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in given_weights.items())


def test_weights_that_one_stage_lacks_are_refused_by_all(result: Result) -> None:
    for told in result("pipeline_loads_given_weights"):
        assert "no weights for model.layers.1.mlp.up_proj.weight" in told


def test_each_rank_draws_its_own_stage_and_nothing_else(result: Result) -> None:
    first, last = (rank["drawn"] for rank in result("pipeline_weights"))
    assert first == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    assert last == ["model.layers.2", "model.norm", "lm_head"]


@pytest.mark.parametrize("zero", [0, 1])
def test_clipping_by_value_clamps_every_element_and_reports_the_norm(
    zero: int, result: Result
) -> None:
    for rank in result("pipeline_clips_by_value"):
        assert rank[zero]["error"] < 1e-6
        assert rank[zero]["norm"] == pytest.approx(rank[zero]["true_norm"], rel=1e-5)


def test_stage_0_clips_by_the_norm_over_all_stages(result: Result) -> None:
    for rank in result("pipeline_clips_stage_0"):
        assert rank["norm"] > 10 * rank["limit"]
        assert rank["ours"] == pytest.approx(rank["limit"], rel=1e-4)


def test_parameter_groups_of_one_stage_alone_change_nothing(result: Result) -> None:
    """A rule of `optim.groups` for the head."""
    for rank in result("pipeline_groups_of_one_stage"):
        assert rank.keys() > {"zero0", "zero1", "zero1-bf16"}
        for layout, found in rank.items():
            assert found["groups"] == [2, 3], layout
            bit = 2**-8 if "16" in layout else 1e-5
            for stages, unsplit in zip(found["stages"], found["unsplit"], strict=True):
                assert stages == pytest.approx(unsplit, rel=bit), layout


def test_logits_evaluation_and_losses_are_those_of_the_unsplit_model(result: Result) -> None:
    for rank in result("pipeline_generates_and_trains_on"):
        stages, whole = rank["stages"], rank["whole"]
        for found, expected in zip(stages["logits"], whole["logits"], strict=True):
            assert found == pytest.approx(expected, abs=1e-5)
        assert stages["eval"] == pytest.approx(whole["eval"], rel=1e-6)
        assert stages["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_activation_checkpointing_changes_nothing(result: Result) -> None:
    for plain, recomputed in result("pipeline_recomputes"):
        assert recomputed == plain


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_a_family_trains_in_stages_as_without(family: str, result: Result) -> None:
    for rank in result("pipeline_families"):
        assert rank[family]["stages"] == pytest.approx(rank[family]["unsplit"], rel=2e-6)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_family_that_cannot_be_cut_is_refused_by_name(family: str, result: Result) -> None:
    for rank in result("pipeline_families"):
        assert f"{family}.rank-" in rank[family]["refused"]
        assert "cannot be traced" in rank[family]["refused"]
        assert "ZeRO 3 needs no stages" in rank[family]["refused"]
