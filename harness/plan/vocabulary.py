"""The vocabulary of a plan: rows for new tokens, and what one costs that ranks cannot divide."""

from __future__ import annotations

import json
from dataclasses import replace

from harness.config.ds_json import Event
from harness.config.run_config import RunConfig, run_and_step
from harness.errors import ConfigError
from harness.estimate.timeline import estimate_memory
from harness.estimate.units import GIB
from harness.layout.adapters import module_of
from harness.layout.division import divides_vocabulary, tensor_shard
from harness.layout.shape import Shape, num_parameters
from harness.plan.memory import estimate
from harness.plan.plan import Plan
from harness.plan.tensor import padded, whole_vocabulary
from harness.plan.weights import has_checkpoints

WHOLE = "whole_vocabulary"


def with_rows_for(plan: Plan, ids: int) -> Plan:
    """Return the plan of a run whose tokenizer has `ids` ids: given weights get rows for those that
    they lack, with an event.
    """
    rows = plan.model_config.get("vocab_size")
    if plan.config.model.init_from is None or not isinstance(rows, int) or ids <= rows:
        return plan
    config = {**plan.model_config, "vocab_size": ids}
    shape = None if plan.shape is None else Shape.from_hf(config)
    before = [event for event in plan.events if event["kind"] != WHOLE]
    events = (*before, new_rows_event(plan.config, shape, rows, ids))
    grown = replace(plan, model_config=config, shape=shape, events=events)
    return note_whole_vocabulary(replace(grown, estimate=estimate(grown)))


def new_rows_event(run: RunConfig, shape: Shape | None, before: int, now: int) -> Event:
    """Return the event that given weights of a `shape`, where it is known, get rows. Raises
    ConfigError for the checkpoints of a run, which are read as they are.
    """
    source = run.model.init_from or ""
    if has_checkpoints(source):
        raise ConfigError(
            f"model.init_from is {source!r} ({run.origin('model.init_from')}), whose checkpoints "
            f"have {before:,} rows of the vocabulary, and {now:,} are needed: set "
            f"model.init_from={run_and_step(source)[0]}/export"
        )
    tensors = [] if shape is None else [*shape.tensors()]
    lora = run.model.lora
    message = (
        f"the vocabulary grows from {before:,} to {now:,} rows; each new row is the mean of the "
        "existing ones"
    )
    if lora.rank is not None and lora.modules_to_save:
        message += f"; {', '.join(lora.modules_to_save)} are trained (model.lora.modules_to_save)"
    elif lora.rank is not None:
        names = [module_of(t.name) for t in tensors if t.kind in ("embedding", "head")]
        named = json.dumps(names) if names else "the names of embedding and head"
        message += (
            "; with LoRA the new rows stay frozen: to train them set model.lora.modules_to_save="
            f"'{named}'"
        )
    return {"kind": "new_rows", "message": message, "before": before, "rows": now}


def note_whole_vocabulary(plan: Plan) -> Plan:
    """Return the plan with an event if embedding, head and logits stay whole on every rank."""
    shape, whole, places = plan.shape, plan.estimate, plan.grid.tensor
    if shape is None or whole is None or places == 1 or divides_vocabulary(shape, places):
        return plan
    config = {**plan.model_config, "vocab_size": padded(shape.vocab_size, places)}
    divided = replace(whole.inputs, shape=Shape.from_hf(config))
    peak = whole.worst.peak - estimate_memory(divided, whole.device_bytes).worst.peak
    more = num_parameters(tensor_shard(shape, places)) - num_parameters(
        tensor_shard(divided.shape, places)
    )
    message = (
        f"{whole_vocabulary(shape, places)}: every rank has all of embedding, head and logits, "
        f"{more:,} parameters more than if it could, and a peak that is {peak:,} bytes "
        f"({peak / GIB:.2f} GiB) higher"
    )
    event = {"kind": WHOLE, "message": message, "bytes": peak}
    return replace(plan, events=(*plan.events, event))
