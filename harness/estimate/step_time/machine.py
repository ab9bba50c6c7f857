"""The machine that a step runs on: rates that its GPUs, links and hosts reach."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness.estimate.hardware import Precision, find_gpu

RateEvidence = Literal["measured", "fitted", "read", "guessed"]
_RATES = tomllib.loads(Path(__file__).with_name("rates.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU, of the links between GPUs, and of each GPU's share of the host."""

    peak_flops: float
    """Peak of dense matrix products in the model's precision, per second."""
    products: float
    """Share of the peak that large matrix products reach."""
    attention: float
    """Share of the peak that fused attention reaches."""
    memory_rate: float
    """Bytes of GPU memory per second that elementwise operations read and write."""
    multiprocessors: int
    link_rate: float
    """Bytes per second that a collective moves between GPUs of a node, in one direction."""
    network_rate: float
    """Bytes per second of a node's network per GPU, in one direction."""
    watts: float
    gpus_per_node: int
    evidence: RateEvidence
    rate_evidence: tuple[tuple[str, RateEvidence], ...] = ()
    """Evidence for rates, by field name; any other rate is guessed."""
    link_latency: float = 2e-6
    """Seconds of one step of a collective within a node."""
    network_latency: float = 8e-6
    """Seconds of one step of a collective between nodes."""
    host_memory_rate: float = 20e9
    """Bytes of host memory per second and GPU; the GPUs of a node share it."""
    host_link_rate: float = 20e9
    """Bytes per second between a GPU and its host: PCIe 4.0 x16 reaches 20 of its 32 GB/s."""
    pinned_rate: float = 20e9
    """Bytes per second of a tensor's copy to or from pinned memory of the host; DeepSpeed's offload
    stays at `host_link_rate` on PCIe 5.0, too."""
    nvme_rate: float = 2e9
    """Bytes per second and GPU to or from a node's drives."""
    launch_scale: float = 1.0
    """Host time to launch a layer's kernels, relative to a typical host."""
    step_seconds: float = 0.0
    """Host seconds per step, for any layout."""
    gathered_layer_seconds: float = 0.0
    """Host seconds per layer that ZeRO 3 gathers or reduces."""
    partial_wave: float = 1.0
    """Cost of the empty part of a product's last wave, relative to a full one."""
    flash_attention_3: float = 1.0
    """Speed of flash-attn 3 and later, relative to `attention`."""
    sdpa: float = 1.0
    """Speed of the kernel that torch picks for sdpa without a mask, relative to `attention`."""
    kernel_seconds: float = 0.0
    """Seconds of an empty kernel."""
    is_asynchronous: bool = True
    """True if the device computes while the host continues and collectives run."""


def machine_of(
    gpu: str, gpus_per_node: int, precision: Precision, network_gb_per_s: float | None = None
) -> Machine:
    """Return a machine with GPUs by name. Raises ValueError for an unknown GPU.

    `network_gb_per_s`: one GPU's share of its node's network, 10**9 bytes per second, one
    direction.
    """
    device = find_gpu(gpu)
    rates = rates_of(device.key)
    link = device.link_gb_per_s / 2 * rates["links"]
    network = rates["network_gb_per_s"] if network_gb_per_s is None else network_gb_per_s
    return Machine(
        peak_flops=device.peak_tflops(precision) * 1e12,
        products=rates["products"],
        attention=rates["attention"],
        memory_rate=rates["hbm_gb_per_s"] * rates["streaming"] * 1e9,
        multiprocessors=rates["multiprocessors"],
        link_rate=link * 1e9,
        network_rate=network * NETWORK_REACHED * 1e9,
        watts=rates["watts"],
        gpus_per_node=gpus_per_node,
        evidence=rates["evidence"],
        host_memory_rate=HOST_MEMORY_RATE / gpus_per_node,
        pinned_rate=rates["pinned_gb_per_s"] * 1e9,
        rate_evidence=tuple((name, rates["evidence"]) for name in _LISTED),
        partial_wave=rates["partial_wave"],
        flash_attention_3=rates["flash_attention_3"],
        sdpa=rates["sdpa"],
        kernel_seconds=rates["kernel_microseconds"] * 1e-6,
    )


def measured(machine: Machine, rates: Mapping[str, Any]) -> Machine:
    """Return the machine with rates measured on it: the "rates" of `tools/preflight.py --json`.

    Raises ValueError for anything else.
    """
    try:
        products, nodes = float(rates["matmul_tflops"]) * 1e12, int(rates["nodes"])
        ring = float(rates["all_reduce_gb_per_s"] or 0.0) * 1e9
        link = float(rates["within_node_gb_per_s"] or 0.0) * 1e9
        launch = float(rates.get("layer_launch_ms") or 0.0)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"these are not rates from preflight.py --json: {error!r}") from None
    if not (products > 0 and nodes > 0 and min(ring, link, launch) >= 0):
        raise ValueError(f"impossible rates: {dict(rates)}")
    if nodes == 1:
        link = ring or link
    network = ring / machine.gpus_per_node if nodes > 1 else 0.0
    new = {"products": products, "link_rate": link, "network_rate": network}
    with_rates = replace(
        machine,
        products=min(1.0, products / machine.peak_flops),
        link_rate=link or machine.link_rate,
        network_rate=network or machine.network_rate,
        evidence="measured",
        rate_evidence=_with_measured(machine, (name for name, rate in new.items() if rate)),
    )
    return with_launches(with_rates, launch) if launch else with_rates


