"""The model of a plan: its config, shape and vocabulary, with their checks."""

import contextlib
import json
from dataclasses import replace
from typing import Any

from harness.config.assignments import multiples_near
from harness.config.run_config import run_and_step
from harness.errors import ConfigError
from harness.estimate.memory_item import GIB
from harness.estimate.timeline import estimate_memory
from harness.layout.adapters import module_of
from harness.layout.families import DEVIATION_KEYS, UnknownArchitecture, given_size, is_residual
from harness.layout.shape import Shape, num_parameters
from harness.layout.tensor import divides_vocabulary, keys_read, tensor_shard
from harness.plan.memory import estimate
from harness.plan.model_config import find_model_config, load_model_config
from harness.plan.optimizer import check_groups
from harness.plan.parallelism import padded, whole_vocabulary
from harness.plan.plan import Draft, Plan
from harness.plan.rotary import or_longer, positions_of
from harness.plan.weights import (
    Tensors,
    check_quantization,
    check_tensors,
    check_vocabulary,
    has_checkpoints,
    refuses_preset,
    weight_file_problems,
)


def estimated(plan: Plan) -> Plan:
    """Return the plan with its memory estimate, and with an event if embedding, head and logits are
    replicated on every rank.
    """
    plan = replace(plan, estimate=estimate(plan))
    shape, whole, places = plan.shape, plan.estimate, plan.grid.tensor
    if shape is None or whole is None or places == 1 or divides_vocabulary(shape, places):
        return plan
    config = {**plan.model_config, "vocab_size": padded(shape.vocab_size, places)}
    divided = replace(whole.inputs, shape=Shape.from_hf(config))
    peak = whole.worst.peak - estimate_memory(divided, whole.device_bytes).worst.peak
    own, fewer = (num_parameters(tensor_shard(s, places)) for s in (shape, divided.shape))
    message = (
        f"{whole_vocabulary(shape, places)}: every rank holds the full embedding, head and logits, "
        f"which adds {own - fewer:,} parameters and {peak:,} bytes ({peak / GIB:.2f} GiB) to its "
        "peak"
    )
    event = {"kind": "whole_vocabulary", "message": message, "bytes": peak}
    return replace(plan, events=(*plan.events, event))


_STORED = ("vocab_size", "quantization_config")


def find_model(draft: Draft) -> None:
    """Read the model's config, count its parameters, and check the run against both."""
    run, problems = draft.config, draft.problems
    try:
        draft.model_config, draft.model_source = load_model_config(run, draft.note)
        stored, tensors = dict[str, Any](), Tensors()
        if (source := run.model.init_from) is not None and not refuses_preset(draft):
            named = draft.model_config.get("transformers_weights")
            problems.say(*(bad_files := weight_file_problems(source, named, tensors=tensors)))
            stored, _ = find_model_config(source, run.origin("model.init_from"), "model.init_from")
            draft.stored = {key: stored[key] for key in _STORED if key in stored}
            check_quantization(draft)
            if draft.stored.get("quantization_config") or "auto_map" in stored or bad_files:
                tensors = {}  # they are stored in another form, or by another class
            check_vocabulary(draft, tensors)
        if run.model.context is not None:
            draft.note(
                "context",
                f"rotary positions extended to {run.model.context:,} by {run.model.rope} "
                "(model.context)",
            )
        _check_positions(draft)
        rows = draft.model_config.get("vocab_size")
        if source is not None and isinstance(rows, int) and rows < draft.facts.ids:
            draft.model_config = {**draft.model_config, "vocab_size": draft.facts.ids}
        _note_new_rows(draft)
        draft.shape = Shape.from_hf(draft.model_config)
        check_groups(draft)
        if source is not None and stored:
            check_tensors(draft, stored, tensors)
    except UnknownArchitecture as error:
        draft.note("unknown_architecture", str(error))
    except ConfigError as error:
        problems.say(*error.problems)
    except ValueError as error:
        problems.say(f"model.name is {run.model.name!r} ({draft.model_source}): {error}")


