"""The acceptance: how its steps run, end and are reported; and all of them on two CPU ranks."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.engine import build as building
from harness.engine import processes
from harness.layout.world import World
from tests.gates import check_parity
from tests.gates.cells import memory_cases, parity_cells
from tests.real_runs import REPOSITORY, environment
from tests.run_tools import run_tool
from tests.tables import beside
from tools import accept_gpu
from tools.accept_gpu import STEPS
from tools.acceptance import attention as attending
from tools.acceptance import machine as on_machine
from tools.acceptance import measured as measured_steps
from tools.acceptance import optimizer, parity, runs
from tools.acceptance.attention import _equal
from tools.acceptance.bench import Bench, Failed, Skipped
from tools.acceptance.measured import MOST, RUN_AHEAD
from tools.acceptance.parity import cell_of
from tools.acceptance.report import Check, Result, as_json, code
from tools.speed.cases import Case

CELL = ("llama", "zero1", "bf16")
TABLES = beside(__file__, "accept_gpu.toml")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return (ended command, its JSON) of all planted steps."""
    folder = tmp_path_factory.mktemp("planted")
    out, variables = folder / "out.json", environment(TMPDIR=str(folder))
    command = [sys.executable, "-m", "tests.planted_acceptance", "--json", str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    return done, json.loads(out.read_text())


def test_each_verdict_has_its_reason(planted: tuple[Any, Any]) -> None:
    done, result = planted
    assert done.returncode == result["code"] == 1
    steps = {step["step"]: step for step in result["steps"]}
    verdicts = {name: step["verdict"] for name, step in steps.items()}
    assert verdicts == TABLES["verdicts"]
    assert (result["ranks"], result["accelerator"]) == (2, "cpu")
    assert steps["good"]["values"] == {"number": 1}
    out = done.stdout
    assert "FAILED: what does not: 1 is not 2" in out
    assert "FAILED: what raises: ZeroDivisionError" in out
    assert "needs CUDA: another" in out
    assert "about to raise: OSError: no such thing" in steps["raising"]["problem"]
    assert steps["rubbish"]["problem"] == "it ended without a result"
    assert "1 of 5 steps held in" in out
    assert "skipped: skipped; FAILED: failing, raising, rubbish" in out.replace("\n", " ")


def test_the_table_fits_80_columns_whatever_a_step_prints(planted: tuple[Any, Any]) -> None:
    done, _ = planted
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\ngood           held" in done.stdout
    assert done.stdout.replace("\n", "").isprintable()
    assert "\x1b" not in done.stderr
    assert "3/5 failing: failing?" in done.stderr


def test_a_step_that_hangs_fails_with_its_place(tmp_path, monkeypatch, capsys) -> None:
    (hangs := tmp_path / "hangs").write_text('#!/bin/sh\nprintf hanging > "$4/now"; sleep 60')
    hangs.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hangs))
    monkeypatch.setattr(accept_gpu, "_SAY_EVERY_S", 0.5)
    result = accept_gpu._done(STEPS[0], tmp_path, 1, "cpu", 2.0)
    assert result.problem == "it took longer than 2 s and was stopped, at: hanging"
    assert result.seconds >= 1.9
    assert "of at most 2 s: hanging" in capsys.readouterr().err


NVIDIA_SMI = "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-01ab)'\n"


