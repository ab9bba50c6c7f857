"""Every private name of DeepSpeed that the library reads exists with its expected meaning.

After an upgrade of DeepSpeed, run this file first: it lists all changed names within a minute.
"""

import ast
import inspect
import math
import pkgutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.engines import cells, engine_of, share_of
from tests.ranks import ranks
from tests.real_runs import REPOSITORY


def parameter(engine: Any) -> Any:
    """Return the largest parameter of which this rank has a part."""
    linked = [p for p in engine.module.parameters() if getattr(p, "_hp_mapping", 0) is not None]
    return max(linked, key=lambda p: p.numel())


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


def defines(owner: str, name: str) -> bool:
    """Return True if a class of DeepSpeed, not used here, defines a method or sets a field."""
    source = inspect.getsource(pkgutil.resolve_name(f"deepspeed.runtime.{owner}"))
    return f"def {name}(" in source or f"self.{name} =" in source


def source_of(thing: Any) -> str:
    """Return the source of the module that defines a class."""
    return inspect.getsource(inspect.getmodule(type(thing)))


def shard_of(p: Any, where: Any) -> torch.Tensor:
    """Return the elements of a flat tensor at an address."""
    return p.narrow(0, where.start, where.numel)


_WRAPPER = "zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_SWAPPER = "swap_tensor.optimizer_utils.OptimizerSwapper"
_SWAPPED = "swap_tensor.optimizer_utils.OptimizerStateSwapInfo"
_FILE = "swap_tensor.optimizer_utils.SwapTensorContext"

