"""The benchmark of a training step, on the CPU: its arithmetic, its cases, and their results."""

import argparse
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from harness.config.run_file import load_run_config
from harness.layout.shape import flops_per_token
from harness.layout.world import World
from harness.plan import resolve_auto
from harness.plan.command import DEFAULT_DS_JSON
from harness.plan.make import make_plan
from tests.real_runs import REPOSITORY, SMALL_MODEL
from tests.run_tools import run_tool
from tests.tables import beside
from tools import benchmark_gpu
from tools.benchmark_gpu import losses_apart
from tools.speed import worker
from tools.speed.cases import LADDER, Case, measured, swept
from tools.speed.worker import Enough, Recorder, call_site, counted_waits, fallbacks

SHORT = ("--steps=3", "--warmup=1", "data.seq_len=32", *SMALL_MODEL)


def test_sweeps_are_combined_each_by_each() -> None:
    cases = [*swept({"model.name": "tiny"}, ["micro_batch=1,2", "model.checkpointing=none,full"])]
    assert len(cases) == 4
    more = {"train.micro_batch": "2", "model.checkpointing": "full"}
    assert cases[-1].settings == {"model.name": "tiny", **more}
    assert [case.name for case in swept({}, [])] == ["base"]


@pytest.mark.parametrize("text", ["micro_batch", "micro_batch=", "micro_batch=1,,2"])
def test_a_sweep_without_values_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="KEY=VALUE,VALUE"):
        [*swept({}, [text])]


def test_every_rung_stands_on_those_before_it() -> None:
    case = Case("base", {"train.micro_batch": "2"})
    for rung in LADDER:
        case = case.on_top(rung)
    assert case.settings == beside(__file__, "benchmark_gpu.toml")["ladder"]


def test_the_device_is_waited_for_between_windows_of_steps() -> None:
    assert worker._ends(5, 20) == [5, 10, 15, 20, 25]
    assert worker._ends(1, 3) == [1, 2, 3, 4]
    assert worker._ends(2, 1) == [2, 3]


def test_waits_of_a_gpu_are_counted_in_an_untimed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a run whose device is a GPU: every step reads a tensor once."""
    waited, modes, losses = [], [], iter((4.0, 3.0, 2.0, 1.0))
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)

    def train_batch() -> SimpleNamespace:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return SimpleNamespace(loss_share=torch.tensor(next(losses)))

    engine = SimpleNamespace(device=SimpleNamespace(type="cuda"), train_batch=train_batch)
    recorder = Recorder(SimpleNamespace(engine=engine, sum=torch.Tensor.tolist), 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            engine.train_batch()
        with pytest.raises(Enough):
            engine.train_batch()
    report = recorder.report()
    assert len(waited) == 3  # at the ends of two windows with one step each, and before them
    assert (report["losses"], report["loss"]) == ([4.0, 3.0, 2.0], 2.0)
    assert report["host_waits_per_step"] == 1
    assert modes[-1] == 0  # as before
    assert report["step_time_s"] > 0


@pytest.mark.parametrize(("losses", "differs"), beside(__file__, "benchmark_gpu.toml")["losses"])
def test_a_rung_with_another_loss_is_named(losses: list[float], differs: bool) -> None:
    lowest = {"precision": "fp32", "losses": [5.0, 4.0, 3.0]}
    message = losses_apart({"losses": losses}, lowest)
    assert bool(message) == differs
    if message and losses[0] == 5.0:
        assert "4.01, not 4" in message
    assert losses_apart(lowest, {}) is None  # the lowest rung itself


def test_waits_are_counted_by_the_line_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns about reads of a tensor, but not about explicit waits."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)

    def reads() -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=2)

    with counted_waits() as places:
        for _ in range(2):
            reads()
        torch.cuda.synchronize()
        warnings.warn("something else", stacklevel=1)
    assert modes == ["warn", 0]
    lines = {place.rpartition(":")[0] for place in places}
    assert lines == {"tests/test_benchmark_gpu.py"}
    assert sorted(places.values()) == [1, 2]
    torch.cuda.synchronize()
    assert sum(places.values()) == 3  # no longer counted


def test_a_folder_called_torch_hides_no_line() -> None:
    """Only torch's own lines are skipped: an environment may be in a folder of that name."""
    packages = "/home/torch/env/lib/python3.12/site-packages"
    own = f"{Path(torch.__file__).parent}/cuda/__init__.py"
    frames = [
        (f"{REPOSITORY}/harness/loop.py", "harness/loop.py"),
        (f"{packages}/deepspeed/runtime/utils.py", "deepspeed/runtime/utils.py"),
        ("/usr/lib/python3/dist-packages/deepspeed/zero.py", "deepspeed/zero.py"),
        ("/data/torch/clone/harness/loop.py", "/data/torch/clone/harness/loop.py"),
    ]
    for file, shown in frames:
        stack = traceback.StackSummary.from_list([(file, 7, "f", ""), (own, 1, "synchronize", "")])
        assert call_site(stack) == f"{shown}:7"


def test_only_lack_of_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"--deepspeed={DEFAULT_DS_JSON}", *SHORT[:2], f"--out={tmp_path / 'out.json'}"]
    monkeypatch.setattr("sys.argv", ["worker", *words, *SMALL_MODEL])
    for error in (KeyError("memory"), torch.OutOfMemoryError("no room\nat all")):
        assert not (tmp_path / "out.json").exists()
        monkeypatch.setattr(worker, "timed", mock.Mock(side_effect=error))
        with pytest.raises(type(error)):
            worker.main()
    assert json.loads((tmp_path / "out.json").read_text())["error"] == "out of memory: no room"


