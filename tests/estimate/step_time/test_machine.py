"""Rates of GPUs with their sources; the matrix products and collectives that they bound."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import harness.estimate.step_time
from harness.estimate.hardware import GPUS
from harness.estimate.step_time.exchanges import Group
from harness.estimate.step_time.layer import TILE, Seconds, product_seconds
from harness.estimate.step_time.machine import machine_of, measured, rates_of

RATES = tomllib.loads((Path(harness.estimate.step_time.__file__).parent / "rates.toml").read_text())


def test_every_gpu_and_no_other_has_rates() -> None:
    assert {*RATES} - {"default"} == {*GPUS}
    for rates in map(rates_of, GPUS):
        assert rates["evidence"] in ("measured", "fitted", "read", "guessed")
        assert all(0 < rates[name] < 1 for name in ("products", "attention", "streaming", "links"))


def test_the_seconds_of_a_layer_add_up_without_idle_ones() -> None:
    assert Seconds(1, 2, 4, elements=8, launches=16, idle=32).total == 31


def test_given_network_rate_is_used() -> None:
    usual = machine_of("h100-80", 8, "bf16")
    slow = machine_of("h100-80", 8, "bf16", network_gb_per_s=1.25)
    assert slow == replace(usual, network_rate=usual.network_rate / 40)


def test_ranks_of_a_node_share_its_hosts_memory() -> None:
    """One rank on a node has all of it; for eight, it equals published runs on eight GPUs."""
    alone, eight = (machine_of("h100-80", ranks, "bf16") for ranks in (1, 8))
    assert alone.host_memory_rate == 8 * eight.host_memory_rate
    assert eight.host_memory_rate == 20e9
    assert alone.host_link_rate == eight.host_link_rate
    # arXiv 2101.06840, table 4: DeepSpeed's Adam of 10**10 weights on a DGX-2, 30 bytes each.
    assert 10**10 * 30 / alone.host_memory_rate == pytest.approx(2.57, rel=0.3)


RATES_OF_ONE_NODE = {"ranks": 8, "nodes": 1, "matmul_tflops": 600.0, "all_reduce_gb_per_s": 300.0}
RATES_OF_ONE_NODE |= {"within_node_gb_per_s": 200.0, "between_nodes_gb_per_s": None}


def test_measured_rates_take_the_place_of_the_tables() -> None:
    usual = machine_of("h100-80", 8, "bf16")
    node = measured(usual, RATES_OF_ONE_NODE)
    assert node.products * node.peak_flops == pytest.approx(600e12)
    assert (node.link_rate, node.network_rate) == (300e9, usual.network_rate)
    assert node.evidence == "measured"
    assert (node.launch_scale, dict(node.rate_evidence).get("launch_scale")) == (1.0, None)
    quick = measured(usual, {**RATES_OF_ONE_NODE, "layer_launch_ms": 0.8})
    assert quick.launch_scale == pytest.approx(0.5)  # of 1.6 ms, an H200's virtual machine
    assert dict(quick.rate_evidence)["launch_scale"] == "measured"
    nodes = measured(usual, {**RATES_OF_ONE_NODE, "nodes": 2, "all_reduce_gb_per_s": 160.0})
    # A ring enters and leaves each node once, using the network cards of all eight.
    assert (nodes.link_rate, nodes.network_rate) == (200e9, 20e9)


@pytest.mark.parametrize("wrong", [{}, {**RATES_OF_ONE_NODE, "matmul_tflops": -1}, {"nodes": "x"}])
def test_rates_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="rates"):
        measured(machine_of("h100-80", 8, "bf16"), wrong)


A100 = machine_of("a100-80", 8, "bf16")


def test_a_large_product_reaches_the_share_of_the_peak() -> None:
    size = TILE * A100.multiprocessors
    seconds = product_seconds(size, size, size, 2, A100) - A100.kernel_seconds
    assert 2 * size**3 / seconds == pytest.approx(A100.peak_flops * A100.products)


def test_a_vector_is_bound_by_the_bytes_of_the_matrix() -> None:
    columns = TILE * A100.multiprocessors
    seconds = product_seconds(1, columns, 8192, 2, A100)
    moved = columns * 8192 + columns + 8192
    assert seconds == pytest.approx(2 * moved / A100.memory_rate + A100.kernel_seconds)


def test_one_tile_more_than_a_wave_takes_two_waves() -> None:
    rows, columns = TILE * 12, TILE * 9
    assert A100.multiprocessors == 12 * 9
    one = product_seconds(rows, columns, 8192, 2, A100) - A100.kernel_seconds
    two = product_seconds(rows + 1, columns, 8192, 2, A100) - A100.kernel_seconds
    assert two == pytest.approx(2 * one)


def test_kernels_that_share_the_last_wave_lose_less_in_it() -> None:
    machine = replace(A100, partial_wave=0.25, kernel_seconds=0.0)
    rows, columns = TILE * 12, TILE * 9  # a full wave, and a quarter of another
    one = product_seconds(rows, columns, 8192, 2, machine)
    quarter = product_seconds(rows + TILE * 3, columns, 8192, 2, machine)
    assert quarter == pytest.approx((1.25 + 0.25 * 0.75) * one)


MACHINE = replace(machine_of("h100-80", 8, "bf16"), link_latency=0.0, network_latency=0.0)


def test_groups_know_their_nodes_and_neighbours() -> None:
    assert Group.of(8, 1, 8) == Group(8, nodes=1, sharing=1)
    assert Group.of(64, 1, 8) == Group(64, nodes=8, sharing=1)
    # Eight data ranks, one per node: the groups of all eight tensor ranks share the network.
    assert Group.of(8, 8, 8) == Group(8, nodes=8, sharing=8)
    assert Group.of(4, 2, 8) == Group(4, nodes=1, sharing=1)
    assert Group.of(2, 16, 8) == Group(2, nodes=2, sharing=8)


def test_ring_sends_all_but_the_own_shard() -> None:
    alone = Group.of(1, 1, 8)
    assert alone.gather(1e9, MACHINE) == alone.exchange(1e9, MACHINE) == 0.0
    group = Group.of(8, 1, 8)
    assert group.gather(8e9, MACHINE) == pytest.approx(7e9 / MACHINE.link_rate)
    assert group.reduce(8e9, MACHINE) == pytest.approx(14e9 / MACHINE.link_rate)


def test_between_nodes_a_ring_has_the_cards_of_a_whole_node() -> None:
    far, shared = Group.of(16, 1, 8), Group.of(2, 8, 8)
    for machine in (MACHINE, replace(MACHINE, link_rate=1e9)):
        assert far.rate(machine) == min(machine.link_rate, 8 * machine.network_rate)
        assert shared.rate(machine) == pytest.approx(machine.network_rate)


def test_an_exchange_is_bound_by_the_network() -> None:
    near, far = Group.of(8, 1, 8), Group.of(16, 1, 8)
    assert near.exchange(8e9, MACHINE) == pytest.approx(7e9 / MACHINE.link_rate)
    assert far.exchange(16e9, MACHINE) == pytest.approx(8e9 / MACHINE.network_rate)


def test_each_collective_has_the_latency_of_its_ring() -> None:
    slow = replace(MACHINE, link_latency=1e-6, network_latency=1e-5)
    group = Group.of(16, 1, 8)
    more = group.gather(1e9, slow, calls=10) - group.gather(1e9, MACHINE, calls=10)
    assert more == pytest.approx(10 * (14e-6 + 1e-5))
