"""The memory estimate of a plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from harness.config.ds_keys import value_of
from harness.errors import ConfigError
from harness.estimate.dividable import division_problems
from harness.estimate.hardware import known_gpu
from harness.estimate.inputs import Inputs
from harness.estimate.layer_trace import LayerTrace
from harness.estimate.timeline import Estimate, estimate_memory
from harness.estimate.units import GIB
from harness.estimate.zero_settings import ZeroSettings
from harness.layout.carried import carried_numbers
from harness.plan.plan import Plan
from harness.plan.traced import Untraceable, traced


def estimate(plan: Plan) -> Estimate | None:
    """Return the memory estimate; None for an architecture that can be neither counted nor traced.

    Raises ConfigError for divisions over ranks that DeepSpeed does not run.
    """
    gpu = known_gpu(plan.world.gpu)
    try:
        inputs = memory_inputs(plan) or traced_inputs(plan)
    except Untraceable:
        return None
    if problems := division_problems(inputs):
        raise ConfigError(problems)
    return estimate_memory(inputs, int(gpu.memory_gib * GIB) if gpu else None)


def gathers_layers(plan: Plan) -> bool:
    """Return whether ZeRO 3 takes a decoder layer as a whole (Inputs.gathers_layers)."""
    inputs = memory_inputs(plan)
    return inputs is not None and inputs.of_stage(0).gathers_layers


def traced_inputs(plan: Plan) -> Inputs:
    """Return the inputs of an unknown architecture, from its own class. Raises Untraceable."""
    model = plan.config.model
    micro_batch, seq_len = plan.micro_batch, plan.config.data.seq_len
    trace = traced(
        {
            "config": plan.model_config,
            "source": plan.model_source,
            "precision": plan.precision,
            "attention": model.attention,
            "micro_batch": micro_batch,
            "seq_len": seq_len,
            "kernels": plan.world.kernels,
        }
    )
    inputs = memory_inputs(replace(plan, shape=trace.shape))
    assert inputs is not None, "it has a shape"
    tokens = micro_batch * seq_len
    return replace(
        inputs,
        trace=LayerTrace(
            tuple(size / tokens for size in trace.layers), trace.outside / tokens, trace.way
        ),
    )


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
        checkpointing=plan.checkpointing,
        activation_offload=run.model.activation_offload,
        mlp_tiles=run.model.mlp_tiles,
        attention=run.model.attention,
        attention_sizes=tuple(run.model.attention_sizes.items()),
        liger=run.model.kernels == "liger",
        compiled=run.model.compile,
        smooths_labels=bool(run.train.label_smoothing),
        loss_chunk=run.model.loss_chunk,
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
        carried_numbers=carried_numbers(config) if run.train.carry_state else 0,
        saves_in_background=run.save.async_,
        rounds_pinned=plan.world.rounds_pinned,
        gpus_per_node=plan.world.local_world_size,
        accelerator=plan.world.accelerator,
        gpu=gpu.key if (gpu := known_gpu(plan.world.gpu)) else None,
        expandable=plan.world.expands_segments,
        rules=tuple(plan.config.optim.groups),
        adapters=plan.config.model.lora.adapters,
        bounds=plan.stages,
        sends_parts=value_of(plan.deepspeed, "pipeline.pipe_partitioned") is True,
        parallel_residual=config.get("use_parallel_residual") is not False,
    )
