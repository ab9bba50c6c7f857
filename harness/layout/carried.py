"""The state that a model has behind a row of text: how many numbers training carries on of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

CELL_STATES = {"lstm": 2, "gru": 1}
"""Tensors of the state of a recurrent layer, by config key `cell`."""


def carried_numbers(config: Mapping[str, Any]) -> int:
    """Return the fp32 numbers of a row's state by a Hugging Face config; 0 of models without one.

    Sizes that a config leaves out are its class's defaults.
    """
    count = CARRIED.get(config["model_type"])
    return count(config) if count else 0


def _recurrent(config: Mapping[str, Any]) -> int:
    width = config.get("recurrent_size") or config.get("hidden_size", 1024)
    return int(config.get("num_hidden_layers", 4) * CELL_STATES[config.get("cell", "lstm")] * width)


def _mamba2(config: Mapping[str, Any]) -> int:
    """Return the last inputs of each layer's convolution, and the state of its scan."""
    state = config.get("state_size", 128)
    channels = int(config.get("expand", 2) * config.get("hidden_size", 4096))
    channels += 2 * config.get("n_groups", 8) * state
    scan = config.get("num_heads", 128) * config.get("head_dim", 64) * state
    layers = config.get("num_hidden_layers", 64)
    return int(layers * (channels * config.get("conv_kernel", 4) + scan))


CARRIED: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "recurrent": _recurrent,
    "mamba2": _mamba2,
}
"""By model_type; harness/models/carried.py has the states themselves."""
