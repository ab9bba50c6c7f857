"""Every private name of DeepSpeed that the library reads exists with its expected meaning.

After an upgrade of DeepSpeed, run this file first: it lists all changed names within a minute.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.deepspeed_0_19.contract import CONTRACT, LAYOUTS
from tests.engine.engines import cells, engine_of, share_of
from tests.ranks import ranks
from tests.real_runs import REPOSITORY

LIBRARY = REPOSITORY / "harness"
ROOM = LIBRARY / "engine" / "deepspeed_0_19"
NAMES = {name.rpartition(".")[2] for name in CONTRACT}
# Names in the contract that other objects also use.
ORDINARY = {"optimizer", "loss", "tensors", "dynamic", "model_parallel", "skipped_steps"}
# Documented, or from torch and Python: `internals.py` may use these without a contract.
PUBLIC = {
    *("module", "parameters", "state", "requires_grad", "shape", "data", "numel", "view", "narrow"),
    *("start", "group", "update", "truncate", "open", "partition", "get_rank", "ProcessGroup"),
    *("Parameter", "Tensor", "zeros", "copy_", "clone"),
}
READERS = {"getattr", "hasattr", "setattr"}
# Private names of torch that are read elsewhere.
OF_TORCH = {
    "_get_default_store",
    "_buffers",
    "_non_persistent_buffers_set",
    "_C",
    "_accelerator_setAllocatorSettings",
}


@pytest.mark.slow("the first engine on two ranks imports everything")
@pytest.mark.parametrize("layout", cells(LAYOUTS, ("zero1", "zero3")))
@ranks(2)
def test_the_names_are_what_they_were(layout: str) -> None:
    """Check the names read from the engine of a layout that has its gradients ready."""
    engine = engine_of(LAYOUTS[layout])
    engine.train_batch(*share_of(engine), 1e-3)
    engine.accumulate(*share_of(engine))
    problems = {}
    for name, (where, expected) in CONTRACT.items():
        if where == layout:
            try:
                if not expected(engine.engine):
                    problems[name] = "is not what it was"
            except Exception:
                problems[name] = traceback.format_exc()
    engine.close()
    assert problems == {}, "\n".join(f"{name}: {why}" for name, why in problems.items())


def test_every_name_of_the_contract_has_a_layout() -> None:
    assert {layout for layout, _ in CONTRACT.values()} == LAYOUTS.keys()


def attributes(path: Path) -> Iterator[tuple[int, ast.expr | None, str]]:
    """Yield (line, owner, name) of each attribute in a file, including those read by `getattr`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in READERS:
            for argument in node.args[1:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, None, argument.value


def private_reads(library: Path) -> list[str]:
    """Return `path:line: name` of each private name read outside the DeepSpeed package."""
    problems = []
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library)
        if ROOM.name in place.parts:
            continue
        for line, owner, name in attributes(path):
            own = owner is not None and ast.unparse(owner) in ("self", "cls", "super()")
            private = name.startswith("_") and not name.startswith("__") and name not in OF_TORCH
            if name in NAMES - ORDINARY or (place.parts[0] == "engine" and private and not own):
                problems.append(f"{place}:{line}: {name}")
    return problems


def test_private_names_are_read_in_one_room() -> None:
    assert private_reads(LIBRARY) == []


@pytest.mark.parametrize(
    "code",
    [
        "x = p._hp_mapping",
        "x = hasattr(p, 'ds_id')",
        "x = engine.optimizer.fp32_partitioned_groups_flat",
        "engine._anything()",
    ],
)
def test_a_planted_private_read_is_caught(tmp_path: Path, code: str) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "new.py").write_text(code)
    assert len(private_reads(tmp_path)) == 1


def test_every_name_that_is_read_has_a_contract() -> None:
    read = {name for _, _, name in attributes(ROOM / "internals.py")}
    assert sorted(read - NAMES - PUBLIC) == []