@pytest.fixture
def one_gpu(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which a driver tool lists one GPU, which torch cannot see."""
    (tool := tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DS_ACCELERATOR": "cuda"}


def test_one_gpu_takes_more_ranks_only_when_shared(one_gpu: dict[str, str]) -> None:
    done = run_tool("accept_gpu", "--ranks", "2", code=2, **one_gpu)
    assert "--ranks 2: it must be 1 to 1 here, and up to 8 with --share" in done.stderr
    done = run_tool("accept_gpu", "--share", "--ranks", "9", code=2, **one_gpu)
    assert "--ranks 9: it must be 1 to 8 here" in done.stderr
    done = run_tool("accept_gpu", "--share", "--only", "speed", code=0, **one_gpu)
    assert "2 ranks share 1 GPU, speed is not measured" in done.stderr
    assert "skipped: speed" in done.stdout


def test_help_has_an_example_and_every_step() -> None:
    text = run_tool("accept_gpu", "--help").stdout
    assert "python tools/accept_gpu.py --ranks 2 --only joining parity" in text
    assert all(f"  {step.name}" in text for step in STEPS)


@pytest.mark.parametrize(("visible", "places"), TABLES["visible"])
def test_deepspeed_gets_the_visible_gpus(
    visible: str, places: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(on_machine, "_launched", lambda bench, name, *words: " ".join(words))
    bench = Bench(tmp_path, tmp_path, 2, "cuda")
    if places:
        assert " ".join(places) in on_machine._by_deepspeed(bench)
    else:
        with pytest.raises(Skipped, match="by number, not as GPU-01ab"):
            on_machine._by_deepspeed(bench)


def test_steps_find_packages_of_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    (shows := tmp_path / "shows").write_text(f'#!/bin/sh\nprintf "$PYTHONPATH" > {asked}')
    shows.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shows))
    monkeypatch.setenv("PYTHONPATH", "/of/the/container")
    accept_gpu._done(STEPS[0], tmp_path, 1, "cpu", 60.0)
    assert asked.read_text() == os.pathsep.join([str(REPOSITORY), "/of/the/container"])


def test_verdicts_of_a_step() -> None:
    held, skipped = Check("a", "held"), Check("b", "skipped")
    assert Result("s", 1.0, problem="x", checks=(held,)).verdict == "failed"
    assert Result("s", 1.0).verdict == "failed"  # it has checked nothing
    results = [Result("s", 1.0, checks=(held,)), Result("t", 2.0, checks=(skipped,))]
    assert code(results) == as_json(results, {})["code"] == 0
    assert code([*results, Result("u", 1.0)]) == 1


def test_attention_is_held_to_the_precision_that_it_ran_in(tmp_path: Path) -> None:
    """There, "auto" means bf16: also on a CPU whose processor supports it."""
    row = {"loss": 9.023745, "expected": 9.023765, "gradients_apart": 1e-2, "precision": "bf16"}
    assert _equal(Bench(tmp_path, tmp_path, 2, "cpu"), row).startswith("bf16: loss 9.023745")
    for key, wrong in {"precision": "fp32", "loss": 9.1}.items():  # either is enough
        with pytest.raises(Failed, match="gradients 1e-02 apart"):
            _equal(Bench(tmp_path, tmp_path, 2, "cpu"), {**row, key: wrong})


def test_failed_attention_leaves_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(attention: str, *_: Any) -> Any:
        if attention == "varlen":
            raise ValueError("torch has no varlen_attn")
        return 9.0, {"w": torch.ones(2)}, {"precision": "bf16"}

    monkeypatch.setattr(attending, "_computed", computed)
    monkeypatch.setattr(processes, "join", lambda world: torch.device("cpu"))
    monkeypatch.setattr(processes, "ending_together", contextlib.nullcontext)
    attending.main([str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    bench = Bench(tmp_path, tmp_path, 1, "cuda")
    failed = [row for row in rows if "failed" in row]
    assert [row["attention"] for row in failed] == ["varlen", "varlen"]
    with pytest.raises(Failed, match="ValueError: torch has no varlen_attn"):
        _equal(bench, failed[0])
    assert len([row for row in rows if "loss" in row]) == len(rows) - 2
    monkeypatch.setattr(building, "build_engine", lambda plan, *_, **__: plan)
    engine = attending._engine("sdpa", False, World(), torch.device("cpu"), attending._LONG)
    assert engine.seq_len == attending._LONG  # which the tiny model lacks the positions for


def test_parity_is_read_off_the_lines_of_the_gate(tmp_path: Path) -> None:
    cell, worst = cell_of(*CELL, ranks=2), [0.0]
    gate = parity.Compared(Bench(tmp_path, tmp_path, 2, "cpu"), "cells")
    equal = f"{cell}   equal  loss 1.0e-05/2.0e-05  norm 1.0e-07/6.0e-07"
    gate.lines = {cell: equal}
    assert gate.judge("zero1", cell, worst) == "loss differs by 1.0e-05, 2.0e-05 is allowed"
    assert worst == [0.5]
    for distance in ("3.0e-04", "nan"):
        gate.lines = {cell: f"{equal}  held_out {distance}/1.0e-04!"}
        with pytest.raises(Failed, match="held_out differs by"):
            gate.judge("zero1", cell, worst)


def test_ranks_that_share_gpus_become_tasks_of_srun_with_one(monkeypatch) -> None:
    monkeypatch.setattr(on_machine, "visible_gpus", lambda: ["GPU-a", "GPU-b"])
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "DS_ACCELERATOR": "cuda"}
    with mock.patch.dict(os.environ, ranks):
        on_machine._become_srun()
        assert (os.environ["SLURM_PROCID"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("3", "GPU-b")


def test_curves_that_are_apart_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "closeness", lambda *_: (False, "apart"))
    with pytest.raises(Failed, match="apart"):
        runs._close(mock.MagicMock(), [], [], [])


def test_cells_and_cases_are_those_of_the_gates() -> None:
    assert {cell_of(*names, ranks=2) for names in parity._CELLS} <= {c.name for c in parity_cells()}
    assert {*measured_steps._CPU_CASES} <= {case.name for case in memory_cases()}
    for names, ranks, accumulated in ((CELL, 1, 4), (CELL, 8, 1), (parity._CELLS[-1], 4, 4)):
        cell = check_parity._all_cells([cell_of(*names, ranks=ranks)])[-1]
        assert (cell.ranks, cell.accumulation) == (ranks, accumulated)


def test_one_rank_has_no_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "train", lambda *of, **how: None)
    bench = Bench(tmp_path, tmp_path, 1, "cuda")
    runs.save(bench)
    skipped = {check.name: check.text for check in bench.checks if check.verdict == "skipped"}
    assert skipped == dict.fromkeys(("resume on other ranks", "replicas"), "needs two ranks")


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_runs_that_block_are_only_trained_on_gpus(accelerator: str, tmp_path, monkeypatch) -> None:
    for name in ("gate", "train"):
        monkeypatch.setattr(Bench, name, mock.Mock(side_effect=Failed("not trained here")))
    bench = Bench(tmp_path, tmp_path, 3, accelerator)
    parity.look(bench)
    names = [check.name for check in bench.checks]
    assert ("train with CUDA_LAUNCH_BLOCKING=1" in names) == (accelerator == "cuda")
    asked = vars(Bench)["gate"].call_args
    assert ("CUDA_LAUNCH_BLOCKING" in asked.kwargs) == (accelerator == "cuda")
    assert asked.args[2].endswith("-2")  # ranks, which divide the batch


@pytest.mark.parametrize("estimated", [0.8, 1.2])
def test_peaks_on_gpus_are_held_to_the_estimate(estimated: float, tmp_path, monkeypatch) -> None:
    line = {f"peak_{kind}_gib": 1.0 for kind in ("allocated", "reserved", "process")}
    line["estimated_gib"] = estimated
    monkeypatch.setattr(measured_steps, "measured", lambda *of: line)
    measured_steps.hold(bench := Bench(tmp_path, tmp_path, 1, "cuda"))
    verdicts = {check.name: check.verdict for check in bench.checks}
    assert verdicts == dict.fromkeys(measured_steps._GPU_CASES, "failed")


@pytest.mark.gate("tools")
@pytest.mark.slow
def test_op_build_is_taken_over_from_a_killed_builder(tmp_path: Path) -> None:
    own = tmp_path / "build"
    assert optimizer._killed_build(own) == "the build that waited for it succeeded"
    said = (own / "second" / "log.txt").read_text().splitlines()
    assert said[0].startswith(f"compiling DeepSpeed's planted in {own}/planted")
    assert said[1].startswith("waiting for another process that is building in")
    assert said[2].startswith("planted was ready after")
    assert said[3] == "loaded"


def test_sdpa_on_a_gpu_has_a_fused_kernel(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tmp_path, 1, "cuda")
    row: dict[str, Any] = {"loss": 9.0, "expected": 9.0, "gradients_apart": 0.0, "peak_gib": 1.0}
    row |= {"precision": "bf16", "attention": "sdpa"}
    flash = "void pytorch_flash::flash_fwd_kernel<...>"
    assert flash in _equal(bench, {**row, "kernels": [flash]})
    math = "void softmax_warp_forward<...>"
    for kernels in ([], [math]):
        with pytest.raises(Failed, match="sdpa is not fused"):
            _equal(bench, {**row, "kernels": kernels})
        _equal(bench, {**row, "kernels": kernels, "attention": "eager"})


def simulated(name: str) -> int:
    """Return the draining waits of a step of one micro-batch, from docs/host_waits.md."""
    total = 0
    for line in (REPOSITORY / "docs" / "host_waits.md").read_text().splitlines():
        place, _, when, runs = (*line.strip("| ").split(" | "), *[""] * 4)[:4]
        times = re.search(rf"(?:^|, ){name}(?: \((\d+)\))?(?:,|$)", runs)
        if times and when in ("step", "micro-batch") and not place.strip("`").startswith(RUN_AHEAD):
            total += int(times[1] or 1) // (2 if when == "micro-batch" else 1)
    return total


def test_limits_of_waits_are_those_of_the_simulation() -> None:
    assert {name: simulated(name) for name in MOST} == MOST


@pytest.mark.parametrize(("waits", "problem"), TABLES["waits"])
def test_more_waits_than_simulated_fail(
    waits: dict[str, int], problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"host_waits": waits, "host_waits_per_step": sum(waits.values())}
    monkeypatch.setattr(measured_steps, "measured", lambda *of: line)
    bench, counts = Bench(tmp_path, tmp_path, 1, "cuda"), {}
    if problem is None:
        assert measured_steps._counted(bench, "zero3", counts).startswith("96 waits per step")
        return
    with pytest.raises(Failed, match=problem):
        measured_steps._counted(bench, "zero3", counts)


def test_gpu_rungs_are_named_on_cpu_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"step_time_s": 1.0, "tokens_per_s_per_gpu": 1.0}
    monkeypatch.setattr(measured_steps, "measured", lambda *of, **more: line)
    bench = Bench(tmp_path, tmp_path, 2, "cpu")
    measured_steps.climb(bench)
    verdicts = {check.name: (check.verdict, check.text) for check in bench.checks}
    only = {name for name, verdict in verdicts.items() if verdict == ("skipped", "needs CUDA")}
    rungs = {"flash", "fused optimizer", "liger", "compile", "MFU and host waits"}
    assert only == {*rungs, *measured_steps.BESIDE}
    assert verdicts["eager"][0] == verdicts["sdpa"][0] == "held"


def test_rungs_without_time_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for GPUs on which each rung takes ten seconds, without the package for flash."""
    now = [0.0]
    tried: list[tuple[str, dict[str, str], dict[str, str]]] = []

    def measured(case: Case, json_path: Path, *of: Any, env: dict[str, str]) -> dict[str, Any]:
        tried.append((json_path.stem, case.settings, env))
        now[0] += 10
        line = {"step_time_s": 1.0, "tokens_per_s_per_gpu": now[0] % 50}
        return {"refused": "no package"} if case.name == "flash" else line

    monkeypatch.setattr(measured_steps, "measured", measured)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    bench = Bench(tmp_path, tmp_path, 2, "cuda", limit_s=75, began=0.0)
    assert measured_steps.climb(bench).startswith("40 tokens/s")  # neither the first nor the last
    late = [check.name for check in bench.checks if check.verdict == "skipped"]
    assert late == ["flash", "ZeRO 3"]
    assert [json_name for json_name, *_ in tried] == ["zero1"] * 7
    assert tried[2][1]["model.attention"] == "sdpa"  # without flash
    assert tried[5][1]["ds.timers.throughput.enabled"] == "true"
    assert "ds.timers.throughput.enabled" not in tried[6][1]  # which is not kept
    assert tried[6][2] == {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}


@pytest.mark.gate("tools")
def test_steps_hold_on_two_cpu_ranks(tmp_path: Path) -> None:
    """All but those that the README or other gates run, or that count what only a GPU has."""
    elsewhere = ("environment", "parity", "attention", "waits", "memory", "speed")
    out, names = tmp_path / "out.json", [s.name for s in STEPS if s.name not in elsewhere]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        words = ("--ranks", "2", "--limit", "3000", "--json", out, "--only", *names)
        done = run_tool("accept_gpu", *words)
    result = json.loads(out.read_text())
    verdicts = {step["step"]: step["verdict"] for step in result["steps"]}
    assert [*verdicts] == names
    assert {*verdicts.values()} == {"held"}
    checks = [check for step in result["steps"] for check in step["checks"]]
    why = {check["text"] for check in checks if check["verdict"] == "skipped"}
    assert all("CUDA" in text or "GPU" in text for text in why), why
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_gate_that_fails_gives_its_last_error(tmp_path: Path) -> None:
    code, lines, error = Bench(tmp_path, tmp_path, 1, "cpu").gate("none")
    assert (code, lines) == (1, [])
    assert error.endswith("No module named tests.gates.none")
