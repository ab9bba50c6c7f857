"""The attention of a run: choice, comparison at the start, and metrics by layer.

The comparison sends two batches of documents through a small model with the run's head width, ratio
of heads to key heads, and precision. Both implementations are compared with the model in fp32. The
error of the chosen one may be at most a few times that of the one with a mask.
"""

import contextlib
import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from harness.checkpoint.collectives import first_problem
from harness.config.ds_json import Event
from harness.config.own import ROWS
from harness.data.batch import Batch, on_device
from harness.engine.api import Engine
from harness.errors import ConfigError
from harness.layout.attention_table import ATTENTIONS
from harness.layout.families import Family, default_kv_heads, family_of
from harness.models.attention import register_own
from harness.models.attention_sums import AttentionSums
from harness.models.initialize import materialize
from harness.models.skeleton import DTYPES, hf_config, skeleton
from harness.plan.attention import AttentionNeeds
from harness.plan.make import with_facts
from harness.plan.plan import Plan
from harness.run.instrument import Instrument
from harness.run.run import Run
from harness.steps import Step

MEASURED_SAMPLES = 4


class AttentionMetrics(Instrument):
    """Entropy and coverage of each layer's attention, at the lines of log.attention_every."""

    _is_seen = True  # until it could not be inspected

    def line(self, step: Step) -> dict[str, float]:
        """Return attention_entropy/LAYER and attention_coverage/LAYER, with LAYER from 0; empty,
        with an event, if this attention cannot be inspected. Collective; waits for the device.

        Computed on a few held-out samples: it costs at most the forward pass of one step.
        """
        run, log = self._run, self._run.plan.config.log
        if not (self._is_seen and log.is_due(step.number, log.attention_every)):
            return {}
        run.pulse("evaluation", step.number)
        rows, why = list[list[float]](), "rows are split over sequence-parallel ranks"
        if run.plan.grid.sequence == 1:
            rows = _sums(run).tolist()
            why = f"{type(run.engine.module).__name__} has an attention that cannot be inspected"
        run.meter.restart()
        seen = {layer: row for layer, row in enumerate(rows) if row[2]}  # layers with attention
        if not seen or any(math.isnan(value) for row in rows for value in row):
            self._is_seen = False
            message = f"no attention_* metrics: {why}"
            run.event("attention_unseen", step=step.number, message=message)
            return {}
        return {
            f"attention_{name}/{layer}": row[number] / row[2]
            for number, name in enumerate(("entropy", "coverage"))
            for layer, row in seen.items()
        }


def _sums(run: Run) -> torch.Tensor:
    plan, stream = run.plan, run.data.held_out
    samples = min(MEASURED_SAMPLES, plan.global_batch, stream.samples)
    batches = [
        (stream.batch(start, plan.micro_batch), torch.arange(start, start + plan.micro_batch))
        for start in plan.share.starts(samples, plan.micro_batch)
    ]
    return attention_sums(run.engine, [(batch, rows < samples) for batch, rows in batches])


def attention_sums(engine: Engine, batches: list[tuple[Batch, torch.Tensor]]) -> torch.Tensor:
    """Return (layers, 3): entropy, coverage, and the number of (sample, head, query) in them, over
    all ranks. `batches`: this rank's, each with a mask (micro_batch,) of counted samples.
    Collective.
    """
    layers = engine.module.config.get_text_config(decoder=True).num_hidden_layers
    total = torch.zeros(layers, 3, dtype=torch.float64, device=engine.device)
    compiled = engine.plan.config.model.compile  # run eagerly, or this would be compiled separately
    as_written = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    with as_written:
        for batch, counted in batches:
            sums = AttentionSums(layers, on_device(counted, engine.device))
            with sums.recorded():
                engine.eval_batch([batch])
            total += sums.sums
    dist.all_reduce(total)  # over heads, stages and samples
    return total


FACTOR = 5.0
"""Largest allowed distance from fp32, relative to that of the implementation with a mask."""
ROUNDING = 1e-5
"""Distance that is always allowed, relative to the norm of all gradients."""
_VOCAB_SIZE, _WINDOW, _WIDTH = 64, 8, 64
_DOCUMENTS = ((1, 11, 2, 9, 25), (23, 7, 1, 17))  # lengths in tokens, 48 per row


class Different(ValueError):
    """Raised for an implementation with different results."""


def compare(plan: Plan, attention: str, masked: str, device: torch.device) -> None:
    """Raise Different if the losses or gradients of `attention` differ from those of `masked`."""
    config, dtype = small_config(plan.model_config), DTYPES[plan.precision]
    batch = _batch()
    reference = _measured(config, torch.float32, masked, batch, device, dtype)
    own = _measured(config, dtype, masked, batch, device, dtype)
    other = _measured(config, dtype, attention, batch, device, dtype)
    gradients = [value for name, value in reference.items() if name != "losses"]
    least = ROUNDING * torch.stack([g.norm() for g in gradients]).norm()
    for name, exact in reference.items():
        limit = FACTOR * (own[name] - exact).norm() + least
        apart = (other[name] - exact).norm()
        if not apart <= limit:  # nor NaN
            what = "token losses" if name == "losses" else f"gradient of {name}"
            raise Different(
                f"in a small model of this architecture the {what} differs by {float(apart):.3g}, "
                f"but rounding explains only {float(limit):.3g}"
            )