# By layout, whose engine has its gradients ready: what each name is, given the engine, its
# optimizer and its largest parameter.
CONTRACT: dict[str, dict[str, Callable[[Any, Any, Any], object]]] = {
    "zero0": {
        "engine.global_steps": lambda e, o, p: e.global_steps == 1,
        "engine.global_samples": lambda e, o, p: e.global_samples == 8,
        "engine.skipped_steps": lambda e, o, p: e.skipped_steps == 0,
    },
    "zero1 dynamic_fp16": {
        "optimizer.optimizer": lambda e, o, p: isinstance(o.optimizer, torch.optim.Optimizer),
        "optimizer.loss_scaler": lambda e, o, p: hasattr(o, "loss_scaler"),
        "loss_scaler.dynamic": lambda e, o, p: o.loss_scaler.dynamic is True,
        "loss_scaler.cur_scale": lambda e, o, p: o.loss_scaler.cur_scale == o.loss_scale,
        "loss_scaler.cur_iter": lambda e, o, p: o.loss_scaler.cur_iter >= 0,
        "loss_scaler.last_overflow_iter": lambda e, o, p: o.loss_scaler.last_overflow_iter == -1,
        "loss_scaler.cur_hysteresis": lambda e, o, p: o.loss_scaler.cur_hysteresis >= 1,
        "optimizer._update_scale": lambda e, o, p: (
            "self._update_scale(self.overflow)" in inspect.getsource(type(o).step)
        ),
        "is_invalid_grad_norm": lambda e, o, p: "is_invalid_grad_norm(" in source_of(o),
        "parameter._hp_mapping": lambda e, o, p: (
            p._hp_mapping.get_hp_fragment().dtype == torch.float32
        ),
        "parameter._index_in_param_group": lambda e, o, p: (
            o.bit16_groups[p._hp_mapping.param_group_index][p._index_in_param_group].shape
            == p.shape
        ),
        "mapping.get_lp_grad_fragment": lambda e, o, p: (
            p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group).numel()
            == p._hp_mapping.hp_fragment_address.numel
        ),
        "optimizer.bit16_groups": lambda e, o, p: group_of(e, o.bit16_groups),
        "optimizer.single_partition_of_fp32_groups": lambda e, o, p: flat(
            o.single_partition_of_fp32_groups
        ),
        "optimizer.update_lp_params": lambda e, o, p: takes(o.update_lp_params),
        "optimizer._hp_optimizer_states_linked": lambda e, o, p: isinstance(
            o._hp_optimizer_states_linked, bool
        ),
        "optimizer._lazy_init_hp_params_optimizer_state": lambda e, o, p: takes(
            o._lazy_init_hp_params_optimizer_state
        ),
        "optimizer.reduction_stream": lambda e, o, p: hasattr(o, "reduction_stream"),
    },
    "zero1 bf16 fp32_sums": {
        "engine.allreduce_and_copy": lambda e, o, p: (
            takes(type(e).allreduce_and_copy, "small_bucket", "dp_group")
            and "self.allreduce_and_copy(" in inspect.getsource(type(e))
        ),
        "engine.allreduce_bucket": lambda e, o, p: (
            takes(e.allreduce_bucket, "bucket", "dp_group")
            and "numel_per_bucket" not in inspect.signature(e.allreduce_bucket).parameters
        ),
        "mapping.param_group_index": lambda e, o, p: any(
            other is p for other in o.bf16_groups[p._hp_mapping.param_group_index]
        ),
        "mapping.hp_fragment_address": lambda e, o, p: torch.equal(
            shard_of(
                o.fp32_groups_flat_partition[p._hp_mapping.param_group_index],
                p._hp_mapping.hp_fragment_address,
            ),
            p._hp_mapping.get_hp_fragment(),
        ),
        "mapping.lp_fragment_address": lambda e, o, p: torch.equal(
            shard_of(p.detach().view(-1), p._hp_mapping.lp_fragment_address),
            p._hp_mapping.get_hp_fragment().bfloat16(),
        ),
        "optimizer.bf16_groups": lambda e, o, p: group_of(e, o.bf16_groups),
        "optimizer.fp32_groups_flat_partition": lambda e, o, p: flat(o.fp32_groups_flat_partition),
        "optimizer.get_grads_for_reduction": lambda e, o, p: o.get_grads_for_reduction(),
    },
    "zero2 bf16 fp32_sums offload": {
        "optimizer._wait_for_offload_copies": lambda e, o, p: takes(o._wait_for_offload_copies),
        "optimizer.cpu_offload": lambda e, o, p: o.cpu_offload is True,
        "optimizer.averaged_gradients": lambda e, o, p: isinstance(o.averaged_gradients, dict),
    },
    "zero3": {
        "parameter.ds_id": lambda e, o, p: isinstance(p.ds_id, int),
        "parameter.ds_shape": lambda e, o, p: math.prod(p.ds_shape) == p.ds_numel,
        "parameter.ds_numel": lambda e, o, p: p.ds_numel > p.numel() == 0,
        "parameter.ds_tensor": lambda e, o, p: 2 * p.ds_tensor.numel() >= p.ds_numel,
        "ds_tensor.ds_numel": lambda e, o, p: p.ds_tensor.ds_numel == p.ds_tensor.numel(),
        "parameter.ds_persist": lambda e, o, p: p.ds_persist is False,
        "parameter.ds_process_group": lambda e, o, p: dist.get_world_size(p.ds_process_group) == 2,
        "parameter.convert_to_zero_parameters": lambda e, o, p: (
            "param_list" in inspect.signature(p.convert_to_zero_parameters).parameters
        ),
        "parameter._z3_optimizer": lambda e, o, p: p._z3_optimizer is o,
        "optimizer._get_param_partition_rank": lambda e, o, p: (
            o._get_param_partition_rank(p) == dist.get_rank()
        ),
        "optimizer.get_param_id": lambda e, o, p: o.get_param_id(p) in o.grad_position,
        "optimizer.grad_position": lambda e, o, p: (
            [*map(type, o.grad_position[o.get_param_id(p)])] == [int, int, int]
        ),
        "optimizer.fp32_partitioned_groups_flat": lambda e, o, p: flat(
            o.fp32_partitioned_groups_flat
        ),
        "optimizer.fp16_partitioned_groups_flat": lambda e, o, p: (
            [t.shape for t in o.fp16_partitioned_groups_flat]
            == [t.shape for t in o.fp32_partitioned_groups_flat]
        ),
        "optimizer.fp16_partitioned_groups": lambda e, o, p: (
            sum(p.numel() for group in o.fp16_partitioned_groups for p in group)
            == sum(t.numel() for t in o.fp16_partitioned_groups_flat)
        ),
        "optimizer.unflatten": lambda e, o, p: (
            len(o.unflatten(o.fp16_partitioned_groups_flat[0], o.fp16_partitioned_groups[0]))
            == len(o.fp16_partitioned_groups[0])
        ),
        "optimizer.persistent_parameters": lambda e, o, p: [*o.persistent_parameters] == [],
        "optimizer.checkpoint_event_epilogue": lambda e, o, p: takes(o.checkpoint_event_epilogue),
        "optimizer._get_fp32_grad_state_partition": lambda e, o, p: (
            o._get_fp32_grad_state_partition(p, release_swap_buffers=True)[0].shape
            == p.ds_tensor.shape
        ),
        "optimizer.reduce_and_partition_stream": lambda e, o, p: hasattr(
            o, "reduce_and_partition_stream"
        ),
        "optimizer.parameter_offload": lambda e, o, p: (
            type(o.parameter_offload).__name__ == "DeepSpeedZeRoOffload"
        ),
        "parameter_offload._DeepSpeedZeRoOffload__allgather_stream": lambda e, o, p: (
            "_DeepSpeedZeRoOffload__allgather_stream" in vars(o.parameter_offload)
        ),
        # states on NVMe
        "optimizer.swap_optimizer": lambda e, o, p: o.swap_optimizer is False,
        "optimizer._swappable_optimizer_subgroup": lambda e, o, p: (
            o._swappable_optimizer_subgroup(0) is False
        ),
        "optimizer.fp16_partitioned_groups_flat_numel": lambda e, o, p: (
            o.fp16_partitioned_groups_flat_numel
            == [t.numel() for t in o.fp32_partitioned_groups_flat]
        ),
        "optimizer.optimizer_swapper": lambda e, o, p: defines(_WRAPPER, "optimizer_swapper"),
        "swapper._get_param_swap_info": lambda e, o, p: defines(_SWAPPER, "_get_param_swap_info"),
        "swapper._io_aligned_numel": lambda e, o, p: defines(_SWAPPER, "_io_aligned_numel"),
        "swapper.swap_element_size": lambda e, o, p: defines(_SWAPPER, "swap_element_size"),
        "info.tensors": lambda e, o, p: defines(_SWAPPED, "tensors"),
        "info.get_swap_paths": lambda e, o, p: defines(_SWAPPED, "get_swap_paths"),
        "info.release_memory": lambda e, o, p: defines(_SWAPPED, "release_memory"),
        "swapped.compute_tensor": lambda e, o, p: defines(_FILE, "compute_tensor"),
        "swapped.swap_path": lambda e, o, p: defines(_FILE, "swap_path"),
    },
    "zero3 bf16 fp32_sums hpz": {
        "parameter.ds_secondary_tensor": lambda e, o, p: p.ds_secondary_tensor is not None
    },
    "zero1 pipeline2": {
        "parameter.ds_pipe_replicated": lambda e, o, p: "ds_pipe_replicated" in source_of(o),
        "parameter.model_parallel": lambda e, o, p: (
            "model_parallel" in inspect.getsource(pkgutil.resolve_name("deepspeed.runtime.utils"))
        ),
        "optimizer.scaled_global_norm": lambda e, o, p: takes(type(o).scaled_global_norm),
        "optimizer._model_parallel_all_reduce": lambda e, o, p: takes(
            o._model_parallel_all_reduce, "tensor", "op"
        ),
        "engine._train_schedule": lambda e, o, p: [*e._train_schedule()],
        "engine._inference_schedule": lambda e, o, p: [*e._inference_schedule(3)],
        "engine._exec_schedule": lambda e, o, p: takes(e._exec_schedule, "pipe_schedule"),
        "engine._exec_optimizer_step": lambda e, o, p: takes(e._exec_optimizer_step),
        "engine.reset_activation_shape": lambda e, o, p: takes(e.reset_activation_shape),
        "engine.set_dataiterator": lambda e, o, p: takes(e.set_dataiterator, "iterator"),
        "engine.total_loss": lambda e, o, p: "total_loss" in vars(e),
        "engine._compute_loss": lambda e, o, p: e._compute_loss is True,
        "engine.loss": lambda e, o, p: "loss" in vars(e),
        "engine.pipe_buffers": lambda e, o, p: isinstance(e.pipe_buffers["outputs"], list),
        "engine.mpu": lambda e, o, p: e.mpu is not None,
        **{
            f"mpu.get_{axis}_parallel_group": lambda e, o, p, axis=axis, ranks=ranks: (
                dist.get_world_size(getattr(e.mpu, f"get_{axis}_parallel_group")()) == ranks
            )
            for axis, ranks in (("pipe", 2), ("data", 1), ("model", 2), ("slice", 1))
        },
        **{
            f"PipelineModule.{name}": lambda e, o, p, name=name: (
                f"self.{name}()" in inspect.getsource(type(e.module).__mro__[1])
            )
            for name in ("_index_tied_modules", "_synchronize_tied_weights")
        },
    },
}
LIBRARY = REPOSITORY / "harness"
ROOM = LIBRARY / "engine" / "deepspeed_0_19"
NAMES = {name.rpartition(".")[2] for checks in CONTRACT.values() for name in checks}
# Names in the contract that other objects also use.
ORDINARY = {"optimizer", "loss", "tensors", "dynamic", "model_parallel", "skipped_steps"}
# Documented, or from torch and Python: `internals.py` may use these without a contract.
PUBLIC = {
    *("module", "parameters", "state", "requires_grad", "shape", "data", "numel", "view", "narrow"),
    *("start", "group", "update", "truncate", "open", "partition", "get_rank", "ProcessGroup"),
    *("Parameter", "Tensor", "zeros", "copy_", "clone"),
}
READERS = {"getattr", "hasattr", "setattr"}
# Private names of torch that are read elsewhere.
OF_TORCH = {
    "_get_default_store",
    "_buffers",
    "_non_persistent_buffers_set",
    "_C",
    "_accelerator_setAllocatorSettings",
}


