"""The house holds: which file may import what, and what a file may be called.

Imports are read with `ast`, those inside functions too.  A new file finds its place in ROOMS, a new
dependency in THIRD_PARTY; both lists are the design, so changing them is a decision.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tools.library_size import code_lines, rooms

ROOT = Path(__file__).parents[1]

# Floor -> room -> its files.  A room is a package, or the files that one noun was split into; a
# file imports lower floors and its own room.
FLOORS: list[dict[str, str]] = [
    {
        "errors": "errors paths regular_file",
        "assignments": "assignments bounds foreign",
        "lr_and_batch": "lr_and_batch curriculum",
        "planning": "planning",
    },
    {
        "config": "config config_file config_sections config_conduct",
        "corpus": "corpus_files file_kinds token_index",
        "ds_config": "ds_config ds_check",
        "reading": "table tensor_header",
    },
    {
        "plan": "plan plan_text plan_data plan_curriculum plan_folder plan_kernels plan_model "
        "plan_optimizer plan_pipeline plan_weights command model_config model_values ds_adopt "
        "ds_resolve estimate fit "
        "swap_space",
        "runfolder": "runfolder folder_lock records",
    },
    {
        "models": "models",
        "data": "data",
        "checkpoint": "checkpoint",
        "guard": "guard",
        "optim": "optim",
        "metrics": "metrics live_memory profiling",
        "sampling": "sampling",
    },
    {"engine": "engine"},
    {"run": "run start open_folder record noting verify saving resumption probe watch exporting"},
    {"train": "train"},
]
ROOMS = {
    file: (floor, room)
    for floor, rooms in enumerate(FLOORS)
    for room, files in rooms.items()
    for file in files.split()
}
UPPER = {room for rooms in FLOORS[3:] for room in rooms}

# Where each third party is met; nowhere else.
THIRD_PARTY: dict[str, set[str]] = {
    "deepspeed": {"engine"},
    "transformers": {"models", "data", "checkpoint", "engine"},
    "accelerate": {"models", "checkpoint", "engine"},
    "safetensors": {"models", "checkpoint", "engine"},
    "liger_kernel": {"models"},
    "ninja": {"engine"},
    "sentencepiece": {"data"},
    "tokenizers": {"data"},
    "huggingface_hub": {"plan", "models", "checkpoint"},
    "bitsandbytes": {"engine"},
    "pydantic": {"config"},
    "pydantic_core": {"config"},
    "numpy": UPPER,
    "torch": UPPER,
}


def imported(tree: ast.Module, package: list[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a module of `package`, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = [*base, *([node.module] if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*start, alias.name])


def broken_rule(room: tuple[int, str], name: str) -> str | None:
    """The rule that importing `name` breaks in a room, or None."""
    floor, own = room
    top, _, rest = name.partition(".")
    if top in sys.stdlib_module_names:
        return None
    if top != "harness":
        if own in THIRD_PARTY.get(top, ()):
            return None
        allowed = ", ".join(sorted(THIRD_PARTY.get(top, ()))) or "no room"
        return f"{own} imports {top}, which is met only in: {allowed}"
    if not rest:
        return None
    file = rest.split(".")[0]
    if file not in ROOMS:
        return f"imports harness.{file}, which has no place in FLOORS"
    other_floor, other = ROOMS[file]
    if other == own or other_floor < floor:
        return None
    return f"{own} (floor {floor}) imports {other} (floor {other_floor}): lower floors only"


def floor_violations(library: Path) -> list[str]:
    """`path:line: rule` for every import in the library that breaks one."""
    found = []
    for path in sorted(library.rglob("*.py")):
        parts = list(path.relative_to(library).with_suffix("").parts)
        place = f"harness/{path.relative_to(library)}"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if parts[-1] == "__init__":
            if len(tree.body) > 1 or not ast.get_docstring(tree):
                found.append(f"{place}:1: holds a docstring and nothing else")
            continue
        if parts[0] not in ROOMS:
            found.append(f"{place}:1: has no place in FLOORS")
            continue
        for line, name in imported(tree, ["harness", *parts[:-1]]):
            if rule := broken_rule(ROOMS[parts[0]], name):
                found.append(f"{place}:{line}: {rule}")
    return found


def name_violations(library: Path) -> list[str]:
    """`path: rule` for every file or folder that would hide another module.

    `harness/` itself lands on sys.path when train.py is run as a script.
    """
    foreign = packages_distributions().keys() - {"harness"}
    found = []
    for path in sorted(library.rglob("*")):
        name = path.stem
        if name.startswith("__") or not (path.is_dir() or path.suffix == ".py"):
            continue
        if name in sys.stdlib_module_names or name in foreign:
            owner = "the standard library" if name in sys.stdlib_module_names else "a dependency"
            found.append(f"harness/{path.relative_to(library)}:1: named like a module of {owner}")
    return found


def test_every_file_imports_lower_floors_only() -> None:
    assert not (found := floor_violations(ROOT / "harness")), "\n" + "\n".join(found)


def test_no_file_is_named_like_another_module() -> None:
    assert not (found := name_violations(ROOT / "harness")), "\n" + "\n".join(found)


def test_every_code_line_is_counted_in_one_room(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "door.py").write_text('"""Doc."""\nx = 1\n')
    (tmp_path / "room/noun.py").write_text("x = 1\n# why\ny = 2\n")
    assert rooms(tmp_path) == {tmp_path.name: 1, f"{tmp_path.name}/room": 2}


def test_explanation_is_free() -> None:
    text = '''"""What this is.

