"""The Plan as text."""

from collections.abc import Mapping
from typing import Any

from harness.config.ds_json import Event, offloaded_to
from harness.estimate.fit import changes_that_help, memory_line
from harness.layout.adapters import linear_weights
from harness.layout.attention_table import WITHOUT_ATTENTION
from harness.layout.optimizer_table import is_frozen
from harness.layout.shape import Shape, num_parameters, parameters_by_kind
from harness.layout.stages import bubble, layers_per_stage
from harness.plan.batches import length_events, length_text, open_keys, repetition_events, steps_of
from harness.plan.duration import step_time, time_line
from harness.plan.fine_tuning import is_pretrained
from harness.plan.make import takes
from harness.plan.plan import Counts, Plan

_LABEL_WIDTH = 15


def summary(plan: Plan, counts: Counts | None = None) -> str:
    """Return model, layout, batch, length, learning rate and notes, one per line."""
    steps = plan.steps if counts is None else steps_of(plan, counts)
    step = step_time(plan)
    rows = [
        ("model", _model(plan)),
        ("parameters", _parameters(plan)),
        ("layout", spread(plan)),
        ("attention", _attention(plan)),
        ("stages", _stages(plan)),
        ("batch", _batch(plan)),
        ("ramp", _ramp(plan)),
        ("length", length_text(plan, steps, counts)),
        ("optimizer", _optimizer(plan)),
        ("learning rate", _rates(plan, steps)),
        ("own code", plan.code and f"{plan.code['file']}: {', '.join(plan.code['adds'])}"),
        ("memory", _memory(plan)),
        ("time", "" if step is None else time_line(plan, step)),
        *(("note", _note(event)) for event in _events(plan, counts)),
    ]
    return "\n".join(row(label, text) for label, text in rows if text)


def settled(plan: Plan, counts: Counts, before: Plan) -> str:
    """Return the lines of a summary that change or become known once the data is counted."""
    is_new, steps = plan.global_batch != before.global_batch, steps_of(plan, counts)
    rows = [("batch", _batch(plan))] * is_new
    rows.append(("length", length_text(plan, steps, counts)))
    rows += [("learning rate", _rates(plan, steps))] * (plan.steps is None)
    rows += [("memory", _memory(plan))] * is_new
    shown = _events(before, None)
    rows += [("note", _note(event)) for event in _events(plan, counts) if event not in shown]
    return "\n".join(row(label, text) for label, text in rows)


def _events(plan: Plan, counts: Counts | None) -> list[Event]:
    """Return the events of a plan, including those that follow from counted data."""
    if counts is None:
        return [*plan.events]
    steps = steps_of(plan, counts)
    more = length_events(plan.config, steps) if plan.steps is None else []
    return [*plan.events, *more, *repetition_events(plan, steps, counts)]


def _memory(plan: Plan) -> str:
    return memory_line(plan.estimate) if plan.estimate else "not estimated"


def row(label: str, text: str) -> str:
    """Return one line of a summary."""
    return f"{label:<{_LABEL_WIDTH}}{text}"


def _model(plan: Plan) -> str:
    kind = plan.model_config["model_type"]
    source = plan.config.model.init_from
    start = "pretrained weights" if is_pretrained(plan.config) else "random weights"
    start = f"weights from {source}" if source else start
    return f"{kind} ({plan.model_source}), {start}"


def _parameters(plan: Plan) -> str:
    shape = plan.shape or (plan.estimate.inputs.shape if plan.estimate else None)
    if shape is None:
        return "not counted: the planner does not know this architecture"
    kinds = parameters_by_kind(shape)
    parts = ", ".join(f"{kind} {count:,}" for kind, count in kinds.items())
    traced = "" if plan.shape else "; traced from its class"
    return f"{num_parameters(shape):,} ({parts}){_trained(plan, shape)}{traced}"