def small_config(model_config: dict[str, Any]) -> dict[str, Any]:
    """Return a small config with each kind of layer, few heads, short windows, no router loss."""
    family = family_of(model_config["model_type"])
    small = {**model_config, **_sizes(family, model_config)}
    kinds = [*dict.fromkeys(model_config.get("layer_types") or ())]
    changed: dict[str, Any] = {
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
        "layer_types": kinds * 2 if len(kinds) == 1 else kinds or None,
        "max_window_layers": 1,
        "sliding_window": _WINDOW,
        "attention_chunk_size": _WINDOW,
        "output_router_logits": False,
    }
    # Keys that are missing or null have a meaning, so they are not set.
    return small | {k: v for k, v in changed.items() if model_config.get(k) is not None}


def _sizes(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """Return sizes that keep the head width and the ratio of heads to key heads."""

    def size(kind: str) -> int | None:
        keys = family.size_keys(kind)
        return next((config[key] for key in keys if isinstance(config.get(key), int)), None)

    heads, hidden = size("heads") or 1, size("hidden") or 1
    default = default_kv_heads(config, family)
    kv_heads = size("kv_heads") or default or heads
    few = min(kv_heads, 2)
    kinds = len({*(config.get("layer_types") or ())})
    sizes = {
        "hidden": hidden // heads * (heads // kv_heads * few),
        "heads": heads // kv_heads * few,
        "kv_heads": few,
        "layers": max(2, kinds),
        "width": _WIDTH,
        "experts": 2,
    }
    small = {key: n for kind, n in sizes.items() for key in family.size_keys(kind) if key in config}
    if default:
        small[family.size_keys("kv_heads")[0]] = few
    more = {"vocab_size": _VOCAB_SIZE, "num_experts_per_tok": 2, "moe_intermediate_size": _WIDTH}
    return small | {key: n for key, n in more.items() if key in config}


def _batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    positions = torch.stack(
        [torch.cat([torch.arange(n) for n in lengths]) for lengths in _DOCUMENTS]
    )
    ids = torch.randint(0, _VOCAB_SIZE, (2, *positions.shape), generator=generator)
    return Batch(ids[0], ids[1], positions)


def _measured(
    config: dict[str, Any],
    dtype: torch.dtype,
    attention: str,
    batch: Batch,
    device: torch.device,
    rounded: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return each token's loss and all gradients, with weights rounded to dtype `rounded`."""
    model = skeleton(hf_config(config), dtype, attention)
    materialize(model, 0, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(rounded))
    ids, labels, positions = batch.on(device)
    keywords = batch.keywords(attention, device)
    outputs = model.eval()(input_ids=ids, position_ids=positions, use_cache=False, **keywords)
    losses = functional.cross_entropy(
        outputs.logits.float().flatten(0, 1), labels.flatten(), reduction="none"
    )
    losses.mean().backward()
    measured = {"losses": losses.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            measured[name] = parameter.grad.float()
    return measured


def verify_attention(plan: Plan, device: torch.device) -> tuple[Plan, list[Event]]:
    """Return the plan with the attention that works on this device, and events. Collective.

    Raises ConfigError if the implementation that the user chose differs from the one with a mask.
    """
    options, attention = AttentionNeeds.by(plan), plan.config.model.attention
    kind, own = ATTENTIONS[attention], ROWS.get(("attention", attention))
    if not (kind.is_exact and (kind.takes_bounds or own)):
        return plan, []
    different, unknown = None, None
    register_own(attention, plan.config.own.given)
    try:
        compare(plan, attention, options.masked, device)
    except Different as error:
        different = str(error)
    except Exception as error:  # any error of transformers or a kernel
        unknown = f"{type(error).__name__}: {error}"
        if own:
            different = str(own.failed(error))
    different, unknown = first_problem(different), first_problem(unknown)
    problem = different or unknown
    if problem is None:
        return plan, []
    why = f"{attention} did not match {options.masked} on this device: {problem}"
    if plan.attention_why:  # the user left it open
        plan = with_facts(plan, replace(plan.facts, attention=(options.masked, why)))
        return plan, [attention_event(plan, "fallback")]
    if different:
        use = "declare it with exact=False, or " * (own is not None)
        use += f"use {options.masked}, or auto"
        raise ConfigError(f"model.attention={attention}: {why}; {use}")
    return plan, [{"kind": "not_compared", "message": f"{attention}: {unknown}"}]


def attention_event(plan: Plan, kind: str = "attention") -> Event:
    """Return the event for a choice of attention."""
    chosen = plan.config.model.attention
    return {"kind": kind, "message": f"model.attention={chosen}: {plan.attention_why}"}
