"""The cells of the stream simulator: every shipped JSON, and optional features of a run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.ds_json import value_of
from tests.shipped import DS_CONFIGS
from tests.tables import beside

STEPS = 6
MEASURED = 5  # the step whose waits are counted: not saved, evaluated or discarded
DISCARDED = 3

_TABLES = beside(__file__, "cells.toml", with_parts=True)


@dataclass(frozen=True)
class Cell:
    """One run in the simulator."""

    name: str
    json: str
    """Name of a JSON in ds_configs/."""
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    discards: bool = False
    """True if one step is judged a spike and skipped."""
    resumes: bool = False
    """True if a second run resumes the first and is measured instead of it."""
    adapts: bool = False
    """True if it starts from weights that stay frozen."""

    @property
    def is_plain(self) -> bool:
        """True for an unchanged shipped JSON."""
        return self.name == self.json

    @property
    def model(self) -> str:
        """Name of the model in tests/gates/models.py."""
        if self.adapts:
            return "llama_weights"
        return "mixtral" if value_of(self._values, "expert_parallel.enabled") else "llama"

    @property
    def needs_libaio(self) -> bool:
        """True if it writes optimizer states to NVMe."""
        return value_of(self._values, "zero_optimization.offload_optimizer.device") == "nvme"

    def command(self, folder: Path, steps: int) -> list[str]:
        """Return the arguments of train.py; `folder` holds the model and the text."""
        sizes = {key: value_of(self._values, key) for key in _TABLES["sizes"]}
        smaller = [f"ds.{k}=2" for k, n in sizes.items() if isinstance(n, int) and n > 2]
        return [
            f"--deepspeed={DS_CONFIGS / self.json}.json",
            *(f"model.name={folder / self.model}", f"data.path={folder / 'text.jsonl'}"),
            *(f"data.cache_dir={folder / 'cache'}", *_TABLES["words"], f"train.steps={steps}"),
            *([f"model.init_from={folder / self.model}"] if self.adapts else []),
            *(["ds.bf16.enabled=true"] if "bf16" in self._values else []),  # on any processor
            *(*smaller, *self.arguments),
        ]

    @property
    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((DS_CONFIGS / f"{self.json}.json").read_text())
        return values


def _shipped() -> list[Cell]:
    names = sorted(path.stem for path in DS_CONFIGS.glob("*.json"))
    lion = (_TABLES["parts"]["lion"],)  # from NVMe, only Adam steps
    ranks = {"3d": 4}
    return [Cell(n, n, lion if "offload" in n else (), ranks.get(n, 2)) for n in names]


def _with(feature: str, jsons: list[str], arguments: Sequence[str] = (), **how: Any) -> list[Cell]:
    """Return a run with a feature of each of some JSONs."""
    return [Cell(f"{name}-{feature}", name, tuple(arguments), **how) for name in jsons]


BETWEEN_STEPS = [cell for row in _TABLES["between_steps"] for cell in _with(**row)]
VARIANTS = [*BETWEEN_STEPS, *(cell for row in _TABLES["variants"] for cell in _with(**row))]


def all_cells() -> list[Cell]:
    """Return every cell."""
    return [*_shipped(), *VARIANTS]


def covering_cells() -> list[Cell]:
    """Return a few cells: each ZeRO stage, pipeline stages, offload, and judged steps."""
    by_name = {cell.name: cell for cell in all_cells()}
    return [*(by_name[name] for name in _TABLES["covering"]), *BETWEEN_STEPS]


CONTROLS = tuple(cell for cell in all_cells() if cell.name in _TABLES["controls"])
"""Cells of the self-test: nothing waits for the device, and the simulator must notice."""
