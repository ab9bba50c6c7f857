"""The recurrent state that a model carries from one window of text to the next, per row."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import torch

from harness.layout.releases import is_older
from harness.models.recurrent import Carried

MAMBA2_CACHE = "cache_params" if is_older((5, 24)) else "cache"
"""Name of the argument for a Mamba-2 model's cache: since transformers 5.24 that of all models."""


class RecurrentWindow:
    """States of the models in harness/models/recurrent.py; `keywords` are the model's arguments."""

    def __init__(self, config: Any, states: torch.Tensor, dtype: torch.dtype) -> None:
        """`states` (rows, numbers) before the window."""
        self._carried = Carried(states.view(-1, *config.state_shape).to(dtype))
        self.keywords = {"carried": self._carried}

    @staticmethod
    def numbers(config: Any) -> int:
        """Return the size of one row's state."""
        return prod(config.state_shape)

    @property
    def after(self) -> torch.Tensor:
        """(rows, numbers) states after the window, without gradients."""
        return self._carried.after.flatten(1)


class Mamba2Window:
    """States of Mamba-2's convolutions and scans; also serves as the cache of its layers.

    Unlike in transformers' own caches, the states that layers read stay unchanged, so that a layer
    recomputed in the backward pass reads the same ones.
    """

    def __init__(self, config: Any, states: torch.Tensor, dtype: torch.dtype) -> None:
        """`states` (rows, numbers) before the window."""
        self._shapes, self._dtype = _mamba2_shapes(config), dtype
        sizes = [*map(prod, self._shapes)]
        by_layer = states.view(len(states), config.num_hidden_layers, -1)
        self._before = by_layer.split(sizes, dim=2)
        self._after: tuple[dict[int, torch.Tensor], ...] = ({}, {})
        self.keywords = {MAMBA2_CACHE: self}

    @staticmethod
    def numbers(config: Any) -> int:
        """Return the size of one row's state."""
        return int(config.num_hidden_layers) * sum(map(prod, _mamba2_shapes(config)))

    @property
    def after(self) -> torch.Tensor:
        """(rows, numbers) states after the window, without gradients."""
        convolutions, scans = self._after
        layers = [
            torch.cat([convolutions[layer].flatten(1), scans[layer].flatten(1)], dim=1)
            for layer in range(len(scans))
        ]
        return torch.cat(layers, dim=1)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Return the last inputs of a layer's convolution, (rows, channels, kernel)."""
        return self._read(0, layer_idx).to(self._dtype)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Return the state of a layer's scan, (rows, heads, head size, state size)."""
        return self._read(1, layer_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, conv_kernel_size: int
    ) -> torch.Tensor:
        """Store the last inputs; return the inputs before the window followed by its own."""
        inputs = torch.cat([self.get_conv_state(layer_idx), conv_states], dim=2)
        self._after[0][layer_idx] = inputs[:, :, -conv_kernel_size:].detach().float()
        return inputs

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int) -> None:
        """Store the state after the window."""
        self._after[1][layer_idx] = recurrent_states.detach().float()

    def _read(self, part: int, layer: int) -> torch.Tensor:
        states: torch.Tensor = self._before[part][:, layer]
        return states.reshape(-1, *self._shapes[part])

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: tokens are never rolled back."""
        return False

    # The cache as transformers 5.20 reads it:

    def has_previous_state(self, layer_idx: int) -> bool:
        """Return True: every window begins with states."""
        return True

    @property
    def layers(self) -> Mamba2Window:
        """The cache itself, indexed by layer."""
        return self

    def __getitem__(self, layer_idx: int) -> Any:
        """Return the states of a layer."""
        return SimpleNamespace(
            conv_states=[self.get_conv_state(layer_idx)],
            recurrent_states=[self.get_recurrent_state(layer_idx)],
            record_past=False,
        )


def _mamba2_shapes(config: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Return the shapes of a layer's convolution and scan states, for one row."""
    channels = int(config.expand * config.hidden_size) + 2 * config.n_groups * config.state_size
    return (channels, config.conv_kernel), (config.num_heads, config.head_dim, config.state_size)


Window = RecurrentWindow | Mamba2Window
"""One window of text, with the state before it and, once computed, the state after it."""
WINDOWS: dict[str, type[Window]] = {"recurrent": RecurrentWindow, "mamba2": Mamba2Window}
"""Window classes by model_type; layout/state_size.py has the sizes of their states."""