def _trained(plan: Plan, shape: Shape) -> str:
    """Return the number of trained parameters as text, if some are frozen."""
    total, adapters = num_parameters(shape), plan.config.model.lora.adapters
    if adapters is not None:
        whole = sum(tensor.numel for tensor in adapters.trained_whole(shape))
        count = sum(tensor.numel for tensor in adapters.tensors(shape)) - whole
        own = f"adapters of rank {adapters.rank}: {count:,}, {count / total:.2%}"
        rest = f"{whole:,} trained in full, the others frozen" if whole else "all frozen"
        if kind := adapters.quantization:
            few = sum(tensor.numel for tensor in linear_weights(shape))
            scales = ", scales in 8" if kind.doubles else ""
            rest += f", {few:,} of them in 4 bits ({kind.kind}{scales})"
        return f", {rest}; {own}"
    rules = plan.config.optim.groups
    frozen = sum(tensor.numel for tensor in shape.tensors() if is_frozen(tensor.name, rules))
    return f"; {frozen:,} are frozen, {frozen / total:.1%}" if frozen else ""


def spread(plan: Plan) -> str:
    """Return the distribution over ranks and memory, on one line."""
    grid, device = plan.grid, plan.world.gpu or plan.world.accelerator
    sizes = {"pipeline": grid.pipeline, "sequence": grid.sequence, "tensor": grid.tensor}
    axes = [f"{grid.data} data", *(f"{n} {axis}" for axis, n in sizes.items() if n > 1)]
    axes[-1] += " with divided residuals" * plan.divides_residuals  # tensor is the last
    offloaded = [
        f"{part} on {place}"
        for part in ("optimizer", "param")
        if (place := offloaded_to(plan.deepspeed, part)) != "none"
    ]
    ranks = f"{grid.world_size} rank{'s' if grid.world_size > 1 else ''}"
    shared = f" (up to {sharing} ranks each)" if (sharing := plan.world.ranks_per_gpu) > 1 else ""
    products = f" with products in {plan.products}" * (plan.products != plan.precision)
    stage = f"ZeRO {plan.zero_stage}, {plan.precision}{products}"
    experts = f", experts over {grid.expert} neighbours" if grid.expert > 1 else ""
    return (
        f"{stage}, {ranks} ({' x '.join(axes)}{experts}) on "
        f"{device}{shared}, offload: {', '.join(offloaded) or 'none'}, {_layers(plan)}"
    )


def _layers(plan: Plan) -> str:
    """Return how layers and the loss are computed."""
    model, way = plan.config.model, plan.checkpointing
    every = f"every {way} layers" if isinstance(way, int) else way
    parts = {
        f"activation checkpointing: {every}": True,
        "to host memory": model.activation_offload,
        f"MLPs in {model.mlp_tiles} tiles": model.mlp_tiles > 1,
        f"loss in chunks of {plan.loss_chunk:,} logits": plan.loss_chunk,
        f"kernels: {model.kernels}": model.kernels != "none",
        "decoder layers compiled": model.compile,
    }
    return ", ".join(text for text, is_so in parts.items() if is_so)


def _attention(plan: Plan) -> str:
    if plan.model_config.get("model_type") in WITHOUT_ATTENTION:
        return ""
    sizes = ", ".join(f"{name} {size}" for name, size in plan.config.model.attention_sizes.items())
    why = f" ({plan.attention_why or sizes})" if plan.attention_why or sizes else ""
    return f"{plan.config.model.attention}{why}"


def _stages(plan: Plan) -> str:
    if plan.stages is None:
        return ""
    layers = ", ".join(map(str, layers_per_stage(plan.stages)))
    share = bubble(plan.grid.pipeline, plan.grad_accum)
    return f"{layers} decoder layers; each waits {share:.0%} of a step (the bubble)"


