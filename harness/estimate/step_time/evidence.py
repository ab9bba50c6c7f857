"""The evidence of each term of a step: that of the rates which it rests on."""

from __future__ import annotations

from collections.abc import Iterable

from harness.estimate.inputs import Inputs
from harness.estimate.step_time.machine import Machine, RateEvidence

_STRENGTH: tuple[RateEvidence, ...] = ("measured", "fitted", "read", "guessed")
_ORDER = _STRENGTH.index
_COMPUTED = ("products", "attention", "memory_rate")
_RATES = {
    "products": ("products",),
    "attention": ("attention",),
    "elements": ("memory_rate",),
    "launches": ("launch_scale",),
    "again": _COMPUTED,
    "optimizer": ("memory_rate",),
    "bubble": _COMPUTED,
    "host": ("step_seconds",),
}
"""Rates that a term rests on, whatever the layout."""
_EXCHANGES = {"tensor", "sequence", "expert", "stages", "weights", "gradients"}


def terms_evidence(
    terms: Iterable[str], inputs: Inputs, machine: Machine
) -> dict[str, RateEvidence]:
    """Return the weakest evidence of the rates of each term, by key of step.TERMS."""
    # Of recurrent kernels no run was compared.
    guessed = {"serial", *(("elements", "again", "bubble") if has_states(inputs) else ())}
    evidence = dict(machine.rate_evidence)
    return {
        term: "guessed"
        if term in guessed
        else max((evidence.get(rate, "guessed") for rate in _rates(term, inputs)), key=_ORDER)
        for term in terms
    }


def has_states(inputs: Inputs) -> bool:
    """Return whether layers carry a state from token to token."""
    distinct = {id(layer): layer for layer in inputs.shape.body.layers}  # thousands are asked
    return any(tensor.kind == "states" for layer in distinct.values() for tensor in layer)


def _rates(term: str, inputs: Inputs) -> tuple[str, ...]:
    """Return the names of a term's rates, fields of Machine."""
    if term in _EXCHANGES:
        crosses = inputs.grid.world_size > inputs.gpus_per_node
        hosts = term in ("weights", "gradients") and _uses_host(inputs)
        return (
            "link_rate",
            *(["network_rate"] if crosses else []),
            *(["host_link_rate"] if hosts else []),
        )
    if term == "optimizer" and _uses_host(inputs):
        drives = inputs.zero.offload_optimizer == "nvme"
        return ("host_memory_rate", "host_link_rate", *(["nvme_rate"] if drives else []))
    return _RATES[term]


def _uses_host(inputs: Inputs) -> bool:
    zero = inputs.zero
    return {zero.offload_optimizer, zero.offload_param} != {"device"}
