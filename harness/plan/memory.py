"""The memory estimate of a plan."""

from __future__ import annotations

from functools import partial

from harness.config.ds_keys import value_of
from harness.errors import ConfigError
from harness.estimate.dividable import division_problems
from harness.estimate.hardware import known_gpu
from harness.estimate.inputs import GIB, Inputs, ZeroSettings
from harness.estimate.timeline import Estimate, estimate_memory
from harness.plan.plan import Plan


def estimate(plan: Plan) -> Estimate | None:
    """Return the memory estimate; None for an architecture that the planner does not know.

    Raises ConfigError for divisions over ranks that DeepSpeed does not run.
    """
    inputs, gpu = memory_inputs(plan), known_gpu(plan.world.gpu)
    if inputs is None:
        return None
    if problems := division_problems(inputs):
        raise ConfigError(problems)
    return estimate_memory(inputs, int(gpu.memory_gib * GIB) if gpu else None)


def memory_inputs(plan: Plan) -> Inputs | None:
    """Return the parts of a plan that decide its memory; None for an unknown architecture."""
    if plan.shape is None:
        return None
    config, run = plan.model_config, plan.config
    return Inputs(
        shape=plan.shape,
        zero=ZeroSettings.read(partial(value_of, plan.deepspeed)),
        precision=plan.precision,
        grid=plan.grid,
        micro_batch=plan.micro_batch,
        seq_len=run.data.seq_len,
        grad_accum=plan.grad_accum,
        checkpointing=run.model.checkpointing,
        attention=run.model.attention,
        fused=run.model.compile or run.model.kernels != "none",
        document_mask=bool(run.data.document_mask),
        activation=str(config.get("activation_function") or ""),
        dropout=max(
            (
                float(value)
                for key, value in config.items()
                if key.endswith(("dropout", "pdrop", "dropout_prob"))
                and isinstance(value, int | float)
            ),
            default=0.0,
        ),
        loads_weights=run.model.init_from is not None,
        saves_in_background=run.save.async_,
        gpus_per_node=plan.world.local_world_size,
        accelerator=plan.world.accelerator,
        rules=tuple(plan.config.optim.groups),
        bounds=plan.stages,
        parallel_residual=config.get("use_parallel_residual") is not False,
    )