def _batch(plan: Plan) -> str:
    default = ""
    if "train.global_batch" in open_keys(plan.config):
        default = "; fewer if the data is small, as reported once it is counted"
    return (
        f"{rows_of_a_step(plan, plan.global_batch)} per step = micro-batch {plan.micro_batch} x "
        f"{plan.grad_accum} accumulated x {plan.grid.data} data ranks, {_lengths(plan)}{default}"
    )


def rows_of_a_step(plan: Plan, number: int) -> str:
    """Return a number of a step's rows as text: windows of packed tokens, or examples."""
    noun = "window" if plan.config.data.batching == "packed" else "example"
    return f"{number} {noun}{'s' * (number != 1)}"


def _lengths(plan: Plan) -> str:
    """Return the length of a step's rows."""
    data = plan.config.data
    if data.batching == "packed":
        return f"{data.seq_len} tokens each"
    each = f"each one document of at most {data.seq_len} tokens"
    if data.batching == "token_budget":
        positions = plan.micro_batch * data.seq_len
        return f"{each}; a micro-batch holds as many as fit in {positions:,} positions"
    how = f"sorted in pools of {data.pool_samples}"
    if data.batching == "padded":
        how = "in random order"
    return f"{each}, {how}, padded to the longest of their micro-batch"


def _ramp(plan: Plan) -> str:
    ramp, seq_len, rises = plan.config.ramp, plan.seq_len, []
    if ramp.batch_from is not None:
        rises.append(
            f"from {rows_of_a_step(plan, ramp.batch_from)} per step by "
            f"{ramp.batch_step or ramp.batch_from} to {plan.global_batch} over "
            f"{ramp.batch_tokens:,} tokens"
        )
    if ramp.length_from is not None:
        rises.append(
            f"from sequences of {ramp.length_from} tokens, doubling, to {seq_len} over "
            f"{ramp.length_tokens:,} tokens"
        )
    return "; ".join(rises)


def _optimizer(plan: Plan) -> str:
    optim = plan.config.optim
    params = plan.deepspeed["optimizer"]["params"]
    how = ("lr", "torch_adam", "fused")  # printed elsewhere, or without effect
    values = ", ".join(f"{key} {value}" for key, value in params.items() if key not in how)
    clipping = f"gradient norm clipped at {optim.clip_norm:g}" if optim.clip_norm else "no clipping"
    if optim.clip_value is not None:
        clipping = f"gradient elements clipped at {optim.clip_value:g}"
    rules = "".join(f"; {rule.pattern!r} otherwise" for rule in optim.groups)
    if optim.adam_lr is not None:
        rules += f"; {optim.adam_lr:g} is adamw's peak rate, for what muon does not update"
    return f"{optim.name} ({values}), {clipping}{rules}"


def _rates(plan: Plan, steps: int | None) -> str:
    optim = plan.config.optim
    if not steps:
        warmup = f"{optim.warmup_steps} steps"
        if optim.warmup_ratio is not None:
            warmup = f"{optim.warmup_ratio:.3g} of all steps"
        return f"{optim.schedule}, at most {optim.lr:g} after a warm-up of {warmup}"
    schedule = plan.schedule(steps)
    marks = sorted({1, min(max(schedule.warmup, 1), steps), steps})
    rates = ", ".join(f"{schedule.lr(step):g} at step {step:,}" for step in marks)
    return f"{optim.schedule}: {rates}"


def verdict(plan: Plan) -> str:
    """Return whether the GPUs can hold the run, and what would help."""
    estimate = plan.estimate
    if estimate is None:
        return "not estimated"
    if estimate.verdict.startswith("fits"):
        return estimate.verdict
    return f"{estimate.verdict}: {changes_that_help(estimate, estimate.device_bytes, takes(plan))}"


def _note(event: Mapping[str, Any]) -> str:
    if "message" in event:
        return str(event["message"])
    if event["kind"] == "adopted":
        return f"{event['key']} = {event['value']!r}, from the JSON's {event['json_key']}"
    return str(event)
