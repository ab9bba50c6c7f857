"""Size of the recurrent state that training carries over from one window of text to the next."""

from collections.abc import Callable, Mapping
from typing import Any

CELL_STATES = {"lstm": 2, "gru": 1}
"""Number of state tensors of a recurrent layer, by config key `cell`."""

RECURRENT_KEYS = frozenset(
    {"cell", "vocab_size", "hidden_size", "recurrent_size", "num_hidden_layers", "hidden_dropout"}
    | {"layer_norm_eps", "initializer_range", "tie_word_embeddings"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)
"""Config keys of an LSTM or GRU; harness/models/recurrent.py has their types and defaults."""


def carried_numbers(config: Mapping[str, Any]) -> int:
    """Return the number of fp32 values of a row's state, from a Hugging Face config; 0 without a
    state. Missing sizes take the defaults of the config class.
    """
    count = CARRIED.get(config["model_type"])
    return count(config) if count else 0


def _recurrent(config: Mapping[str, Any]) -> int:
    width = config.get("recurrent_size") or config.get("hidden_size", 1024)
    return int(config.get("num_hidden_layers", 4) * CELL_STATES[config.get("cell", "lstm")] * width)


def _mamba2(config: Mapping[str, Any]) -> int:
    """Return the size of the convolution inputs and scan states of all layers."""
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
"""Functions by model_type; the states themselves are in harness/models/recurrent_state.py."""
