"""Weights of model.init_from: one bar for all ranks that read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.utils import logging

from harness.engine.reading import read_weights


class _Model:
    shows: bool

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> tuple[Any, dict[str, Any]]:
        cls.shows = logging.is_progress_bar_enabled()
        return SimpleNamespace(generation_config=None), {}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_shows_a_bar(rank: int) -> None:
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
