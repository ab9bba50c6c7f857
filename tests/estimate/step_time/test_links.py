"""Collectives: the bytes of a ring over the slowest link that it crosses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.estimate.step_time.exchanges import Group
from harness.estimate.step_time.machine import machine_of

MACHINE = replace(machine_of("h100-80", 8, "bf16"), link_latency=0.0, network_latency=0.0)


def test_groups_know_their_nodes_and_neighbours() -> None:
    assert Group.of(8, 1, 8) == Group(8, nodes=1, sharing=1)
    assert Group.of(64, 1, 8) == Group(64, nodes=8, sharing=1)
    # Eight data ranks, one of each node: all eight tensor ranks' groups share the network.
    assert Group.of(8, 8, 8) == Group(8, nodes=8, sharing=8)
    assert Group.of(4, 2, 8) == Group(4, nodes=1, sharing=1)


def test_a_ring_sends_all_but_its_own_part() -> None:
    group = Group.of(8, 1, 8)
    assert group.gather(8e9, MACHINE) == pytest.approx(7e9 / MACHINE.link_rate)
    assert group.reduce(8e9, MACHINE) == pytest.approx(14e9 / MACHINE.link_rate)


def test_between_nodes_a_ring_has_the_cards_of_a_whole_node() -> None:
    far = Group.of(16, 1, 8)
    assert far.rate(MACHINE) == min(MACHINE.link_rate, 8 * MACHINE.network_rate)
    shared = Group.of(2, 8, 8)
    assert shared.rate(MACHINE) == pytest.approx(MACHINE.network_rate)


def test_an_exchange_is_bound_by_the_network() -> None:
    near, far = Group.of(8, 1, 8), Group.of(16, 1, 8)
    assert near.exchange(8e9, MACHINE) == pytest.approx(7e9 / MACHINE.link_rate)
    assert far.exchange(16e9, MACHINE) == pytest.approx(8e9 / MACHINE.network_rate)


def test_each_collective_has_the_latency_of_its_ring() -> None:
    slow = replace(MACHINE, link_latency=1e-6, network_latency=1e-5)
    group = Group.of(16, 1, 8)
    more = group.gather(1e9, slow, calls=10) - group.gather(1e9, MACHINE, calls=10)
    assert more == pytest.approx(10 * (14e-6 + 1e-5))


def test_one_rank_talks_to_nobody() -> None:
    alone = Group.of(1, 1, 8)
    assert alone.gather(1e9, MACHINE) == alone.reduce(1e9, MACHINE) == 0.0
    assert alone.exchange(1e9, MACHINE) == 0.0
