"""Small sets of the parity gate's cells, in which all that can occur does."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

from tests.gates.cells import covering
from tests.gates.models import PLANTED, PRESETS, RECURRENT, ROWS
from tests.gates.parity.cells import (
    COVERED_KINDS,
    DIVIDED_STAGES,
    FEW,
    NVME,
    OTHER_ATTENTION,
    STAGES,
    Cell,
    all_cells,
)

AXES = ("pipeline", "tensor", "sequence", "expert")


def covering_cells() -> list[Cell]:
    """A small set in which every pair of values that can occur together does occur; of pipelined
    cells and of PRESETS an architecture counts by itself, as does a layout of FEW: in pairs it
    would take dozens more.
    """
    return covering([cell for cell in all_cells() if cell.layout not in NVME], _covers)


def brief_cells() -> list[Cell]:
    """A few on two ranks, for every change: each pair of precision and ZeRO stage from 1 on, each
    axis that divides a model, and offload occur once. Few families need few plain loops.
    """
    families = {"pipeline": "llama_tied", "expert": "mixtral"}

    def is_one(cell: Cell) -> bool:
        axis = next((axis for axis in families if getattr(cell.how, axis) > 1), None)
        return cell.ranks == 2 and cell.architecture == families.get(axis or "", "llama")

    return covering(
        [cell for cell in all_cells() if is_one(cell) and cell.layout not in NVME], _occurs
    )


def _occurs(cell: Cell) -> set[tuple[str, object]]:
    how = cell.how
    axes = {name for name in AXES if getattr(how, name) > 1} or {"data"}
    if "offload" in cell.layout:
        axes = {"offload"}
    covered: set[tuple[str, object]] = {("axis", axis) for axis in axes}
    return covered | ({("precision, stage", (cell.precision, how.stage))} if how.stage else set())


def _covers(cell: Cell) -> set[tuple[tuple[str, Any], ...]]:
    values: dict[str, Any] = asdict(cell)
    if cell.architecture in PLANTED:
        return set()
    if cell.architecture in RECURRENT:
        values = {key: values[key] for key in ("architecture", "precision")}
        values["pipeline"] = cell.how.pipeline
        return {((f"recurrent {key}", value),) for key, value in values.items()}
    if cell.layout in FEW:
        kind = "bf16_states" if cell.how.has_bf16_states else cell.layout.partition("_zero")[0]
        return {(("layout", kind),)}
    if cell.how.kind:
        return {(("kind", cell.layout),)} if cell.layout in COVERED_KINDS else set()
    if cell.how.varlen:
        names = ("architecture", "layout", "precision", "accumulation")
        return {((f"varlen {name}", values[name]),) for name in names}
    if cell.layout in DIVIDED_STAGES:  # of a layout, of a precision and of all ranks one cell each
        values = {key: values[key] for key in ("layout", "precision", "ranks")}
        return {(("divided stages", value),) for value in values.values()}
    if cell.how.loss_chunk:
        how = cell.how
        values = {key: values[key] for key in ("architecture", "precision")}
        values |= {"stage": how.stage, "pipeline": how.pipeline}
        values |= {"tensor": how.tensor, "sequence": how.sequence}
        return {((f"chunked {key}", value),) for key, value in values.items()}
    if cell.how.model:
        name, _, rest = cell.layout.partition("_")
        axis, stage = rest.rpartition("_")[0] or "data", cell.how.stage
        values = {"how": name, "axis": axis, "stage": stage, "precision": cell.precision}
        return {((f"recomputed {key}", value),) for key, value in values.items()}
    if cell.how.compiled and cell.how.sequence * cell.how.tensor > 1:
        return set()  # of which a minute each is compilation
    if cell.how.sequence > 1:
        how = cell.how  # attention alone is another: not of every family that has llama's
        values = {key: values[key] for key in ("architecture", "precision")}
        values |= {"stage": how.stage, "ranks": how.sequence, "tensor": how.tensor}
        values["expert"] = how.expert
        if cell.architecture in ROWS and cell.architecture not in OTHER_ATTENTION:
            del values["architecture"]
        return {((f"sequence {key}", value),) for key, value in values.items()}
    if cell.how.expert > 1:
        values = {key: values[key] for key in ("architecture", "precision")}
        how = cell.how
        values |= {"stage": how.stage, "ranks": how.expert, "tensor": how.tensor}
        return {((f"expert {key}", value),) for key, value in values.items()}
    if cell.how.tensor > 1:  # of an architecture, of a layout and of a precision one cell each
        return {(("tensor", value),) for value in (cell.architecture, cell.layout, cell.precision)}
    alone = set()
    if cell.layout in STAGES or cell.architecture in PRESETS:
        alone = {(("architecture", values.pop("architecture")),)}
    return alone | set(itertools.combinations(values.items(), 2))
