"""Measured rates of a cluster, for the planner: tools/plan_cluster.py --measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from harness.plan.plan import Plan
from tools.preflight_checks.machine import Machine
from tools.preflight_checks.network import BETWEEN, WITHIN, Links


def rates(
    plan: Plan, hosts: Sequence[str], machines: Iterable[Machine], links: Sequence[Links]
) -> dict[str, Any]:
    """Return medians: 10**12 operations of matrix products a second, 10**9 bytes a second of links;
    None where nothing was measured.
    """

    def between(level: str) -> float | None:
        return _median(rate for each in links for name, _, rate in each.pairs if name == level)

    return {
        "gpu": plan.world.gpu,
        "precision": plan.precision,
        "ranks": len(hosts),
        "nodes": len(set(hosts)),
        "matmul_tflops": _median(machine.tflops for machine in machines),
        "all_reduce_gb_per_s": _median(
            each.all_reduce_gb_per_s for each in links if each.all_reduce_gb_per_s is not None
        ),
        "within_node_gb_per_s": between(WITHIN),
        "between_nodes_gb_per_s": between(BETWEEN),
    }


def _median(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return statistics.median(numbers) if numbers else None
