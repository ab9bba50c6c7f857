"""Expectations for each private name of DeepSpeed that the library reads.

`name: (layout, expectation)`. Each layout's engine is built once, has its gradients ready, and is
checked for all of its names. Dotted names are read from the object before the dot.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
_SPLIT = {"stage": 3, "stage3_param_persistence_threshold": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"zero_optimization": {"stage": 0}},
    "zero1": {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}},
    "bf16": {"zero_optimization": {"stage": 1}, **BF16},
    "offload2": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        **BF16,
    },
    "zero3": {"zero_optimization": _SPLIT},
    "hpz": {"zero_optimization": {**_SPLIT, "zero_hpz_partition_size": 2}, **BF16},
    "pipeline": {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}},
}


def parameter(engine: Any) -> Any:
    """Return the largest parameter of which this rank has a part."""
    linked = [p for p in engine.module.parameters() if getattr(p, "_hp_mapping", 0) is not None]
    return max(linked, key=lambda p: p.numel())


def link(engine: Any) -> Any:
    return parameter(engine)._hp_mapping


def group_of(engine: Any, groups: Any) -> bool:
    """Return True if lists of parameters, one per group, contain all trained parameters."""
    trained = {id(p) for p in engine.module.parameters() if p.requires_grad}
    return {id(p) for group in groups for p in group} == trained


def flat(tensors: Any) -> bool:
    return all(t.dim() == 1 and t.dtype == torch.float32 for t in tensors)


def takes(function: Any, *names: str) -> bool:
    """Return True if a function or method has these parameters and requires no others."""
    parameters = inspect.signature(function).parameters
    needed = {name for name, p in parameters.items() if p.default is p.empty} - {"self"}
    return set(names) <= parameters.keys() and needed <= set(names)


def of_class(path: str, name: str) -> bool:
    """Return True if a class of DeepSpeed, not used here, defines a method or sets a field."""
    module, _, owner = path.rpartition(".")
    source = inspect.getsource(getattr(__import__(module, fromlist=[owner]), owner))
    return f"def {name}(" in source or f"self.{name} =" in source


_ZERO3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_SWAPPER = "deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper"
_SWAPPED = "deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerStateSwapInfo"
_FILE = "deepspeed.runtime.swap_tensor.optimizer_utils.SwapTensorContext"

Expectation = Callable[[Any], object]
CONTRACT: dict[str, tuple[str, Expectation]] = {
    # engines
    "engine.global_steps": ("zero0", lambda e: e.global_steps == 1),
    "engine.global_samples": ("zero0", lambda e: e.global_samples == 8),
    "engine.skipped_steps": ("zero0", lambda e: e.skipped_steps == 0),
    "engine.allreduce_and_copy": (
        "bf16",
        lambda e: (
            takes(type(e).allreduce_and_copy, "small_bucket", "dp_group")
            and "self.allreduce_and_copy(" in inspect.getsource(type(e))
        ),
    ),
    "engine.allreduce_bucket": (
        "bf16",
        lambda e: (
            takes(e.allreduce_bucket, "bucket", "dp_group")
            and "numel_per_bucket" not in inspect.signature(e.allreduce_bucket).parameters
        ),
    ),
    # wrappers
    "optimizer.optimizer": (
        "zero1",
        lambda e: isinstance(e.optimizer.optimizer, torch.optim.Optimizer),
    ),
    "optimizer.loss_scaler": ("zero1", lambda e: hasattr(e.optimizer, "loss_scaler")),
    "loss_scaler.dynamic": ("zero1", lambda e: e.optimizer.loss_scaler.dynamic is True),
    "loss_scaler.cur_scale": (
        "zero1",
        lambda e: e.optimizer.loss_scaler.cur_scale == e.optimizer.loss_scale,
    ),
    "loss_scaler.cur_iter": ("zero1", lambda e: e.optimizer.loss_scaler.cur_iter >= 0),
    "loss_scaler.last_overflow_iter": (
        "zero1",
        lambda e: e.optimizer.loss_scaler.last_overflow_iter == -1,
    ),
    "loss_scaler.cur_hysteresis": ("zero1", lambda e: e.optimizer.loss_scaler.cur_hysteresis >= 1),
    "optimizer._update_scale": (
        "zero1",
        lambda e: "self._update_scale(self.overflow)" in inspect.getsource(type(e.optimizer).step),
    ),
    "is_invalid_grad_norm": (
        "zero1",
        lambda e: all(
            "is_invalid_grad_norm(" in inspect.getsource(inspect.getmodule(type(o)))
            for o in [e.optimizer]
        ),
    ),
    # parameters of ZeRO-1, ZeRO-2 and BF16_Optimizer
    "parameter._hp_mapping": ("zero1", lambda e: link(e).get_hp_fragment().dtype == torch.float32),
    "parameter._index_in_param_group": (
        "zero1",
        lambda e: (
            e.optimizer.bit16_groups[link(e).param_group_index][
                parameter(e)._index_in_param_group
            ].shape
            == parameter(e).shape
        ),
    ),
    "mapping.param_group_index": (
        "bf16",
        lambda e: any(
            p is parameter(e) for p in e.optimizer.bf16_groups[link(e).param_group_index]
        ),
    ),
    "mapping.hp_fragment_address": (
        "bf16",
        lambda e: torch.equal(
            e.optimizer.fp32_groups_flat_partition[link(e).param_group_index].narrow(
                0, link(e).hp_fragment_address.start, link(e).hp_fragment_address.numel
            ),
            link(e).get_hp_fragment(),
        ),
    ),
    "mapping.lp_fragment_address": (
        "bf16",
        lambda e: torch.equal(
            parameter(e)
            .detach()
            .view(-1)
            .narrow(0, link(e).lp_fragment_address.start, link(e).lp_fragment_address.numel),
            link(e).get_hp_fragment().bfloat16(),
        ),
    ),
    "mapping.get_lp_grad_fragment": (
        "zero1",
        lambda e: (
            link(e).get_lp_grad_fragment(parameter(e)._index_in_param_group).numel()
            == link(e).hp_fragment_address.numel
        ),
    ),
    "optimizer.bit16_groups": ("zero1", lambda e: group_of(e, e.optimizer.bit16_groups)),
    "optimizer.bf16_groups": ("bf16", lambda e: group_of(e, e.optimizer.bf16_groups)),
    "optimizer.single_partition_of_fp32_groups": (
        "zero1",
        lambda e: flat(e.optimizer.single_partition_of_fp32_groups),
    ),
    "optimizer.fp32_groups_flat_partition": (
        "bf16",
        lambda e: flat(e.optimizer.fp32_groups_flat_partition),
    ),
    "optimizer.get_grads_for_reduction": ("bf16", lambda e: e.optimizer.get_grads_for_reduction()),
    "optimizer.update_lp_params": (
        "zero1",
        lambda e: takes(e.optimizer.update_lp_params),
    ),
    "optimizer._hp_optimizer_states_linked": (
        "zero1",
        lambda e: isinstance(e.optimizer._hp_optimizer_states_linked, bool),
    ),
    "optimizer._lazy_init_hp_params_optimizer_state": (
        "zero1",
        lambda e: takes(e.optimizer._lazy_init_hp_params_optimizer_state),
    ),
    "optimizer._wait_for_offload_copies": (
        "offload2",
        lambda e: takes(e.optimizer._wait_for_offload_copies),
    ),
    "optimizer.cpu_offload": ("offload2", lambda e: e.optimizer.cpu_offload is True),
    "optimizer.averaged_gradients": (
        "offload2",
        lambda e: isinstance(e.optimizer.averaged_gradients, dict),
    ),
    "optimizer.reduction_stream": ("zero1", lambda e: hasattr(e.optimizer, "reduction_stream")),
    # parameters of ZeRO-3, and its wrapper
    "parameter.ds_id": ("zero3", lambda e: isinstance(parameter(e).ds_id, int)),
    "parameter.ds_shape": (
        "zero3",
        lambda e: math.prod(parameter(e).ds_shape) == parameter(e).ds_numel,
    ),
    "parameter.ds_numel": ("zero3", lambda e: parameter(e).ds_numel > parameter(e).numel() == 0),
    "parameter.ds_tensor": (
        "zero3",
        lambda e: 2 * parameter(e).ds_tensor.numel() >= parameter(e).ds_numel,
    ),
    "ds_tensor.ds_numel": (
        "zero3",
        lambda e: parameter(e).ds_tensor.ds_numel == parameter(e).ds_tensor.numel(),
    ),
    "parameter.ds_persist": ("zero3", lambda e: parameter(e).ds_persist is False),
    "parameter.ds_process_group": (
        "zero3",
        lambda e: torch.distributed.get_world_size(parameter(e).ds_process_group) == 2,
    ),
    "parameter.ds_secondary_tensor": (
        "hpz",
        lambda e: parameter(e).ds_secondary_tensor is not None,
    ),
    "parameter.convert_to_zero_parameters": (
        "zero3",
        lambda e: (
            "param_list" in inspect.signature(parameter(e).convert_to_zero_parameters).parameters
        ),
    ),
    "parameter._z3_optimizer": ("zero3", lambda e: parameter(e)._z3_optimizer is e.optimizer),
    "optimizer._get_param_partition_rank": (
        "zero3",
        lambda e: (
            e.optimizer._get_param_partition_rank(parameter(e)) == torch.distributed.get_rank()
        ),
    ),
    "optimizer.get_param_id": (
        "zero3",
        lambda e: e.optimizer.get_param_id(parameter(e)) in e.optimizer.grad_position,
    ),
    "optimizer.grad_position": (
        "zero3",
        lambda e: (
            [*map(type, e.optimizer.grad_position[e.optimizer.get_param_id(parameter(e))])]
            == [int, int, int]
        ),
    ),
    "optimizer.fp32_partitioned_groups_flat": (
        "zero3",
        lambda e: flat(e.optimizer.fp32_partitioned_groups_flat),
    ),
    "optimizer.fp16_partitioned_groups_flat": (
        "zero3",
        lambda e: (
            [t.shape for t in e.optimizer.fp16_partitioned_groups_flat]
            == [t.shape for t in e.optimizer.fp32_partitioned_groups_flat]
        ),
    ),
    "optimizer.fp16_partitioned_groups": (
        "zero3",
        lambda e: (
            sum(p.numel() for group in e.optimizer.fp16_partitioned_groups for p in group)
            == sum(t.numel() for t in e.optimizer.fp16_partitioned_groups_flat)
        ),
    ),
    "optimizer.unflatten": (
        "zero3",
        lambda e: (
            len(
                e.optimizer.unflatten(
                    e.optimizer.fp16_partitioned_groups_flat[0],
                    e.optimizer.fp16_partitioned_groups[0],
                )
            )
            == len(e.optimizer.fp16_partitioned_groups[0])
        ),
    ),
    "optimizer.persistent_parameters": (
        "zero3",
        lambda e: [*e.optimizer.persistent_parameters] == [],
    ),
    "optimizer.checkpoint_event_epilogue": (
        "zero3",
        lambda e: takes(e.optimizer.checkpoint_event_epilogue),
    ),
    "optimizer._get_fp32_grad_state_partition": (
        "zero3",
        lambda e: (
            e.optimizer._get_fp32_grad_state_partition(parameter(e), release_swap_buffers=True)[
                0
            ].shape
            == parameter(e).ds_tensor.shape
        ),
    ),
    "optimizer.reduce_and_partition_stream": (
        "zero3",
        lambda e: hasattr(e.optimizer, "reduce_and_partition_stream"),
    ),
    "optimizer.parameter_offload": (
        "zero3",
        lambda e: type(e.optimizer.parameter_offload).__name__ == "DeepSpeedZeRoOffload",
    ),
    "parameter_offload._DeepSpeedZeRoOffload__allgather_stream": (
        "zero3",
        lambda e: "_DeepSpeedZeRoOffload__allgather_stream" in vars(e.optimizer.parameter_offload),
    ),
    # optimizer states on NVMe
    "optimizer.swap_optimizer": ("zero3", lambda e: e.optimizer.swap_optimizer is False),
    "optimizer._swappable_optimizer_subgroup": (
        "zero3",
        lambda e: e.optimizer._swappable_optimizer_subgroup(0) is False,
    ),
    "optimizer.fp16_partitioned_groups_flat_numel": (
        "zero3",
        lambda e: (
            e.optimizer.fp16_partitioned_groups_flat_numel
            == [t.numel() for t in e.optimizer.fp32_partitioned_groups_flat]
        ),
    ),
    "optimizer.optimizer_swapper": ("zero3", lambda e: of_class(_ZERO3, "optimizer_swapper")),
    "swapper._get_param_swap_info": ("zero3", lambda e: of_class(_SWAPPER, "_get_param_swap_info")),
    "swapper._io_aligned_numel": ("zero3", lambda e: of_class(_SWAPPER, "_io_aligned_numel")),
    "swapper.swap_element_size": ("zero3", lambda e: of_class(_SWAPPER, "swap_element_size")),
    "info.tensors": ("zero3", lambda e: of_class(_SWAPPED, "tensors")),
    "info.get_swap_paths": ("zero3", lambda e: of_class(_SWAPPED, "get_swap_paths")),
    "info.release_memory": ("zero3", lambda e: of_class(_SWAPPED, "release_memory")),
    "swapped.compute_tensor": ("zero3", lambda e: of_class(_FILE, "compute_tensor")),
    "swapped.swap_path": ("zero3", lambda e: of_class(_FILE, "swap_path")),
    # pipeline stages
    "parameter.ds_pipe_replicated": (
        "pipeline",
        lambda e: "ds_pipe_replicated" in inspect.getsource(inspect.getmodule(type(e.optimizer))),
    ),
    "parameter.model_parallel": (
        "pipeline",
        lambda e: (
            "model_parallel"
            in inspect.getsource(__import__("deepspeed.runtime.utils", fromlist=["utils"]))
        ),
    ),
    "optimizer.scaled_global_norm": (
        "pipeline",
        lambda e: takes(type(e.optimizer).scaled_global_norm),
    ),
    "optimizer._model_parallel_all_reduce": (
        "pipeline",
        lambda e: takes(e.optimizer._model_parallel_all_reduce, "tensor", "op"),
    ),
    "engine._train_schedule": ("pipeline", lambda e: [*e._train_schedule()]),
    "engine._inference_schedule": ("pipeline", lambda e: [*e._inference_schedule(3)]),
    "engine._exec_schedule": ("pipeline", lambda e: takes(e._exec_schedule, "pipe_schedule")),
    "engine._exec_optimizer_step": ("pipeline", lambda e: takes(e._exec_optimizer_step)),
    "engine.reset_activation_shape": ("pipeline", lambda e: takes(e.reset_activation_shape)),
    "engine.set_dataiterator": ("pipeline", lambda e: takes(e.set_dataiterator, "iterator")),
    "engine.total_loss": ("pipeline", lambda e: "total_loss" in vars(e)),
    "engine._compute_loss": ("pipeline", lambda e: e._compute_loss is True),
    "engine.loss": ("pipeline", lambda e: "loss" in vars(e)),
    "engine.pipe_buffers": ("pipeline", lambda e: isinstance(e.pipe_buffers["outputs"], list)),
    "engine.mpu": ("pipeline", lambda e: e.mpu is not None),
    "mpu.get_pipe_parallel_group": (
        "pipeline",
        lambda e: torch.distributed.get_world_size(e.mpu.get_pipe_parallel_group()) == 2,
    ),
    "mpu.get_data_parallel_group": (
        "pipeline",
        lambda e: torch.distributed.get_world_size(e.mpu.get_data_parallel_group()) == 1,
    ),
    "mpu.get_model_parallel_group": (
        "pipeline",
        lambda e: torch.distributed.get_world_size(e.mpu.get_model_parallel_group()) == 2,
    ),
    "mpu.get_slice_parallel_group": (
        "pipeline",
        lambda e: torch.distributed.get_world_size(e.mpu.get_slice_parallel_group()) == 1,
    ),
    "PipelineModule._index_tied_modules": (
        "pipeline",
        lambda e: "self._index_tied_modules()" in inspect.getsource(type(e.module).__mro__[1]),
    ),
    "PipelineModule._synchronize_tied_weights": (
        "pipeline",
        lambda e: (
            "self._synchronize_tied_weights()" in inspect.getsource(type(e.module).__mro__[1])
        ),
    ),
}
