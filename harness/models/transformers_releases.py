"""Differences between the supported releases of transformers (5.20 to 5.24) that models depend on.

harness/layout/releases.py holds those that a plan depends on.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from harness.layout.releases import is_older

MAMBA2_CACHE = "cache_params" if is_older((5, 24)) else "cache"
"""The argument that takes a Mamba-2 model's cache. 5.24 calls the cache of every model `cache`."""


class Mamba2CacheOf520:
    """Mamba-2's cache as transformers 5.20 reads it, by the methods that later releases call."""

    get_conv_state: Any
    get_recurrent_state: Any

    def has_previous_state(self, layer_idx: int) -> bool:
        """Return True: every window begins with states."""
        return True

    @property
    def layers(self) -> Mamba2CacheOf520:
        """The cache itself, indexed by layer."""
        return self

    def __getitem__(self, layer_idx: int) -> Any:
        """Return the states of a layer."""
        return SimpleNamespace(
            conv_states=[self.get_conv_state(layer_idx)],
            recurrent_states=[self.get_recurrent_state(layer_idx)],
            record_past=False,
        )
