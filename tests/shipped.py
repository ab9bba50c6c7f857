"""The JSONs of ds_configs/, the ranks that each needs, and sections as in the Trainer's guides."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.config.ds_json import value_of

DS_CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"
_SIZES = ("pipeline.stages", "tensor_parallel.autotp_size", "sequence_parallel_size")


def fewest_ranks(ds: Mapping[str, Any]) -> int:
    """Return the ranks of one data rank, or the number that shares the experts."""
    sizes = [value_of(ds, key) for key in _SIZES]
    ranks = math.prod(size for size in sizes if isinstance(size, int) and size > 1)
    return max(ranks, ranks_with_experts(ds))


def ranks_with_experts(ds: Mapping[str, Any]) -> int:
    """Return the number of data ranks that share the experts; 1 if these are not divided."""
    section = "expert_parallel"
    return int(value_of(ds, f"{section}.autoep_size")) if value_of(ds, f"{section}.enabled") else 1


def model_for(ds: Mapping[str, Any]) -> str:
    """Return a preset that a JSON can divide."""
    if ranks_with_experts(ds) > 1:
        return "mixtral-8x7b"
    return "llama-3-8b" if fewest_ranks(ds) > 4 else "tiny"
