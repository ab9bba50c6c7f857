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


FP16: dict[str, Any] = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
ADAMW: dict[str, Any] = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
WARMUP: dict[str, Any] = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
ZERO_3: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
"""The section zero_optimization, without offload."""
