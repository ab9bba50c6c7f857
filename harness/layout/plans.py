"""Transformers' own plans to divide a decoder over ranks, the keys that its decoders read, and
those without torch's attention, from plans.json.

tools/proofs/generate_plans.py writes that file.

Modules are named within the base model, "layers.*.mlp.up_proj" being that of every layer; the head
is in no plan.  Modules that a config leaves out may be named: a dense model's plan lists experts.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

Ends = tuple[list[str], list[str]]
"""Names of a module's inputs, and of its outputs."""


def tensor_plan(model_type: str) -> dict[str, str] | None:
    """Return the style in which tensor-parallel ranks divide each module, such as "colwise"."""
    return _plan("tensor", model_type)


def expert_plan(model_type: str) -> dict[str, str] | None:
    """Return the style in which expert-parallel ranks divide each module: "grouped_gemm"."""
    return _plan("expert", model_type)


def pipeline_plan(model_type: str) -> dict[str, Ends] | None:
    """Return the inputs and outputs of the modules between which a pipeline is cut, in order."""
    plan = _plan("pipeline", model_type)
    return plan and {module: (takes, returns) for module, (takes, returns) in plan.items()}


def without_sdpa(model_type: str) -> bool:
    """Return whether transformers refuses torch's attention for a decoder."""
    return model_type in _table()["without_sdpa"]


def keys_read(model_type: str) -> frozenset[str] | None:
    """Return the keys of a config.json that change a decoder or its export."""
    table = _table()
    entries = (e["plan"].split() for e in table["keys"] if model_type in e["families"])
    signed = next(entries, None)
    if signed is None:
        return None
    more, fewer = ({key[1:] for key in signed if key[0] == sign} for sign in "+-")
    return frozenset({*table["most_keys"]} - fewer | more)


def every_key() -> frozenset[str]:
    """Return the keys of a config.json that any decoder reads."""
    table = _table()
    more = {key[1:] for entry in table["keys"] for key in entry["plan"].split() if key[0] == "+"}
    return frozenset({*table["most_keys"], *more})


def _plan(kind: str, model_type: str) -> dict[str, Any] | None:
    """Return a copy of the plan, None if transformers has none."""
    entries = (e["plan"] for e in _table()[kind] if model_type in e["families"])
    plan: dict[str, Any] | None = next(entries, None)
    return None if plan is None else dict(plan)


@cache
def _table() -> dict[str, Any]:
    path = Path(__file__).with_name("plans.json")
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table
