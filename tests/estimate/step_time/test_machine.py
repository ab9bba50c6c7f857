"""Rates of GPUs: every GPU of the table has them, with where they come from."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import harness.estimate.step_time
from harness.estimate.hardware import GPUS
from harness.estimate.step_time.machine import machine_of, measured, rates_of

RATES = tomllib.loads((Path(harness.estimate.step_time.__file__).parent / "rates.toml").read_text())


@pytest.mark.parametrize("key", GPUS)
def test_every_gpu_has_rates(key: str) -> None:
    assert key in RATES
    rates = rates_of(key)
    assert rates["evidence"] in ("measured", "fitted", "read", "guessed")
    assert all(0 < rates[name] < 1 for name in ("products", "attention", "streaming", "links"))


def test_rates_are_of_gpus_that_there_are() -> None:
    assert {*RATES} - {"default"} == {*GPUS}
    assert all(table.get("like", "default") in RATES for table in RATES.values())


def test_a_network_that_is_given_is_taken() -> None:
    usual = machine_of("h100-80", 8, "bf16")
    slow = machine_of("h100-80", 8, "bf16", network_gb_per_s=1.25)
    assert slow == replace(usual, network_rate=usual.network_rate / 40)


def test_ranks_of_a_node_share_its_hosts_memory() -> None:
    """One rank on a node has all of it: eight have what published runs on eight GPUs show."""
    alone, eight = (machine_of("h100-80", ranks, "bf16") for ranks in (1, 8))
    assert alone.host_memory_rate == 8 * eight.host_memory_rate
    assert eight.host_memory_rate == 20e9
    assert alone.host_link_rate == eight.host_link_rate
    # arXiv 2101.06840, table 4: DeepSpeed's Adam of 10**10 weights on a DGX-2, 30 bytes each.
    assert 10**10 * 30 / alone.host_memory_rate == pytest.approx(2.57, rel=0.3)


def test_an_unknown_gpu_is_named() -> None:
    with pytest.raises(ValueError, match="unknown GPU 'h9000'"):
        machine_of("h9000", 8, "bf16")


RATES_OF_ONE_NODE = {
    "ranks": 8,
    "nodes": 1,
    "matmul_tflops": 600.0,
    "all_reduce_gb_per_s": 300.0,
    "within_node_gb_per_s": 200.0,
    "between_nodes_gb_per_s": None,
}


def test_measured_rates_take_the_place_of_the_tables() -> None:
    usual = machine_of("h100-80", 8, "bf16")
    node = measured(usual, RATES_OF_ONE_NODE)
    assert node.products * node.peak_flops == pytest.approx(600e12)
    assert (node.link_rate, node.network_rate) == (300e9, usual.network_rate)
    assert node.evidence == "measured"
    nodes = measured(usual, {**RATES_OF_ONE_NODE, "nodes": 2, "all_reduce_gb_per_s": 160.0})
    # A ring enters and leaves each node once, over the cards of all eight.
    assert (nodes.link_rate, nodes.network_rate) == (200e9, 20e9)


@pytest.mark.parametrize("wrong", [{}, {**RATES_OF_ONE_NODE, "matmul_tflops": -1}, {"nodes": "x"}])
def test_rates_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="rates"):
        measured(machine_of("h100-80", 8, "bf16"), wrong)
