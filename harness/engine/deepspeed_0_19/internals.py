"""All private names of DeepSpeed that the library reads, one function each. The other files of this
folder read only those that they replace or fix.

tests/engine/deepspeed_0_19/test_internals.py tests each on real engines. DeepSpeed's public
functions for fragments are not sufficient: `safe_get_local_*` support only ZeRO-3 and copy host
tensors to the device, and none says which elements of a parameter a rank has.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.engine.deepspeed_0_19.replaced import replaced

_SETTLED = SimpleNamespace(synchronize=lambda: None)  # a stream without pending work
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def inner_optimizer(engine: Any) -> Any:
    """Return the optimizer inside DeepSpeed's wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def read_counters(engine: Any) -> dict[str, int]:
    """Return the numbers of steps, samples and skipped steps so far."""
    return {name: int(getattr(engine, name)) for name in _COUNTERS}


def write_counters(engine: Any, values: dict[str, int]) -> None:
    """Restore those counters of `read_counters` that are present."""
    for name in _COUNTERS:
        if name in values:
            setattr(engine, name, values[name])


def read_loss_scaling(engine: Any) -> dict[str, Any]:
    """Return the state of a dynamic loss scale; empty for a fixed one."""
    scaler = _scaler(engine)
    return {name: getattr(scaler, name) for name in _SCALER if hasattr(scaler, name)}


def write_loss_scaling(engine: Any, values: dict[str, Any]) -> None:
    """Restore those values of `read_loss_scaling` that are present."""
    scaler = _scaler(engine)
    for name in _SCALER:
        if hasattr(scaler, name) and name in values:
            setattr(scaler, name, values[name])


def _scaler(engine: Any) -> Any:
    """Return the dynamic loss scaler; None if the JSON fixes the scale."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


# --- a parameter, at any stage ---


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Return True under ZeRO-3."""
    return hasattr(parameter, "ds_id")


def is_linked(parameter: nn.Parameter) -> bool:
    """Return True under ZeRO-1, ZeRO-2 and BF16_Optimizer, which step fp32 copies of weights."""
    return hasattr(parameter, "_hp_mapping")


def is_pipe_copy(parameter: nn.Parameter) -> bool:
    """Return True for a tied weight's copy on the last stage; the first stage counts it."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the full shape of a parameter before ZeRO shards it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_whole(parameter: nn.Parameter) -> bool:
    """Return True if the rank keeps the full parameter between steps."""
    return bool(getattr(parameter, "ds_persist", True))


def elements_held(parameter: Any) -> int:
    """Return the number of elements of a parameter that this rank stores between steps."""
    tensor = parameter.ds_tensor if is_partitioned(parameter) else parameter
    return int(tensor.numel())


# --- ZeRO-3 ---


@dataclass(frozen=True)
class Shard:
    """A rank's shard of a parameter: elements from `offset` on, at `start` of a flat tensor.

    `group`: index of the flat tensor among the trained ones; None for a frozen parameter.
    """

    offset: int
    numel: int  # negative or 0 if earlier ranks hold the whole parameter
    start: int
    group: int | None


def shard_of(parameter: Any) -> Shard:
    """Return this rank's shard of a ZeRO-3 parameter."""
    size = parameter.ds_tensor.ds_numel
    if parameter.requires_grad:
        optimizer = parameter._z3_optimizer
        rank = optimizer._get_param_partition_rank(parameter)
        group, start, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    else:
        rank, group, start = dist.get_rank(parameter.ds_process_group), None, 0
    offset = rank * size
    return Shard(offset, min(size, parameter.ds_numel - offset), start, group)


def partition_like(first: Any, parameters: list[nn.Parameter]) -> None:
    """Partition parameters like `first`, which zero.Init has partitioned. Collective."""
    first.convert_to_zero_parameters(param_list=parameters)


def shard_tensor(parameter: Any) -> torch.Tensor:
    """Return the elements of a ZeRO-3 parameter that this rank stores."""
    tensor: torch.Tensor = parameter.ds_tensor.data
    return tensor


def shard_gradient(parameter: Any) -> torch.Tensor:
    """Return the gradient of this rank's shard, which must be settled (gradients.py): DeepSpeed's
    function would make the host wait for each.
    """
    optimizer = parameter._z3_optimizer
    gradient: torch.Tensor
    with replaced(optimizer, "reduce_and_partition_stream", _SETTLED):
        gradient, _ = optimizer._get_fp32_grad_state_partition(parameter, release_swap_buffers=True)
    return gradient.clone() if is_swapped(optimizer) else gradient


