"""The gates include every test marked for them, keep results, and notice changes."""

import fcntl
import os
import re
import subprocess
import sys
import tomllib
from itertools import islice
from pathlib import Path

import pytest

from tests.gates import __main__ as gates
from tests.gates import records
from tests.gates.releases import build, folder, requirements
from tests.tables import beside

GATES = records.all_gates()
MARK = re.compile(r'(?:mark\.gate|rest_in_gate, |rest_in_gate)\(?"(\w+)"')
TOOLS = re.compile(r"^\s*(?:from|import) tools\b", re.MULTILINE)


def test_marked_files_belong_to_their_gate_and_its_tools() -> None:
    lost = []
    for path in (gates.REPOSITORY / "tests").rglob("*.py"):
        name, text = path.relative_to(gates.REPOSITORY), path.read_text()
        for gate in {*MARK.findall(text)} - {"planted"}:
            if not any(name.is_relative_to(tests) for tests in GATES[gate].tests):
                lost.append(f"{name}: {gate}")
            if TOOLS.search(text) and "tools" not in GATES[gate].depends:
                lost.append(f"{name}: {gate} does not depend on tools")
    assert lost == []


@pytest.mark.parametrize("gate", GATES.values(), ids=list(GATES))
def test_a_gate_names_what_is_there(gate: records.Gate) -> None:
    named = gate.tests + gate.depends
    assert [path for path in named if not (gates.REPOSITORY / path).exists()] == []


@pytest.mark.slow("pytest starts four times")
def test_what_passed_is_kept_and_what_failed_runs_again(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(records, "KEPT", tmp_path)
    monkeypatch.setattr(records, "ALWAYS", ("LICENSE",))  # which nobody edits during the test
    gate = records.Gate("planted", "one fails", ["tests/gates/planted.py"])

    def run(again: bool = False) -> tuple[int, str, bool]:
        code = gates.run_gates([gate], again, workers=0)
        row = re.search(r"^planted((?: +\d+){4}) +\d+:.*", capfd.readouterr().out, re.MULTILINE)
        assert row is not None
        return code, " ".join(row[1].split()), "FAILED" in row[0]

    columns = "passed kept skipped failed"
    assert run() == (1, "1 0 0 1", True), columns
    monkeypatch.setenv("PLANTED_PASSES", "1")
    assert run() == (0, "1 1 0 0", False), columns
    assert run() == (0, "0 2 0 0", False), columns
    assert run(again=True) == (0, "2 0 0 0", False), columns


def test_a_change_of_what_a_gate_depends_on_is_noticed(tmp_path, monkeypatch) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "loop.py").write_text("before")
    monkeypatch.setattr(records, "REPOSITORY", tmp_path)
    monkeypatch.setattr(records, "ALWAYS", ("harness",))
    gate = records.Gate("planted", "", [])
    before = gate.record()
    assert gate.record() == before
    (tmp_path / "harness" / "loop.py").write_text("after")
    assert gate.record() != before


def test_after_ctrl_c_pytest_cleans_up_first(tmp_path, monkeypatch) -> None:
    whole = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.setattr(subprocess.Popen, "wait", whole)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gates.exit_code_of(["bash", "-c", f"sleep 0.5; touch {tmp_path}/cleaned-up"])
    assert (tmp_path / "cleaned-up").exists()


def test_newest_lifts_all_upper_bounds_but_those_that_are_kept() -> None:
    project = tomllib.loads((gates.REPOSITORY / "pyproject.toml").read_text())["project"]
    bounded = [line for line in requirements(project, lift=True) if "<" in line]
    assert {line.split(">")[0].split("<")[0] for line in bounded} == {"deepspeed", "ruff", "wandb"}
    assert "torch>=2.10" in requirements(project, lift=True)
    assert {"pytest>=8.3", "optuna>=5,<6"} <= {*requirements(project, lift=False)}


# What releases may break: as much for one worker as for the other.
HALVES = ("run plan gates/test_parity.py", "models engine checkpoint layout")
# Files there that depend little on packages.
LEFT_OUT = [
    *(f"tests/plan/test_{name}.py" for name in ("batches", "data", "layouts", "make")),
    *(f"tests/plan/test_{name}.py" for name in ("optimizer", "swap_space")),
    *(f"tests/run/test_{name}.py" for name in ("meter", "pages", "step_clock")),
]


def test_files_that_are_left_out_are_there() -> None:
    assert [file for file in LEFT_OUT if not (gates.REPOSITORY / file).exists()] == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gate(name)) for name in ("oldest", "newest")]
)
@pytest.mark.parametrize("half", HALVES)
def test_tests_pass_with_other_packages(name: str, half: str) -> None:
    """The tests of `make test`, in an environment that is built if missing."""
    home = folder(name)
    home.parent.mkdir(exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # both halves need it
        if not (home / "bin" / "pytest").exists():
            build(name)
    environ = {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    environ["TORCH_EXTENSIONS_DIR"] = str(home / "operators")  # built for that torch
    rooms = [f"tests/{room}" for room in half.split()]
    ignored = [f"--ignore={file}" for file in LEFT_OUT]
    command = [home / "bin" / "python", "-m", "pytest", "-q", *ignored, *rooms]
    how = {"cwd": gates.REPOSITORY, "env": environ, "capture_output": True, "text": True}
    done = subprocess.run(command, **how)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.gate("mutants")
def test_small_changes_are_caught() -> None:
    command = [sys.executable, "-m", "tests.gates.mutants"]
    done = subprocess.run(command, cwd=gates.REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]


def test_drawn_changes_are_small_and_the_same_for_a_seed(tmp_path: Path) -> None:
    draw = pytest.importorskip("tests.gates.mutants.draw")
    (tmp_path / "harness").mkdir()
    small = beside(draw.__file__, "operators.toml")["small"]
    (tmp_path / "harness" / "a.py").write_text(small["text"])
    files = {"harness/a.py": 7}
    drawn = [list(islice(draw.draw(tmp_path, "harness", files, seed), 9)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    changed = set()
    for item in drawn[0]:  # all
        [change] = item.mutations
        operator = draw.get_operator(change.operator_name)()
        code = draw.mutate_code(small["text"], operator, change.occurrence).splitlines()
        pairs = zip(small["text"].splitlines(), code, strict=True)
        changed |= {after.strip() for before, after in pairs if before != after}
    assert changed == {*small["changed"]}
