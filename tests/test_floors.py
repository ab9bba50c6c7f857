"""The architecture holds: which file may import what, and which names files may have.

Imports are read with `ast`, including those inside functions. A new package is added to FLOORS, a
new dependency to floors.toml. Both lists are the design, so changing them is a decision.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.sizes import SUM, above, sizes
from tests.tables import beside

ROOT = Path(__file__).parents[1]

TABLES = beside(__file__, "floors.toml")
FLOORS: list[set[str]] = [{*floor} for floor in TABLES["floors"]]
FLOOR_OF = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
UPPER = set().union(*FLOORS[4:])
THIRD_PARTY: dict[str, set[str]] = {
    name: UPPER if rooms == ["upper"] else {*rooms} for name, rooms in TABLES["third_party"].items()
}


def imported(tree: ast.Module, package: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import in a module of `package`, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = [*base, *([node.module] if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*start, alias.name])


def broken_rule(package: tuple[int, str], name: str) -> str | None:
    """Return the rule that importing `name` breaks in a package, or None."""
    floor, own = package
    top, _, rest = name.partition(".")
    if top in sys.stdlib_module_names:
        return None
    if top != "harness":
        if own in THIRD_PARTY.get(top, ()):
            return None
        allowed = ", ".join(sorted(THIRD_PARTY.get(top, ()))) or "no package"
        return f"{own} imports {top}, which is met only in: {allowed}"
    if not rest:
        return None
    file = rest.split(".")[0]
    if file not in FLOOR_OF:
        return f"imports harness.{file}, which has no place in FLOORS"
    if file == own or FLOOR_OF[file] < floor:
        return None
    return f"{own} (floor {floor}) imports {file} (floor {FLOOR_OF[file]}): lower floors only"


def floor_violations(library: Path) -> list[str]:
    """Return `path:line: rule` for every import in the library that breaks one."""
    violations = []
    for path in sorted(library.rglob("*.py")):
        parts = list(path.relative_to(library).with_suffix("").parts)
        place = f"harness/{path.relative_to(library)}"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if parts[-1] == "__init__":
            if len(tree.body) > 1 or not ast.get_docstring(tree):
                violations.append(f"{place}:1: holds a docstring and nothing else")
            continue
        if parts[0] not in FLOOR_OF:
            violations.append(f"{place}:1: has no place in FLOORS")
            continue
        for line, name in imported(tree, ["harness", *parts[:-1]]):
            if rule := broken_rule((FLOOR_OF[parts[0]], parts[0]), name):
                violations.append(f"{place}:{line}: {rule}")
    return violations


def name_violations(library: Path) -> list[str]:
    """Return `path: rule` for every file or folder that would hide another module.

    `harness/` is on sys.path when train.py runs as a script.
    """
    foreign = packages_distributions().keys() - {"harness"}
    violations = []
    for path in sorted(library.rglob("*")):
        name = path.stem
        if name.startswith("__") or not (path.is_dir() or path.suffix == ".py"):
            continue
        if name in sys.stdlib_module_names or name in foreign:
            owner = "the standard library" if name in sys.stdlib_module_names else "a dependency"
            problem = f"named like a module of {owner}"
            violations.append(f"harness/{path.relative_to(library)}:1: {problem}")
    return violations


def import_circle(library: Path) -> list[str]:
    """Return the files of an import cycle in the library, the first one again at the end."""
    imports: dict[str, set[str]] = {}
    for path in library.rglob("*.py"):
        parts = ["harness", *path.relative_to(library).with_suffix("").parts]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports[".".join(parts)] = {name for _, name in imported(tree, parts[:-1])}
    # `from a.b import c` names the file a.b, or a.b.c.
    graph = {
        name: {module for used in names for module in (used, used.rpartition(".")[0])}
        & imports.keys() - {name}
        for name, names in imports.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_file_imports_lower_floors_only() -> None:
    assert not (violations := floor_violations(ROOT / "harness")), "\n".join(violations)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert import_circle(ROOT / "harness") == []


def test_commands_import_nothing_from_the_tests() -> None:
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "tools").rglob("*.py")}
    names = ((path, name) for path, tree in trees.items() for _, name in imported(tree, ["tools"]))
    assert [(path, name) for path, name in names if name.startswith("tests.")] == []


def test_no_file_is_named_like_another_module() -> None:
    assert not (violations := name_violations(ROOT / "harness")), "\n".join(violations)


def test_a_folder_that_grows_is_named(tmp_path: Path) -> None:
    (tmp_path / "harness/folder").mkdir(parents=True)
    (tmp_path / "harness/door.py").write_text("x = 1\n")
    (tmp_path / "harness/folder/noun.py").write_text("x = 1\n# why\ny = 2\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    now = sizes(tmp_path)
    assert now == {"harness": 1, "harness/folder": 3, SUM: 4}
    assert above(now, now) == []
    assert above(now, {"harness": 1, "harness/folder": 4, SUM: 3}) == [f"{SUM}: 4 lines, at most 3"]
    assert above(now, {"harness": 1, SUM: 9}) == ["harness/folder: 3 lines, at most 0"]


def long_test_names(tests: Path) -> list[str]:
    """Return `path:line: name` of every test whose name exceeds 60 characters."""
    return [
        f"{path.relative_to(tests)}:{node.lineno}: {node.name}"
        for path in sorted(tests.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_") and len(node.name) > 60
    ]


def test_names_of_tests_have_at_most_60_characters(tmp_path: Path) -> None:
    assert long_test_names(ROOT / "tests") == []
    limit = "test_".ljust(60, "a")
    (tmp_path / "test_x.py").write_text(f"def {limit}(): ...\nasync def {limit}b(): ...\n")
    assert long_test_names(tmp_path) == [f"test_x.py:2: {limit}b"]


def test_a_wheel_has_every_file_of_the_library() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    library = ROOT / "harness"
    listed = ("**/*.py", *settings["tool"]["setuptools"]["package-data"]["harness"])
    packed = {path for pattern in listed for path in library.glob(pattern)}
    files = {path for path in library.rglob("*") if path.is_file()}
    assert {path for path in files - packed if path.suffix != ".pyc"} == set()


def test_mypy_checks_the_whole_library() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    mypy = settings["tool"]["mypy"]
    assert (mypy["files"][0], mypy["strict"]) == ("harness", True)
    # Untyped packages, tools and tests; nothing of the library is excluded.
    modules = [module for table in mypy["overrides"] for module in table["module"]]
    assert not [module for module in modules if module.startswith(("harness", "*"))]
    assert "exclude" not in mypy


def test_no_package_hides_a_circle() -> None:
    """Imports for type checkers count as imports."""
    library = (ROOT / "harness").rglob("*.py")
    assert [str(path) for path in library if "TYPE_CHECKING" in path.read_text("utf-8")] == []


def test_the_landing_holds_seven_files_at_most() -> None:
    landing = {path.name for path in (ROOT / "harness").glob("*.*")}
    files = {"train.py", "loop.py", "steps.py", "errors.py", "runfolder.py", "terminal.py"}
    assert landing == {"__init__.py", *files}


def modules_of(package: str) -> list[str]:
    """Return the dotted names of all modules in a package."""
    files = (ROOT / "harness" / package).rglob("*.py")
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)


def run_python(*arguments: str) -> str:
    """Return the output of a new interpreter."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_stdlib_suffices_for_layout_estimate_and_files() -> None:
    """They are imported by an interpreter without any site-packages."""
    modules = ", ".join(modules_of("layout") + modules_of("estimate") + modules_of("files"))
    assert run_python("-S", "-c", f"import {modules}; print('whole')") == "whole\n"


