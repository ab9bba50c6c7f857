"""Ranks that talk in every layer: are those of a group on one node?"""

from __future__ import annotations

from collections.abc import Sequence

from harness.layout.exclusions import KEYS
from harness.layout.grid import Purpose
from harness.plan.plan import Plan
from tools.preflight_checks.report import Row, count, who

_AXES: dict[str, Purpose] = {"tensor": "tensor", "sequence": "sequence", "expert": "experts"}


def neighbour_rows(plan: Plan, hosts: Sequence[str]) -> list[Row]:
    """Return a row for each axis whose ranks exchange something in every layer."""
    return [
        _row(axis, KEYS[axis], plan.share.every(purpose), hosts)
        for axis, purpose in _AXES.items()
        if getattr(plan.grid, axis) > 1
    ]


def _row(axis: str, key: str, groups: Sequence[Sequence[int]], hosts: Sequence[str]) -> Row:
    size = len(groups[0])
    apart = [group for group in groups if len({hosts[rank] for rank in group}) > 1]
    text = f"{count(len(groups), 'group')} of {size}"
    if not apart:
        return Row(f"{axis} ranks", "ok", f"{text}, each within a node")
    text += f", {len(apart)} of them over several nodes, as {who(apart[0], hosts)}"
    todo = (
        "they talk in every layer, over the slower links between nodes: start a multiple of "
        f"{size} neighbouring ranks on each node, or set {key} to what divides a node's ranks"
    )
    return Row(f"{axis} ranks", "warn", text, todo)
