"""Counts the bytes that autograd saves for a model class, on fake tensors at two depths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, masking_utils
from transformers.initialization import no_init_weights

from harness.errors import ConfigError
from harness.estimate.inputs import Inputs
from harness.models.loss import forward
from harness.models.skeleton import DTYPES, hf_config
from tools.memory.saved import saved_by

_DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def traced_saved(config: dict[str, Any], inputs: Inputs, source: str | None = None) -> int:
    """Bytes saved for backward by the whole model, from those of one and of two layers.

    Exact where all layers are alike: what is saved is linear in their number.
    """
    one, two = _two_depths(config, inputs, source)
    return one + (config[_depth_key(config)] - 1) * (two - one)


def traced_layer(config: dict[str, Any], inputs: Inputs, source: str | None = None) -> int:
    """Bytes that one more layer saves for backward, without checkpointing."""
    one, two = _two_depths(config, replace(inputs, checkpointing="none"), source)
    return two - one


def _two_depths(config: dict[str, Any], inputs: Inputs, source: str | None) -> tuple[int, int]:
    one, two = (_saved({**config, _depth_key(config): n}, inputs, source) for n in (1, 2))
    return one, two


def _depth_key(config: dict[str, Any]) -> str:
    key = next((name for name in _DEPTH_KEYS if name in config), None)
    if key is None:
        raise ConfigError(f"the config names no number of layers: {', '.join(_DEPTH_KEYS)}")
    return key


def _saved(config: dict[str, Any], inputs: Inputs, source: str | None) -> int:
    config = {name: value for name, value in config.items() if name != "layer_types"}
    # Under fake tensors transformers would make a mask, as it does when it is traced for export.
    packed = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *args, **kwargs: None
    try:
        with FakeTensorMode(), no_init_weights():
            model = AutoModelForCausalLM.from_config(
                hf_config(config, source),
                dtype=DTYPES[inputs.precision],
                attn_implementation=inputs.attention,
            )
            if inputs.checkpointing == "full":
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
            ids = torch.zeros(inputs.micro_batch, inputs.seq_len, dtype=torch.int64)
            with saved_by(model) as saved:
                forward(model, ids, ids.clone())
            return saved.bytes
    finally:
        masking_utils.find_packed_sequence_indices = packed