In several lines.
"""

# Why.
NAMES = {
    "a": 1,  # one

}


class C:
    """Its purpose."""

    field: str = """two
lines"""
    """What the field is."""
'''
    assert code_lines(text) == 6


def test_mypy_checks_exactly_floors_0_to_2() -> None:
    expected = set()
    for file, (floor, _) in ROOMS.items():
        if floor <= 2:
            folder = ROOT / "harness" / file
            expected.add(f"harness/{file}" if folder.is_dir() else f"harness/{file}.py")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(settings["tool"]["mypy"]["files"]) == expected


def run_python(*arguments: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_planning_needs_nothing_but_the_standard_library() -> None:
    """Imported by an interpreter that has no site-packages at all."""
    files = (ROOT / "harness/planning").rglob("*.py")
    modules = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    assert run_python("-S", "-c", f"import {', '.join(modules)}; print('whole')") == "whole\n"


def test_a_plan_is_made_without_torch_transformers_or_deepspeed() -> None:
    heavy = {"torch", "transformers", "deepspeed", "accelerate", "numpy"}
    code = f"import harness.command, sys; print(sorted({heavy} & sys.modules.keys()))"
    assert run_python("-c", code) == "[]\n"


def test_deepspeed_is_met_only_once_the_device_is_known() -> None:
    """Imported before, it looks for devices by itself, and says so."""
    code = "import harness.run, sys; print('deepspeed' in sys.modules)"
    assert run_python("-c", code) == "False\n"


# Each planted file, and the violation that must be found in it.
PLANTED = [
    ("errors.py", "import torch", "harness/errors.py:1: errors imports torch, which is met only"),
    ("planning/grid.py", "def f():\n    import numpy as np", "grid.py:2: planning imports numpy"),
    ("planning/a/b.py", "from ...data import order", "a/b.py:1: planning (floor 0) imports data"),
    ("config.py", "from harness import plan", "config (floor 1) imports plan (floor 2): lower"),
    ("config.py", "from . import ds_config", "config (floor 1) imports ds_config (floor 1)"),
    ("plan.py", "if x:\n    import transformers.utils", "plan.py:2: plan imports transformers"),
    ("models/x.py", "from harness.data.batches import B", "models (floor 3) imports data"),
    ("models/x.py", "import deepspeed", "imports deepspeed, which is met only in: engine"),
    ("data/x.py", "import harness.engine.zero as z", "data (floor 3) imports engine (floor 4)"),
    ("engine/x.py", "import requests", "engine imports requests, which is met only in: no room"),
    ("run.py", "import harness.attic", "imports harness.attic, which has no place in FLOORS"),
    ("attic.py", "", "harness/attic.py:1: has no place in FLOORS"),
    ("__init__.py", '"""Doc."""\nimport os', "harness/__init__.py:1: holds a docstring and"),
    ("data/__init__.py", "from harness.data.order import x", "__init__.py:1: holds a docstring"),
]


@pytest.mark.parametrize(("file", "code", "expected"), PLANTED)
def test_planted_violations_are_caught(tmp_path: Path, file: str, code: str, expected: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    (found,) = floor_violations(tmp_path)
    assert expected in found


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("__init__.py", '"""Doc."""'),
        ("planning/grid.py", "from dataclasses import dataclass\nfrom . import shape"),
        ("config_file.py", "import tomllib\nfrom harness.config import RunConfig"),
        ("engine/x.py", "import deepspeed, torch.distributed\nfrom harness.data.batches import B"),
        ("train.py", "def main():\n    from harness.run import build"),
    ],
)
def test_what_is_allowed_is_not_caught(tmp_path: Path, file: str, code: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    assert floor_violations(tmp_path) == []


@pytest.mark.parametrize("name", ["queue.py", "numpy", "data/json.py", "yaml.py"])
def test_names_that_hide_a_module_are_caught(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch() if path.suffix else path.mkdir()
    (found,) = name_violations(tmp_path)
    assert found.startswith(f"harness/{name}:1: named like a module of")