@pytest.mark.gate("tools")
def test_deepspeed_is_met_only_once_the_device_is_known() -> None:
    """If imported earlier, it searches for devices itself and prints it."""
    code = "import harness.loop, sys; print('deepspeed' in sys.modules)"
    assert run_python("-c", code) == "False\n"


PLANTED = TABLES["planted"]["rows"]


@pytest.mark.parametrize(("file", "code", "expected"), PLANTED)
def test_planted_violations_are_caught(tmp_path: Path, file: str, code: str, expected: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    found = floor_violations(tmp_path)
    assert len(found) == bool(expected)
    assert all(expected in violation for violation in found)


def test_a_planted_circle_is_caught(tmp_path: Path) -> None:
    package = tmp_path / "plan"
    package.mkdir()
    (package / "a.py").write_text("from harness.plan.b import x")
    (package / "b.py").write_text("def f():\n    from . import c")
    (package / "c.py").write_text("import harness.errors")
    assert import_circle(tmp_path) == []
    (package / "c.py").write_text("from harness.plan import a")
    names = {f"harness.plan.{name}" for name in "abc"}
    assert set(import_circle(tmp_path)) == names


@pytest.mark.parametrize("name", ["queue.py", "numpy", "data/json.py", "yaml.py"])
def test_names_that_hide_a_module_are_caught(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch() if path.suffix else path.mkdir()
    (violation,) = name_violations(tmp_path)
    assert violation.startswith(f"harness/{name}:1: named like a module of")