def check_experts(draft: Draft) -> None:
    """Reject expert widths that torch's grouped_mm does not support: rows, also as divided by
    tensor-parallel ranks, must be multiples of 16 bytes. Note a config without balancing loss.
    """
    config = draft.model_config
    if given_size(config, "experts") is None:
        return
    routers, reads = "output_router_logits", keys_read(config["model_type"]) or ()
    model = draft.config.model
    is_open = not config.get(routers) and routers not in model.overrides
    if routers in reads and is_open and draft.grid.pipeline == 1 and model.lora.rank is None:
        draft.note(
            "no_balancing_loss",
            f"no loss balances the experts, because {routers} is false in the model's config: "
            f"model.overrides.{routers}=true adds it, times router_aux_loss_coef",
        )
    multiple = 4 if draft.precision == "fp32" else 8
    inner = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    for key, least in (("hidden_size", multiple), (inner, multiple * draft.grid.tensor)):
        width = config.get(key)
        if isinstance(width, int) and width % least:
            draft.problems.say(
                f"{draft.config.model.name} has {key} {width}, but torch multiplies "
                f"{draft.precision} experts only if it is a multiple of {least}: set "
                f"model.overrides.{key} to {multiples_near(width, least)}"
            )


def check_initial_weights(draft: Draft) -> None:
    """Reject model.init and model.init_std where they have no effect, or no known meaning."""
    model, add, std = draft.config.model, draft.problems.add, "model.init_std"
    reads = keys_read(str(draft.model_config.get("model_type"))) or DEVIATION_KEYS
    has_range, given = bool({*reads} & {*DEVIATION_KEYS}), model.init_std is not None
    if given and model.init == "small":
        add(std, "but model.init=small has its own deviations", "leave it out")
    for key, is_set, needs in (
        (std, given, True),
        ("model.init", model.init != "config", model.init == "depth_scaled"),
    ):
        if is_set and model.init_from is not None:
            add(key, "but the weights come from model.init_from", "leave it out")
        elif is_set and needs and not has_range:
            add(key, f"but {model.name} has no standard deviation in its config", "leave it out")
    if model.init == "config" or not draft.model_config:
        return
    names = [tensor.name for tensor in draft.shape.tensors()] if draft.shape else []
    if not any(is_residual(name) for name in names):
        why = f"but which layers of {model.name} write to the residual stream is not known"
        add("model.init", why, "use config")


def _note_new_rows(draft: Draft) -> None:
    """Note the vocabulary rows that the run adds to pretrained weights. Raises ConfigError for a
    run's checkpoints, which are read unchanged.
    """
    before, now = draft.stored.get("vocab_size"), draft.model_config.get("vocab_size")
    if not (isinstance(before, int) and isinstance(now, int) and before < now):
        return
    run, lora = draft.config, draft.config.model.lora
    source = run.model.init_from or ""
    if has_checkpoints(source):
        raise ConfigError(
            f"model.init_from is {source!r} ({run.origin('model.init_from')}), whose checkpoints "
            f"have {before:,} vocabulary rows, but {now:,} are needed: set "
            f"model.init_from={run_and_step(source)[0]}/export"
        )
    message = (
        f"the vocabulary grows from {before:,} to {now:,} rows; each new row is the mean of the "
        "existing ones"
    )
    if lora.rank is not None and lora.modules_to_save:
        message += f"; {', '.join(lora.modules_to_save)} are trained (model.lora.modules_to_save)"
    elif lora.rank is not None:
        named = "the names of embedding and head"
        with contextlib.suppress(UnknownArchitecture):
            tensors = Shape.from_hf(draft.model_config).tensors()
            named = json.dumps(
                [module_of(t.name) for t in tensors if t.kind in ("embedding", "head")]
            )
        message += (
            "; with LoRA the new rows stay frozen: to train them set model.lora.modules_to_save="
            f"'{named}'"
        )
    draft.events.append({"kind": "new_rows", "message": message, "before": before, "rows": now})


def _check_positions(draft: Draft) -> None:
    """Reject samples longer than the model's number of positions."""
    _, limit = positions_of(draft.model_config)
    if limit and draft.config.data.seq_len > limit:
        why = f"but {draft.config.model.name} has {limit} positions"
        longer = or_longer(draft.model_config, draft.config, draft.config.data.seq_len)
        draft.problems.add("data.seq_len", why, f"set data.seq_len to {limit} or less{longer}")