def is_zero3(optimizer: Any) -> bool:
    """Return True for ZeRO-3's wrapper."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def zero3_flats(optimizer: Any) -> list[torch.Tensor]:
    """Return one flat fp32 tensor per sub-group."""
    return list(optimizer.fp32_partitioned_groups_flat)


def refresh_zero3(engine: Any, masters: list[torch.Tensor]) -> None:
    """Make the engine compute with `masters`, as DeepSpeed's _rigid_load_state_dict does.
    Collective.
    """
    optimizer = engine.optimizer
    for parameter in engine.module.parameters():
        # hpZ's second copy is of the old weights; DeepSpeed keeps that of frozen parameters.
        parameter.ds_secondary_tensor = None
    flats, groups = optimizer.fp16_partitioned_groups_flat, optimizer.fp16_partitioned_groups
    for master, flat, group in zip(masters, flats, groups, strict=True):
        if master.numel():
            flat.data.copy_(master.data)
        for parameter, piece in zip(group, optimizer.unflatten(flat, group), strict=True):
            parameter.data = piece.data
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
    optimizer.checkpoint_event_epilogue()


# --- ZeRO-1, ZeRO-2 and BF16_Optimizer ---


def linked_shard(parameter: Any) -> Shard | None:
    """Return this rank's shard of a parameter; None if it has none."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    place = mapping.hp_fragment_address
    offset = mapping.lp_fragment_address.start
    return Shard(offset, place.numel, place.start, mapping.param_group_index)


def linked_gradient(parameter: Any) -> torch.Tensor | None:
    """Return the gradient of this rank's shard, as a view; None if it has none."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    fragment: torch.Tensor = mapping.get_lp_grad_fragment(parameter._index_in_param_group).view(-1)
    if fragment.numel() == parameter.numel():  # BF16_Optimizer keeps the whole gradient
        address = mapping.lp_fragment_address
        return fragment.narrow(0, address.start, address.numel)
    return fragment


def linked_flats(optimizer: Any) -> list[torch.Tensor]:
    """Return one flat fp32 tensor per parameter group, this rank's shard."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return list(optimizer.single_partition_of_fp32_groups)
    return list(optimizer.fp32_groups_flat_partition)  # BF16_Optimizer


def linked_group(optimizer: Any, parameter: nn.Parameter) -> int:
    """Return the index of a parameter's group, whichever rank has its elements."""
    groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
    return next(n for n, group in enumerate(groups) if any(p is parameter for p in group))


def refresh_linked(optimizer: Any) -> None:
    """Make the engine compute with its separate fp32 weights, if there are any. Collective."""
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


# --- optimizer states on NVMe ---


def is_swapped(optimizer: Any) -> bool:
    """Return True if any states are on NVMe: those of sub-groups of at least a megabyte."""
    return bool(getattr(optimizer, "swap_optimizer", False))


def is_group_swapped(optimizer: Any, group: int) -> bool:
    """Return True if the states of a sub-group are on NVMe."""
    return bool(optimizer._swappable_optimizer_subgroup(group))


def group_numel(optimizer: Any, group: int) -> int:
    """Return the number of elements of a sub-group, without the padding of its file."""
    return int(optimizer.fp16_partitioned_groups_flat_numel[group])


def swapped_tensors(optimizer: Any, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, Path]]:
    """Yield (tensor, its file): a sub-group's master weights first, then their states."""
    for swapped in optimizer.optimizer_swapper._get_param_swap_info(flat).tensors:
        yield swapped.compute_tensor, Path(swapped.swap_path)


def add_swapped_states(
    optimizer: Any, flat: torch.Tensor, numel: int, kinds: Collection[str]
) -> None:
    """Add states of zeros to a sub-group, in files."""
    optimizer.optimizer.state[flat].update({kind: torch.zeros(numel) for kind in kinds})
    swapper = optimizer.optimizer_swapper
    info = swapper._get_param_swap_info(flat)
    for path in info.get_swap_paths()[1:]:
        with Path(path).open("wb") as file:
            file.truncate(swapper._io_aligned_numel(numel) * swapper.swap_element_size)
    info.release_memory()


# --- pipeline stages ---


def train_schedule(engine: Any) -> Any:
    """Return the commands of one training step of this stage."""
    return engine._train_schedule()


def inference_schedule(engine: Any, micro_batches: int) -> Any:
    """Return the commands of forward passes only."""
    return engine._inference_schedule(micro_batches)


def run_schedule(engine: Any, schedule: Any, inputs: Iterator[Any]) -> None:
    """Execute a stage's commands on micro-batches; keeps no reference to them afterwards."""
    engine.total_loss = None
    engine._compute_loss = True
    engine.set_dataiterator((micro_batch, None) for micro_batch in inputs)
    engine._exec_schedule(schedule)
    # The last stage's losses would keep their graphs alive, and the graphs their inputs.
    outputs = engine.pipe_buffers["outputs"]
    outputs[:] = [None] * len(outputs)
    engine.loss = None


def take_step(engine: Any) -> None:
    """Take the optimizer step at the end of a training schedule."""
    engine._exec_optimizer_step()


def forget_shape(engine: Any) -> None:
    """Make the stages renegotiate the shape that is sent between them."""
    engine.reset_activation_shape()


def made_groups(engine: Any) -> list[dist.ProcessGroup]:
    """Return the groups that DeepSpeed created: replicas of this stage, stages of this pipeline,
    ranks that together hold one model, tensor-parallel ranks.
    """
    return [
        engine.mpu.get_data_parallel_group(),
        engine.mpu.get_pipe_parallel_group(),
        engine.mpu.get_model_parallel_group(),
        engine.mpu.get_slice_parallel_group(),
    ]


def pipe_group(engine: Any) -> dist.ProcessGroup:
    """Return the ranks that hold the stages of this rank's model."""
    group: dist.ProcessGroup = engine.mpu.get_pipe_parallel_group()
    return group
