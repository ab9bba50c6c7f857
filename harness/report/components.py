"""Components of memory, in the six groups that have a colour."""

from __future__ import annotations

from collections.abc import Mapping

from harness.report.palette import COMPONENTS

# The first prefix that fits decides; the names are those of harness/estimate.
_PREFIXES = (
    ("gradient buckets", "buffers"),
    ("gradient staging", "buffers"),
    ("pipeline: gradient", "gradients"),
    ("pipeline", "activations"),
    ("gradient", "gradients"),
    ("fp32 gradients", "gradients"),
    ("flat gradients", "gradients"),
    ("activations", "activations"),
    ("attention mask", "activations"),
    ("recomputed layer", "activations"),
    ("backward temporaries", "activations"),
    ("logits", "logits"),
    ("master", "optimizer"),
    ("moments", "optimizer"),
    ("step temporaries", "optimizer"),
    ("parameters", "weights"),
    ("persistent parameters", "weights"),
    ("gathered parameters", "weights"),
    ("secondary parameters", "weights"),
    ("weights", "weights"),
)


def group_of(component: str) -> str:
    """Return the group of a component; "buffers" for all that only moves or adds up data."""
    return next((group for prefix, group in _PREFIXES if component.startswith(prefix)), "buffers")


def grouped(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the size of every group, in stacking order."""
    sums = dict.fromkeys(COMPONENTS, 0.0)
    for component, size in sizes.items():
        sums[group_of(component)] += size
    return sums
