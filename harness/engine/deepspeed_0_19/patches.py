"""All names of DeepSpeed and torch that the library replaces, on one screen.

When the test of a row fails after an upgrade, the row and its function can be removed. A number
refers to the defect in docs/deepspeed_findings.md, where a script demonstrates it.
"""

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Literal

from harness.engine.deepspeed_0_19 import (
    between_steps,
    builds,
    experts,
    gradients,
    pipe_module,
    process_wide,
)
from harness.errors import ConfigError

When = Literal["join", "build", "step"]


@dataclass(frozen=True)
class Joining:
    """A process that is about to join its group."""

    accelerator: str
    patience: timedelta  # timeout of every collective
    say: Callable[[str], None]  # prints a line for the user


@dataclass(frozen=True)
class Patch:
    """Replaced names, the reason, the time, the replacement and the test that it is still needed.

    "join": once per process; "build": for each engine; "step": for a single step of an engine.
    """

    names: str
    why: int | str
    when: When
    apply: Callable[..., Any]
    test: str


# fmt: off
PATCHES: tuple[Patch, ...] = (
    Patch("torch.utils.cpp_extension.load FileBaton", 10, "join",
          lambda joining: builds.watch_builds(joining.say),
          "test_op_build_is_taken_over_from_a_killed_builder"),
    Patch("deepspeed.comm.torch.build_shm_op", 8, "join",
          lambda _: process_wide.without_shared_memory(),
          "test_deepspeed_builds_shared_memory_op_on_join_ours_does_not"),
    Patch("torch.distributed.distributed_c10d._get_default_timeout",
          "a new group has torch's default of 10 minutes, whatever the first group has", "join",
          lambda joining: process_wide.wait_in_every_group(joining.patience),
          "test_a_new_group_of_torch_has_its_own_timeout"),
    Patch("deepspeed.accelerator.get_accelerator().is_fp16_supported",
          "fp16 is rejected on CPUs, although torch supports it", "join",
          lambda joining: process_wide.allow_fp16_on_any_cpu(joining.accelerator),
          "test_deepspeed_refuses_fp16_on_this_cpu"),
    Patch("deepspeed.runtime.zero.partitioned_param_coordinator"
          ".PartitionedParameterCoordinator._invalidate_trace", 28, "join",
          lambda _: process_wide.forget_releases_with_the_trace(),
          "test_zero_3_gathers_twice_after_early_evaluation_ours_once"),
    Patch("deepspeed.runtime.compiler.compile",
          "an import compiles Muon's functions, which are never called", "join",
          lambda _: process_wide.leave_muon_uncompiled(),
          "test_deepspeeds_muon_loads_the_compiler_and_ours_does_not"),
    Patch("deepspeed.runtime.bf16_optimizer.see_memory_usage",
          "memory reports are printed at any log level", "join",
          lambda _: process_wide.silence(),
          "test_deepspeeds_bf16_optimizer_prints_memory_reports"),
    Patch("deepspeed.runtime.bf16_optimizer.get_global_norm_of_tensors clip_tensors_by_global_norm",
          "a norm and a clip take several kernels for each tensor", "join",
          lambda _: between_steps.norms_and_clips_at_once(),
          "test_deepspeeds_step_takes_kernels_for_each_tensor_ours_few"),
    Patch("deepspeed.runtime.utils.mask_nan_or_inf_with_val_inplace",
          "it makes the host wait twice for a norm", "join",
          lambda _: between_steps.mask_without_a_wait(),
          "test_deepspeeds_step_takes_kernels_for_each_tensor_ours_few"),
    Patch("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
          "._add_to_grad_partition_buffer",
          "a gradient is copied to fp32 before it is added", "join",
          lambda _: between_steps.add_without_a_cast(),
          "test_deepspeeds_step_takes_kernels_for_each_tensor_ours_few"),
    Patch("engine.optimizer.update_hp_grads clear_hp_grads",
          "sums are zeroed twice and gradients copied and kept before they are added", "build",
          between_steps.sum_at_once,
          "test_deepspeeds_step_takes_kernels_for_each_tensor_ours_few"),
    Patch("engine.optimizer.get_grad_norm_direct check_overflow unscale_and_clip_grads",
          "norms are of fp64 copies, NaN is looked for twice, and factors of 1 are multiplied",
          "build", between_steps.take_norm_at_once,
          "test_deepspeeds_step_takes_kernels_for_each_tensor_ours_few"),
    Patch("engine.optimizer.flatten", "sums are copied for the step", "build",
          between_steps.step_where_sums_lie,
          "test_deepspeeds_step_takes_kernels_for_each_tensor_ours_few"),
    Patch("deepspeed.pipe.PipelineModule._index_tied_modules _synchronize_tied_weights",
          "tied weights are looked up by layer, but a stage here is one layer", "build",
          pipe_module.StageModule,
          "test_deepspeeds_pipeline_finds_no_tied_weights_in_a_stage"),
    Patch("sys.stdout", "PipelineModule prints at any log level", "build",
          pipe_module.printing_nothing,
          "test_deepspeeds_pipeline_prints_whatever_the_log_level"),
    Patch("engine.allreduce_and_copy", 36, "build",
          gradients.reduce_in_place,
          "test_deepspeed_packs_flat_gradients_and_ours_does_not"),
    Patch("engine.optimizer.scaled_global_norm _model_parallel_all_reduce", 38, "build",
          gradients.add_norms_over_stages_once,
          "test_zero_1_sums_norm_per_group_over_stages_and_ours_once"),
    Patch("engine._INSTRUCTION_MAP",
          "tied ends add their gradients before the data ranks, whose sums differ in their order",
          "build", gradients.average_tied_gradients_first,
          "test_deepspeed_tied_ends_drift_over_four_data_ranks"),
    Patch("parameter.model_parallel", 11, "build",
          gradients.count_every_stage,
          "test_deepspeed_clips_stage_0_by_norm_of_first_pipeline_stage"),
    Patch("deepspeed.utils.groups._EXPERT_PARALLEL_GROUP _EXPERT_DATA_PARALLEL_GROUP",
          "only experts in layers of DeepSpeed's own class are recognised", "build",
          experts.announce_experts,
          "test_deepspeed_finds_experts_only_beside_its_own_moe_class"),
    Patch("engine.optimizer.step overflow _update_scale, its module's is_invalid_grad_norm", 27,
          "step", gradients.discarding,
          "test_zero_0_in_fp32_steps_with_nan"),
)
# fmt: on


