"""Every private name of DeepSpeed that the library reads exists with its expected meaning.

After an upgrade of DeepSpeed, run this file first: it lists all changed names within a minute.
"""

import ast
import inspect
import math
import pkgutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.engines import cells, engine_of, share_of
from tests.ranks import ranks
from tests.real_runs import REPOSITORY
from tests.tables import beside


def parameter(engine: Any) -> Any:
    """Return the largest parameter of which this rank has a part."""
    linked = [p for p in engine.module.parameters() if getattr(p, "_hp_mapping", 0) is not None]
    return max(linked, key=lambda p: p.numel())


def group_of(engine: Any, groups: Any) -> bool:
    """Return True if lists of parameters, one per group, contain all trained parameters."""
    trained = {id(p) for p in engine.module.parameters() if p.requires_grad}
    return {id(p) for group in groups for p in group} == trained


def flat(tensors: Any) -> bool:
    return all(t.dim() == 1 and t.dtype == torch.float32 for t in tensors)


def takes(function: Any, *names: str) -> bool:
    """Return True if a function or method has these parameters and requires no others."""
    parameters = inspect.signature(function).parameters
    needed = {name for name, p in parameters.items() if p.default is p.empty} - {"self"}
    return set(names) <= parameters.keys() and needed <= set(names)


def defines(owner: str, name: str) -> bool:
    """Return True if a class of DeepSpeed, not used here, defines a method or sets a field."""
    source = inspect.getsource(pkgutil.resolve_name(f"deepspeed.runtime.{owner}"))
    return f"def {name}(" in source or f"self.{name} =" in source


def source_of(thing: Any) -> str:
    """Return the source of the module that defines a class."""
    return inspect.getsource(inspect.getmodule(type(thing)))


def shard_of(p: Any, where: Any) -> torch.Tensor:
    """Return the elements of a flat tensor at an address."""
    return p.narrow(0, where.start, where.numel)


CONTRACT: dict[str, dict[str, str]] = beside(__file__, "internals.toml")
USED = {kind: {*text.split()} for kind, text in beside(__file__, "names.toml").items()}
LIBRARY = REPOSITORY / "harness"
ROOM = LIBRARY / "engine" / "deepspeed_0_19"
NAMES = {name.rpartition(".")[2] for checks in CONTRACT.values() for name in checks}
READERS = {"getattr", "hasattr", "setattr"}


@pytest.mark.slow("the first engine on two ranks imports everything")
@pytest.mark.parametrize("layout", cells(CONTRACT, ("zero1 dynamic_fp16", "zero3")))
@ranks(2)
def test_private_deepspeed_names_keep_their_contracts(layout: str) -> None:
    """Check the names read from the engine of a layout that has its gradients ready."""
    engine = engine_of(layout)
    engine.train_batch(*share_of(engine), 1e-3)
    engine.accumulate(*share_of(engine))
    problems = {}
    inner = engine.engine
    own = {"e": inner, "o": inner.optimizer, "p": parameter(inner), "dist": dist, "math": math}
    for name, expected in CONTRACT[layout].items():
        try:
            if not eval(expected, globals() | own):
                problems[name] = "is not what it was"
        except Exception:
            problems[name] = traceback.format_exc()
    assert problems == {}, "\n".join(f"{name}: {why}" for name, why in problems.items())


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
            private = name.startswith("_") and not name.startswith("__") and not own
            outside = private and name not in USED["of_torch"] and place.parts[0] == "engine"
            if outside or name in NAMES - USED["ordinary"]:
                problems.append(f"{place}:{line}: {name}")
    return problems


def test_private_names_are_read_in_one_room() -> None:
    assert private_reads(LIBRARY) == []


PLANTED = ("p._hp_mapping", "hasattr(p, 'ds_id')", "e.optimizer.fp32_partitioned_groups_flat")


@pytest.mark.parametrize("code", [*PLANTED, "engine._anything()"])
def test_a_planted_private_read_is_caught(tmp_path: Path, code: str) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "new.py").write_text(code)
    assert len(private_reads(tmp_path)) == 1


def test_every_name_that_is_read_has_a_contract() -> None:
    read = {name for _, _, name in attributes(ROOM / "internals.py")}
    assert sorted(read - NAMES - USED["public"]) == []
