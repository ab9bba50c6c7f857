"""Models whose attention can be exchanged over ranks; what they compute then: the parity gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.models.attention import takes_keywords
from harness.models.skeleton import hf_config, skeleton
from tests.engine.small import EAGER, FAMILIES, MODEL
from tests.gates.models import LEARNED, ROWS
from tests.tiers import rest_in_gate

# Its attention has a weight for each head (gpt_oss), or asks for no function at all.
UNDIVIDED = {"bloom", "falcon", "gpt_oss", "mamba", "rwkv"}


def takes(config: dict[str, Any], attention: str) -> bool:
    model = skeleton(hf_config(config), torch.float32, attention)
    before = model.config._attn_implementation
    found = takes_keywords(model)
    assert model.config._attn_implementation == before
    return found


@pytest.mark.parametrize("family", rest_in_gate("models", FAMILIES, 3))
def test_only_attention_that_can_be_exchanged_is(family: str) -> None:
    attention = "eager" if family in EAGER else "sdpa"
    assert takes(FAMILIES[family], attention) == (family not in UNDIVIDED)


@pytest.mark.parametrize("name", ROWS)
def test_models_that_the_gate_divides_can_be(name: str) -> None:
    assert takes(LEARNED[name], "eager" if name == "gemma2" else "sdpa")


def test_a_model_is_left_as_it_was() -> None:
    config = hf_config(MODEL)
    model = skeleton(config, torch.float32, "eager")
    assert takes_keywords(model)
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {
        "eager"
    }