def test_fallbacks_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run_config(None, SMALL_MODEL)
    assert fallbacks(make_plan(config, {}, World()).events) == []
    monkeypatch.setattr(resolve_auto, "cpu_has_bf16", lambda: False)
    planted = {"bf16": {"enabled": "auto"}, "autotuning": {"enabled": True}}
    changed, without_bf16 = sorted(fallbacks(make_plan(config, planted, World()).events))
    assert changed.startswith("autotuning.enabled is False, not True")
    assert without_bf16 == "fp32, because this CPU has no bfloat16 arithmetic"
    source = "".join(path.read_text() for path in (REPOSITORY / "harness").rglob("*.py"))
    assert all(f'"{kind}"' in source for kind in worker.FALLBACKS)


def test_rates_are_those_of_one_of_the_ranks() -> None:
    plan = make_plan(load_run_config(None, SMALL_MODEL), {}, World(world_size=2))
    assert worker._rates(plan, 0.5)["tokens_per_s_per_gpu"] == plan.global_batch * plan.seq_len


@pytest.mark.parametrize(
    ("micro_batch", "ranks", "batch"), [("1", 1, "1"), ("3", 2, "6"), ("auto", 2, "auto")]
)
def test_a_case_has_paths_of_the_caller_and_one_micro_batch(
    micro_batch: str, ranks: int, batch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shows := tmp_path / "shows").write_text(
        '#!/bin/sh\npwd > pwd; echo "$@" > words; echo $PYTHONPATH > path; exit 3'
    )
    shows.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(shows))
    case = Case("base", {"train.micro_batch": micro_batch, "plan.force": "false"})
    line = measured(case, DEFAULT_DS_JSON, ranks, 1, 1)
    assert line["error"] == "ended with code 3: no output"
    assert f"plan.force=false train.global_batch={batch} " in (tmp_path / "words").read_text()
    assert (tmp_path / "path").read_text().strip().split(os.pathsep)[0] == str(REPOSITORY)


@pytest.mark.gate("tools")
def test_a_sweep_times_every_case_in_a_process_of_its_own(data: list[str]) -> None:
    planted = "ds.autotuning.enabled=true"
    done = run_tool("benchmark_gpu", *SHORT, *data, planted, "--sweep", "micro_batch=1,x,2")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == [f"train.micro_batch={n}" for n in ("1", "x", "2")]
    assert "train.micro_batch is 'x'" in lines[1]["refused"]
    assert "MFU = that / the GPU's dense peak" in done.stderr
    for line, micro_batch in ((lines[0], 1), (lines[2], 2)):
        low, high = line["step_time_s_range"]
        assert 0 < low <= line["step_time_s"] <= high
        tokens_per_s = micro_batch * 32 / line["step_time_s"]
        assert line["tokens_per_s_per_gpu"] == pytest.approx(tokens_per_s)
        assert line["peak_process_gib"] > 0
        assert line["estimated_gib"] > 0
        assert len(line["losses"]) == 1 + 3
        assert line["loss"] == line["losses"][-1]
        assert line["host_waits_per_step"] is None  # a CPU has none
        assert any("autotuning.enabled is False, not True" in why for why in line["fallbacks"])
        shape = make_plan(load_run_config(None, SMALL_MODEL), {}, World()).shape
        assert shape
        tflops = flops_per_token(shape, 32) * tokens_per_s / 1e12
        assert line["tflops_per_gpu"] == pytest.approx(tflops)


@pytest.mark.gate("tools")
def test_what_is_out_of_memory_is_a_line_beside_its_estimate(tmp_path: Path) -> None:
    """Needs a mask of 300,000 x 300,000, too large for any test machine."""
    (tmp_path / "texts").mkdir()
    for number in range(24):
        (tmp_path / "texts" / f"{number}.txt").write_text("a few words of a long text\n" * 10_000)
    longest = ("data.seq_len=300000", "model.overrides.max_position_embeddings=300000")
    more = ("model.attention=eager", "data.held_out=0.5", f"data.path={tmp_path / 'texts'}")
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    done = run_tool("benchmark_gpu", *SHORT, *longest, *more, cache, code=1)
    (line,) = [json.loads(text) for text in done.stdout.splitlines()]
    assert line.get("error", "").startswith("out of memory"), line
    assert line["estimated_gib"] > 1000


@pytest.mark.gate("tools")
def test_a_case_ends_at_its_limit() -> None:
    done = run_tool("benchmark_gpu", *SHORT, "--limit=1", code=1)
    (line,) = [json.loads(text) for text in done.stdout.splitlines()]
    assert line["error"].startswith("not finished after 1 s")


@pytest.mark.gate("tools")
def test_unavailable_rung_is_skipped_with_reason(monkeypatch, capsys, data: list[str]) -> None:
    rungs = {name: LADDER[name] for name in ("eager", "flash", "checkpointing")}
    monkeypatch.setattr(benchmark_gpu, "LADDER", rungs)
    args = argparse.Namespace(deepspeed=DEFAULT_DS_JSON, ranks=2, warmup=1, steps=1, limit=3000)
    base = {"train.micro_batch": "1", **dict(text.split("=") for text in (*SHORT[2:], *data))}
    eager, flash, full = benchmark_gpu._climbed([Case("base", base)], args)
    assert eager["step_time_s"] > 0
    assert eager["all_reduce_gb_per_s"] > 0
    assert eager["losses"][:2] == pytest.approx(full["losses"][:2])
    assert "differs" not in full
    assert "it needs a GPU and the package flash_attn" in flash["skipped"]
    assert full["step_time_s"] > 0  # in addition to eager attention, not flash
    assert len(capsys.readouterr().out.splitlines()) == 3
