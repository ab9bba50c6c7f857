"""Compares an attention implementation with the one that takes a mask, on the run's own device.

Two batches of documents through a small model of the run's architecture: its heads, key heads and
head width, in its precision, with short windows.  Both implementations are held against the same
model in fp32; the compared one may be off by a few times what rounding costs the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from harness.data.batch import Batch
from harness.layout.families import Family, family_of
from harness.models.initialize import materialize
from harness.models.skeleton import DTYPES, hf_config, skeleton
from harness.plan.plan import Plan

FACTOR = 5.0
"""Largest distance from fp32, over that of the implementation that takes a mask."""
ROUNDING = 1e-5
"""Distance that counts as none, relative to the norm of all gradients."""
_VOCAB_SIZE, _WINDOW, _WIDTH = 64, 8, 64
_DOCUMENTS = ((1, 11, 2, 9, 25), (23, 7, 1, 17))  # tokens, 48 in each row


class Different(ValueError):
    """Raised for an implementation that computes something else."""


def compare(plan: Plan, attention: str, masked: str, device: torch.device) -> None:
    """Raise Different if the losses or gradients of `attention` are not those of `masked`."""
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
                f"in a small model of this architecture the {what} is off by {float(apart):.3g}, "
                f"where rounding explains {float(limit):.3g}"
            )


def small_config(model_config: dict[str, Any]) -> dict[str, Any]:
    """Return an architecture with a layer of each kind, few heads, and no random or rare paths."""
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
    # A key that is absent or null means something, too.
    return small | {k: v for k, v in changed.items() if model_config.get(k) is not None}


def _sizes(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """Return sizes that keep the width of heads, and how many of them share a key head."""

    def size(kind: str) -> int | None:
        keys = family.size_keys(kind)
        return next((config[key] for key in keys if isinstance(config.get(key), int)), None)

    heads, hidden = size("heads") or 1, size("hidden") or 1
    kv_heads = size("kv_heads") or heads
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
    """Return the loss of each token and all gradients, of weights rounded to a type."""
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
