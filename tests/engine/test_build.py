"""Building: the same weights however they are spread, and never more than a piece in full."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.config.run_config import RunConfig
from harness.engine import whole
from harness.engine.empty import _require_document_mask
from harness.errors import ConfigError
from harness.layout.world import World
from harness.models.pieces import pieces
from harness.models.skeleton import hf_config, skeleton
from harness.plan.make import make_plan
from tests.engine.small import MODEL

pytestmark = pytest.mark.slow


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_ranks_start_from_the_weights_that_one_process_draws(
    stage: int,
    tensors: Callable[[str, str], dict[str, torch.Tensor]],
    drawn_weights: dict[str, torch.Tensor],
) -> None:
    assert equal(tensors(f"initial_weights_{stage}", f"initial-{stage}"), drawn_weights)


def test_zero3_never_holds_more_than_one_piece_in_full(
    result: Callable[[str], list[Any]],
) -> None:
    largest = max(
        sum(parameter.numel() for _, _, _, parameter in piece.parameters())
        for piece in pieces(skeleton(hf_config(MODEL), torch.float32))
    )
    for rank in result("weights_whole_while_building"):
        assert max(rank["before"]) == largest < rank["total"] / 3
        assert max(rank["after"]) == 0


def test_zero3_leaves_each_rank_half_of_the_weights(result: Callable[[str], list[Any]]) -> None:
    for rank in result("weights_whole_while_building"):
        assert rank["held"] == pytest.approx(rank["total"] / 2, rel=0.01)


def test_zero3_moves_the_buffers_of_a_loaded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters are where zero.Init put them; another device than theirs shows who moves."""
    loaded = AutoModelForCausalLM.from_config(hf_config(MODEL))
    report = {"missing_keys": [], "unexpected_keys": []}
    monkeypatch.setattr(whole, "read_weights", lambda *given: (loaded, report))
    plan = mock.Mock(zero_stage=3, deepspeed={"zero_optimization": {"stage": 3}})
    model, _ = whole._load(plan, loaded, torch.device("meta"), trust_remote_code=False)
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("stage", [0, 3])
def test_given_weights_are_loaded_exactly(
    stage: int,
    tensors: Callable[[str, str], dict[str, torch.Tensor]],
    given_weights: dict[str, torch.Tensor],
) -> None:
    assert equal(tensors("loads_given_weights", f"loaded-{stage}"), given_weights)


def test_missing_weights_are_refused_by_name(result: Callable[[str], list[Any]]) -> None:
    for refusals in result("missing_weights"):
        assert len(refusals) == 2  # stage 1, stage 3
        assert all("no weights for model.layers.1.mlp.up_proj.weight" in text for text in refusals)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"model_type": "opt", "ffn_dim": 64, "max_position_embeddings": 128}, "opt models ignore"),
        ({"model_type": "llama", "intermediate_size": 64, "max_position_embeddings": 128}, None),
    ],
)
def test_a_model_that_ignores_document_boundaries_is_refused_where_they_matter(
    model: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **model}))
    plan = make_plan(RunConfig.model_validate({"model": {"name": str(tmp_path)}}), {}, World())
    empty = skeleton(hf_config(plan.model_config), torch.float32)
    if told is None:
        _require_document_mask(plan, empty)
        return
    with pytest.raises(ConfigError, match=told) as caught:
        _require_document_mask(plan, empty)
    assert "data.document_mask=false" in str(caught.value)


def test_without_a_compiler_offload_names_the_package_to_install(
    result: Callable[[str], list[Any]],
) -> None:
    for told in result("offload_without_compiler"):
        assert "apt install g++" in told
