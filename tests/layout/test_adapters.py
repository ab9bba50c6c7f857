"""The adapters' parameters as counted, against those that peft makes."""

from __future__ import annotations

import pytest
import torch

from harness.config.model_section import LoraConfig
from harness.layout.adapters import Adapters
from harness.layout.shape import Shape
from harness.models.adapters import add_adapters
from harness.models.skeleton import hf_config, skeleton
from tests.engine.small import CONFIGS

COUNTED = sorted(name for name, config in CONFIGS.items() if name not in ("mamba", "rwkv"))


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("lora", [{"rank": 4}, {"rank": 2, "dora": True}], ids=["lora", "dora"])
def test_adapters_are_those_of_peft(name: str, lora: dict[str, object]) -> None:
    config = LoraConfig.model_validate(lora)
    try:
        shape = Shape.from_hf(CONFIGS[name])
    except ValueError:
        pytest.skip("its parameters are not counted")
    model = skeleton(hf_config(CONFIGS[name]), torch.float32, "eager").to_empty(device="cpu")
    made = {parameter.name for parameter in add_adapters(model, config, 0)}
    adapters = config.adapters
    assert isinstance(adapters, Adapters)
    counted = {tensor.name: tensor.shape for tensor in adapters.tensors(shape)}
    parameters = dict(model.named_parameters())
    assert {name: tuple(parameters[name].shape) for name in made} == counted


def test_targets_are_the_last_parts_of_names() -> None:
    tensors = [*Adapters(4, ("q_proj", "v_proj")).tensors(Shape.from_hf(CONFIGS["llama"]))]
    assert len(tensors) == 3 * 2 * 2
    assert tensors[0].name == "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert (tensors[0].shape, tensors[1].shape) == ((4, 32), (32, 4))
    assert tensors[3].shape == (16, 4)  # two key heads