def patch_process(joining: Joining) -> None:
    """Apply all replacements that are made once per process. Call it before joining the group.

    Raises ConfigError if a newer DeepSpeed than those tested lacks a name that the library needs.
    """
    require_names(joining.say)
    for patch in PATCHES:
        if patch.when == "join":
            patch.apply(joining)


TESTED = (0, 19)
"""The newest release that passes tests/engine/deepspeed_0_19."""
_READ = (
    "deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator.is_fp16_supported",
    "deepspeed.runtime.engine.DeepSpeedEngine.allreduce_and_copy",
    "deepspeed.runtime.pipe.engine.PipelineEngine._INSTRUCTION_MAP",
    "deepspeed.runtime.pipe.engine.PipelineEngine._exec_optimizer_step",
    "deepspeed.runtime.pipe.engine.PipelineEngine._exec_schedule",
    "deepspeed.runtime.pipe.engine.PipelineEngine.reset_activation_shape",
    "deepspeed.runtime.pipe.engine.PipelineEngine.set_dataiterator",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_fp32_grad_state_partition",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_param_partition_rank",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._swappable_optimizer_subgroup",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.update_lp_params",
)
"""Names of classes that `internals.py`, `gradients.py` and the patches of objects need."""


def require_names(say: Callable[[str], None]) -> None:
    """Report through `say` that DeepSpeed is newer than the tested releases.

    Raises ConfigError if it lacks a name that the library needs.
    """
    installed = version("deepspeed")
    if tuple(map(int, installed.split(".")[:2])) <= TESTED:
        return
    tested = ".".join(map(str, TESTED))
    if missing := [name for name in (*patched_names(), *_READ) if not is_there(name)]:
        raise ConfigError(
            f"deepspeed {installed} has no {', '.join(missing[:3])}, which the harness needs: "
            f"install deepspeed {tested}"
        )
    say(f"deepspeed {installed} is newer than {tested}, the newest tested; all names are there")


def patched_names() -> Iterator[str]:
    """Yield the full names of DeepSpeed that PATCHES replaces, except those of objects."""
    for patch in PATCHES:
        first, *others = patch.names.replace(",", "").split()
        owner, _, _ = first.rpartition(".")
        if owner.startswith("deepspeed.") and "()" not in owner:
            yield first
            yield from (f"{owner}.{name}" for name in others)


def is_there(name: str) -> bool:
    """Return True if a dotted name resolves to a module, a class in it, or a member of that."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
