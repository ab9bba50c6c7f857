"""Building: the same weights in every layout, and never more than one whole piece at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from harness.config.run_config import RunConfig
from harness.engine import single_stage
from harness.engine.meta_model import _require_document_mask
from harness.engine.reading import read_weights
from harness.errors import ConfigError
from harness.layout.world import World
from harness.models.skeleton import hf_config, skeleton
from harness.models.units import units
from harness.plan.make import make_plan
from tests.engine.engines import (
    different,
    drawn_weights,
    engine_of,
    folder,
    given_weights,
    stage,
)
from tests.engine.small import MODEL
from tests.ranks import ranks


@pytest.mark.parametrize("number", [0, 1, 3])
@ranks(2)
def test_two_ranks_start_from_the_weights_that_one_process_draws(number: int) -> None:
    engine = engine_of(stage(number))
    assert different(engine.masters(), drawn_weights()) == []
    engine.close()


@ranks(2)
def test_zero3_never_holds_more_than_one_piece_in_full_and_leaves_half() -> None:
    """Count the whole parameter elements on this rank before and after each piece is divided."""
    before: list[int] = []
    after: list[int] = []
    materialize = single_stage.materialize

    def watched(model: Any, *args: Any, placed: Any, **kwargs: Any) -> None:
        def elements() -> int:
            return sum(p.numel() for p in model.parameters() if not p.is_meta)

        def place(parameters: list[Any]) -> None:
            before.append(elements())
            placed(parameters)
            after.append(elements())

        materialize(model, *args, placed=place, **kwargs)

    with mock.patch.object(single_stage, "materialize", watched):
        engine = engine_of(stage(3))
    parameters = list(engine.module.parameters())
    own = sum(parameter.ds_tensor.numel() for parameter in parameters)
    total = sum(parameter.ds_numel for parameter in parameters)
    engine.close()
    largest = max(
        sum(parameter.numel() for _, _, _, parameter in piece.parameters())
        for piece in units(skeleton(hf_config(MODEL), torch.float32))
    )
    assert max(before) == largest < total / 3
    assert max(after) == 0
    assert own == pytest.approx(total / 2, rel=0.01)


def test_zero3_moves_the_buffers_of_a_loaded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """zero.Init has placed its parameters; another device than theirs shows who moves the
    buffers.
    """
    loaded = AutoModelForCausalLM.from_config(hf_config(MODEL))
    report = {"missing_keys": [], "unexpected_keys": []}
    monkeypatch.setattr(single_stage, "read_weights", lambda *_: (loaded, report))
    plan = mock.Mock(zero_stage=3, deepspeed={"zero_optimization": {"stage": 3}})
    model, _ = single_stage._load(plan, loaded, torch.device("meta"), trust_remote_code=False)
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("number", [0, 1, 3])
@ranks(2)
def test_given_weights_are_loaded_exactly_or_refused_by_name(number: int) -> None:
    engine = engine_of(stage(number), model={"init_from": str(folder() / "given")})
    assert different(engine.masters(), given_weights()) == []
    engine.close()
    with pytest.raises(ConfigError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        engine_of(stage(number), model={"init_from": str(folder() / "incomplete")})


class _Model:
    shows: bool

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> tuple[Any, dict[str, Any]]:
        cls.shows = logging.is_progress_bar_enabled()
        return SimpleNamespace(generation_config=None), {}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_shows_a_bar_of_the_weights_that_it_reads(rank: int) -> None:
    logging.enable_progress_bar()
    sdpa: dict[str, Any] = {"attention": "sdpa", "attention_sizes": {}}
    model = SimpleNamespace(init_from="weights", name="tiny", **sdpa)
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(model=model, train=SimpleNamespace(seed=0)),
        world=SimpleNamespace(rank=rank),
    )
    empty: Any = SimpleNamespace(config=None, dtype=torch.float32, generation_config=None)
    try:
        read_weights(_Model, plan, empty, trust_remote_code=False)
    finally:
        logging.enable_progress_bar()
    assert _Model.shows is (rank == 0)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"model_type": "opt", "ffn_dim": 64, "max_position_embeddings": 128}, "opt models ignore"),
        ({"model_type": "llama", "intermediate_size": 64, "max_position_embeddings": 128}, None),
    ],
)
def test_a_model_that_ignores_document_boundaries_is_refused_where_they_matter(
    model: dict[str, Any], problem: str | None, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **model}))
    plan = make_plan(RunConfig.model_validate({"model": {"name": str(tmp_path)}}), {}, World())
    empty = skeleton(hf_config(plan.model_config), torch.float32)
    if problem is None:
        _require_document_mask(plan, empty)
        return
    with pytest.raises(ConfigError, match=problem) as caught:
        _require_document_mask(plan, empty)
    assert "data.document_mask=false" in str(caught.value)


@ranks(2)
def test_without_a_compiler_offload_names_the_package_to_install() -> None:
    offloaded = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    with (
        mock.patch.dict(os.environ, CXX="/nonexistent/c++"),
        pytest.raises(ConfigError, match=r"apt install g\+\+"),
    ):
        engine_of(offloaded)