def with_launches(machine: Machine, milliseconds: float) -> Machine:
    """Return the machine with a host that takes so long to launch a Llama layer's forward pass."""
    scale = milliseconds * 1e-3 / LAUNCH_SECONDS
    evidence = _with_measured(machine, ["launch_scale"])
    return replace(machine, launch_scale=scale, rate_evidence=evidence)


def _with_measured(machine: Machine, rates: Iterable[str]) -> tuple[tuple[str, RateEvidence], ...]:
    """Return the evidence for a machine's rates after `rates` were measured."""
    measured: dict[str, RateEvidence] = dict.fromkeys(rates, "measured")
    return tuple((dict(machine.rate_evidence) | measured).items())


def other_machine(
    measured_on: tuple[str | None, str], planned: tuple[str | None, str]
) -> str | None:
    """Return why rates of one kind of machine do not apply to another; None if they do. Each kind
    is a GPU (None for ranks on the CPU) and a precision.
    """
    if measured_on == planned:
        return None
    own, other = (f"{gpu or 'cpu'} in {precision}" for gpu, precision in (measured_on, planned))
    return f"its rates were measured on {own}, but this is {other}"


def cpu_machine(ranks: int, cores: int) -> Machine:
    """Return a machine whose ranks compute on the CPU, one thread each. Its numbers are guesses, to
    be fitted to a site's own runs (calibration.py).
    """
    share = min(1.0, cores / ranks)
    return Machine(
        peak_flops=1e11 * share,
        products=0.5,
        attention=0.3,
        memory_rate=5e9 * share,
        multiprocessors=1,
        link_rate=1e9 * share,
        network_rate=1e9 * share,
        watts=20.0,
        gpus_per_node=ranks,
        evidence="guessed",
        link_latency=2e-4 / share,
        network_latency=2e-4 / share,
        host_memory_rate=5e9 * share,
        host_link_rate=5e9 * share,
        pinned_rate=5e9 * share,
        launch_scale=2.0 / share,
        step_seconds=5e-3 / share,
        gathered_layer_seconds=2e-3 / share,
        is_asynchronous=False,
    )


def refined(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """Return the machine with some of its numbers multiplied. Raises ValueError for other names."""
    unknown = {*factors} - {*FITTED}
    if unknown or not all(0 < factor < float("inf") for factor in factors.values()):
        raise ValueError(f"factors must be positive and among {', '.join(FITTED)}: {dict(factors)}")
    changes = {name: getattr(machine, name) * factor for name, factor in factors.items()}
    evidence = _with_measured(machine, factors)  # rates that were not refitted keep their evidence
    return replace(machine, evidence="measured", rate_evidence=evidence, **changes)


FITTED = (
    *("products", "attention", "memory_rate", "link_rate", "link_latency", "network_rate"),
    *("host_memory_rate", "host_link_rate", "pinned_rate", "launch_scale", "step_seconds"),
    "gathered_layer_seconds",
)
"""Numbers that a site's runs can refit."""
_LISTED = ("products", "attention", "memory_rate", "link_rate", "network_rate")
"""Numbers that rates.toml has for a GPU."""
HOST_MEMORY_RATE = 160e9
"""Bytes of host memory per second that DeepSpeed's Adam reaches on all cores of a node, shared by
its ranks: 20 GB/s for each of eight H200 or B200 (the bekman-2026 rows of
tests/estimate/published/throughput.csv); 117 GB/s on a DGX-2 (arXiv 2101.06840, table 4: 10**10
weights in 2.57 s, 30 bytes each)."""
LAUNCH_SECONDS = 1.6e-3
"""Host seconds to launch a Llama layer's forward pass; the backward pass takes 1.5 times as long:
4.0 ms in total on a virtual machine with an H200, 17 microseconds for each of 240 kernels
(tests/estimate/measured_h200.toml, models of 4 and 16 layers). It is also a typical host: of six
published runs of which launches take over a tenth, 0.9 to 1.0 times it fits best."""
NETWORK_REACHED = 0.8
"""Share of a network's rate that collectives reach."""


def rates_of(key: str) -> dict[str, Any]:
    """Return the rates of a GPU, including those that it inherits from another."""
    own = dict(_RATES.get(key, {}))
    like = own.pop("like", None)
    return {**(rates_of(like) if like else _RATES["default"]), **own}
