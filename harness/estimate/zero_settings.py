"""The keys of a DeepSpeed JSON that affect memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.estimate.memory_item import Place

_DTYPE_BYTES = {"fp32": 4, "float32": 4, "float": 4, "torch.float32": 4}  # others: 2


@dataclass(frozen=True)
class ZeroSettings:
    """The keys of the DeepSpeed JSON that affect memory; sizes count elements."""

    stage: int
    offload_optimizer: Place
    offload_param: Place
    offload_ratio: float
    reduce_bucket: int
    overlap_given: bool | None
    """overlap_comm; None: the stage's default."""
    contiguous_gradients: bool
    prefetch_bucket: int
    persistence_threshold: int
    max_reuse_distance: int
    max_live: int
    """stage3_max_live_parameters: maximum number of gathered elements."""
    has_leaves: bool
    """True if the JSON lists modules to gather as a whole."""
    sub_group_size: int
    secondary_ranks: int
    """zero_hpz_partition_size: ranks that share a second copy of the weights."""
    pins: bool
    """True if offloaded data is in pinned memory."""
    sum_bytes: int | None
    """Bytes of data_types.grad_accum_dtype; None: as the model."""
    comm_bytes: int | None
    """Bytes of communication_data_type; None: as the model."""
    half_master: bool
    half_moments: bool
    optimizer: str
    momentum: float
    torch_adam: bool
    fused_adam: bool
    """True if torch's fused Adam is used, which needs no temporaries."""
    nvme_buffers: int
    nvme_param_buffers: int
    nvme_param_buffer: int

    @classmethod
    def read(cls, value: Callable[[str], Any]) -> ZeroSettings:
        """Return the settings; `value(key)` gives a key's literal, or DeepSpeed's default."""

        def zero(key: str) -> Any:
            return value(f"zero_optimization.{key}")

        def place(section: str) -> Place:
            device = str(zero(f"{section}.device"))
            return {"cpu": "host", "nvme": "nvme"}.get(device, "device")  # type: ignore[return-value]

        def width(key: str) -> int | None:
            name = value(key)
            return None if name is None else _DTYPE_BYTES.get(str(name), 2)

        stage = int(zero("stage"))
        optimizer = value("optimizer.params") or {}
        return cls(
            stage=stage,
            offload_optimizer=place("offload_optimizer") if stage else "device",
            offload_param=place("offload_param") if stage == 3 else "device",
            offload_ratio=float(zero("offload_optimizer.ratio")),
            reduce_bucket=int(zero("reduce_bucket_size")),
            overlap_given=zero("overlap_comm"),
            contiguous_gradients=bool(zero("contiguous_gradients")),
            prefetch_bucket=int(zero("stage3_prefetch_bucket_size")),
            persistence_threshold=int(zero("stage3_param_persistence_threshold")),
            max_reuse_distance=int(zero("stage3_max_reuse_distance")),
            max_live=int(zero("stage3_max_live_parameters")),
            has_leaves=bool(zero("stage3_module_granularity_threshold"))
            or value("zero_optimization.leaf_module") is not None,
            sub_group_size=int(zero("sub_group_size")),
            secondary_ranks=int(zero("zero_hpz_partition_size")),
            pins=any(
                place(section) != "device" and zero(f"{section}.pin_memory")
                for section in ("offload_optimizer", "offload_param")
            ),
            sum_bytes=width("data_types.grad_accum_dtype"),
            comm_bytes=width("communication_data_type"),
            half_master=bool(
                value("bf16.bf16_master_weights_and_grads")
                or value("fp16.fp16_master_weights_and_grads")
            ),
            half_moments=bool(value("bf16.bf16_optimizer_states")),
            optimizer=str(value("optimizer.type")).lower(),
            momentum=float(optimizer.get("momentum", 0.0)),
            torch_adam=bool(optimizer.get("torch_adam", False)),
            fused_adam=bool(optimizer.get("fused", False)),
            nvme_buffers=int(zero("offload_optimizer.buffer_count")),
            nvme_param_buffers=int(zero("offload_param.buffer_count")),
            nvme_param_buffer=int(zero("offload_param.buffer_size")),
        )

    @property
    def overlap_comm(self) -> bool:
        """True if gradients are reduced during the backward pass."""
        return self.stage == 3 if self.overlap_given is None else self.overlap_given
