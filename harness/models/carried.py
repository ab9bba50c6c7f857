"""The state that a model carries from a window of text to the next, as numbers of each row."""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

import torch

from harness.models.recurrent import Carried
from harness.models.transformers_releases import MAMBA2_CACHE, Mamba2CacheOf520


class Window(Protocol):
    """A window of text that begins with states, and has others behind it once it is computed."""

    @property
    def keywords(self) -> dict[str, Any]:
        """The model's arguments."""

    @property
    def after(self) -> torch.Tensor:
        """(rows, numbers) states behind the window, without gradients."""


class RecurrentWindow:
    """States of harness/models/recurrent.py."""

    def __init__(self, config: Any, states: torch.Tensor, dtype: torch.dtype) -> None:
        """`states` (rows, numbers)."""
        self._carried = Carried(states.view(-1, *config.state_shape).to(dtype))
        self.keywords = {"carried": self._carried}

    @staticmethod
    def numbers(config: Any) -> int:
        """Return the numbers of a row's state."""
        return prod(config.state_shape)

    @property
    def after(self) -> torch.Tensor:
        """(rows, numbers) states behind the window, without gradients."""
        return self._carried.after.flatten(1)


class Mamba2Window(Mamba2CacheOf520):
    """States of Mamba-2's convolutions and scans, and the cache that its layers are given.

    What layers read stays as it was, unlike in transformers' own caches: a layer that is computed
    again for its backward pass reads the same.
    """

    def __init__(self, config: Any, states: torch.Tensor, dtype: torch.dtype) -> None:
        """`states` (rows, numbers)."""
        self._shapes, self._dtype = _mamba2_shapes(config), dtype
        sizes = [*map(prod, self._shapes)]
        by_layer = states.view(len(states), config.num_hidden_layers, -1)
        self._before = by_layer.split(sizes, dim=2)
        self._after: tuple[dict[int, torch.Tensor], ...] = ({}, {})
        self.keywords = {MAMBA2_CACHE: self}

    @staticmethod
    def numbers(config: Any) -> int:
        """Return the numbers of a row's state."""
        return int(config.num_hidden_layers) * sum(map(prod, _mamba2_shapes(config)))

    @property
    def after(self) -> torch.Tensor:
        """(rows, numbers) states behind the window, without gradients."""
        convolutions, scans = self._after
        layers = [
            torch.cat([convolutions[layer].flatten(1), scans[layer].flatten(1)], dim=1)
            for layer in range(len(scans))
        ]
        return torch.cat(layers, dim=1)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """(rows, channels, kernel) last inputs of a layer's convolution."""
        return self._read(0, layer_idx).to(self._dtype)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """(rows, heads, head size, state size) state of a layer's scan."""
        return self._read(1, layer_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, conv_kernel_size: int
    ) -> torch.Tensor:
        """Keep the last inputs; return those before the window and its own."""
        inputs = torch.cat([self.get_conv_state(layer_idx), conv_states], dim=2)
        self._after[0][layer_idx] = inputs[:, :, -conv_kernel_size:].detach().float()
        return inputs

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int) -> None:
        """Keep the state behind the window."""
        self._after[1][layer_idx] = recurrent_states.detach().float()

    def _read(self, part: int, layer: int) -> torch.Tensor:
        states: torch.Tensor = self._before[part][:, layer]
        return states.reshape(-1, *self._shapes[part])

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: no token is taken back."""
        return False


def _mamba2_shapes(config: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Return the shapes of a layer's states, of convolution and scan, for one row."""
    channels = int(config.expand * config.hidden_size) + 2 * config.n_groups * config.state_size
    return (channels, config.conv_kernel), (config.num_heads, config.head_dim, config.state_size)


WINDOWS: dict[str, type[RecurrentWindow] | type[Mamba2Window]] = {
    "recurrent": RecurrentWindow,
    "mamba2": Mamba2Window,
}
"""By model_type; the plan counts them (layout/carried.py)."""
