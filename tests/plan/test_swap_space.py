"""Disk for checkpoints and optimizer states: what a machine lacks, and that states are exact."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.config.ds_json import read_ds_json
from harness.config.run_config import RunConfig
from harness.config.run_file import load_run_config
from harness.layout.world import World
from harness.plan import machine
from harness.plan.machine import short_of_disk, swap_problems
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from tests.run_tools import run_tool
from tests.shipped import DS_CONFIGS
from tests.tables import beside


def plan(folder: Path, name: str = "zero3_nvme") -> Plan:
    ds = read_ds_json(DS_CONFIGS / f"{name}.json")
    if name == "zero3_nvme":
        ds["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folder)
    return make_plan(RunConfig(), ds, World(world_size=2, local_world_size=2))


def has_libaio() -> bool:
    return machine.libaio_problems() == []


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has libaio."""
    monkeypatch.setattr(machine, "libaio_problems", list)


@pytest.mark.parametrize(
    ("checkpoints", "keys", "due", "is_hopeless"), beside(__file__, "swap_space.toml")["disk"]
)
def test_a_run_needs_disk_for_one_more_checkpoint_than_it_keeps(
    checkpoints: float,
    keys: list[str],
    due: int,
    is_hopeless: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["train.steps=100", "save.every=10", "save.export=false", f"run.dir={tmp_path}/a/b"]
    made = make_plan(load_run_config(None, [*words, *keys]), {}, World())
    free = int(checkpoints * made.estimate.checkpoint_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    text, refuses = short_of_disk(made, [])
    assert (bool(text), refuses) == (due > 0, is_hopeless)
    assert f"for {due} checkpoint" in text or not due
    assert f"are free in {tmp_path}" in text or not due
    assert ("lower save.keep" in text) == (due > 0 and not is_hopeless)


@pytest.mark.usefixtures("anywhere")
def test_folder_without_room_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert swap_problems(plan(tmp_path)) == []
    for none in (tmp_path / "none", tmp_path / ("none" * 99)):
        (problem,) = swap_problems(plan(none))
        assert f"offload_optimizer.nvme_path is {none}, which is not a folder" in problem
        assert "set ds.zero_optimization.offload_optimizer.nvme_path to a folder" in problem
    with monkeypatch.context() as here:
        here.setattr(machine.os, "access", lambda *_: False)  # root may write anywhere
        (problem,) = swap_problems(plan(tmp_path))
        assert "where this user cannot write" in problem
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    (problem,) = swap_problems(plan(tmp_path))
    # Master weights, moments and gradients of 5,015,232 parameters, 16 bytes each.
    assert "need 0.07 GiB" in problem
    assert "0.00 GiB are free" in problem


def test_no_libaio_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")  # a compiler that finds nothing
    (problem,) = swap_problems(plan(tmp_path))
    assert "apt install libaio-dev" in problem
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    (problem,) = swap_problems(plan(tmp_path))
    assert "apt install g++" in problem


def test_runs_without_a_drive_ask_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    assert swap_problems(plan(tmp_path, "zero3_offload")) == []
    unknown = replace(plan(tmp_path), estimate=None)  # its files are not counted
    assert len(swap_problems(unknown)) == 1


@pytest.mark.slow("Two tables train; and it runs with NVME=1 alone.")
@pytest.mark.skipif(not has_libaio(), reason="libaio is not here")
@pytest.mark.skipif("NVME" not in os.environ, reason="NVME=1 compiles the reads and writes: 8 min")
def test_states_in_files_change_nothing_and_are_saved() -> None:
    done = run_tool("check_parity", "--cells", "llama_wide-zero3_nvme-fp32-2-2")
    assert "1 cells, 0 differ" in done.stdout
    sides = ("zero3_nvmex2-zero3_nvmex2", "zero1x2-zero3_nvmex2", "zero3_nvmex2-zero3_nvmex1")
    cells = [f"fp32-llama_wide-{side}" for side in sides]
    done = run_tool("check_checkpoints", "--cells", *cells)
    assert "3 cells: every tensor equal in 3" in done.stdout
    assert "bit-equal in 1 of 1 on the same layout; 0 differ" in done.stdout