@pytest.mark.slow("the first engine on two ranks imports everything")
@pytest.mark.parametrize("layout", cells(CONTRACT, ("zero1 dynamic_fp16", "zero3")))
@ranks(2)
def test_private_deepspeed_names_keep_their_contracts(layout: str) -> None:
    """Check the names read from the engine of a layout that has its gradients ready."""
    engine = engine_of(layout)
    engine.train_batch(*share_of(engine), 1e-3)
    engine.accumulate(*share_of(engine))
    problems = {}
    inner = engine.engine
    for name, expected in CONTRACT[layout].items():
        try:
            if not expected(inner, inner.optimizer, parameter(inner)):
                problems[name] = "is not what it was"
        except Exception:
            problems[name] = traceback.format_exc()
    assert problems == {}, "\n".join(f"{name}: {why}" for name, why in problems.items())


def attributes(path: Path) -> Iterator[tuple[int, ast.expr | None, str]]:
    """Yield (line, owner, name) of each attribute in a file, including those read by `getattr`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in READERS:
            for argument in node.args[1:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, None, argument.value


def private_reads(library: Path) -> list[str]:
    """Return `path:line: name` of each private name read outside the DeepSpeed package."""
    problems = []
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library)
        if ROOM.name in place.parts:
            continue
        for line, owner, name in attributes(path):
            own = owner is not None and ast.unparse(owner) in ("self", "cls", "super()")
            private = name.startswith("_") and not name.startswith("__") and name not in OF_TORCH
            if name in NAMES - ORDINARY or (place.parts[0] == "engine" and private and not own):
                problems.append(f"{place}:{line}: {name}")
    return problems


def test_private_names_are_read_in_one_room() -> None:
    assert private_reads(LIBRARY) == []


@pytest.mark.parametrize(
    "code",
    [
        "x = p._hp_mapping",
        "x = hasattr(p, 'ds_id')",
        "x = engine.optimizer.fp32_partitioned_groups_flat",
        "engine._anything()",
    ],
)
def test_a_planted_private_read_is_caught(tmp_path: Path, code: str) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "new.py").write_text(code)
    assert len(private_reads(tmp_path)) == 1


def test_every_name_that_is_read_has_a_contract() -> None:
    read = {name for _, _, name in attributes(ROOM / "internals.py")}
    assert sorted(read - NAMES - PUBLIC) == []
