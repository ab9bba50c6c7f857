"""The benchmark of a training step, on the CPU: its arithmetic, its cases, how they end."""

from __future__ import annotations

import argparse
import json

import pytest

from harness.config.run_file import load_run_config
from harness.layout.shape import flops_per_token
from harness.layout.world import World
from harness.plan.command import DEFAULT_DS_JSON
from harness.plan.make import make_plan
from tests.run_tools import run_tool
from tests.two_ranks import SMALL_MODEL
from tools import benchmark_gpu
from tools.speed.cases import LADDER, Case, swept

SHORT = ("--steps=3", "--warmup=1", "data.seq_len=32", *SMALL_MODEL)


def test_sweeps_are_combined_each_by_each() -> None:
    cases = [*swept({"model.name": "tiny"}, ["micro_batch=1,2", "model.checkpointing=none,full"])]
    assert len(cases) == 4
    assert cases[-1].settings == {
        "model.name": "tiny",
        "train.micro_batch": "2",
        "model.checkpointing": "full",
    }
    assert [case.name for case in swept({}, [])] == ["base"]


@pytest.mark.parametrize("text", ["micro_batch", "micro_batch=", "micro_batch=1,,2"])
def test_a_sweep_without_values_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="KEY=VALUE,VALUE"):
        [*swept({}, [text])]


def test_every_rung_stands_on_those_before_it() -> None:
    case = Case("base", {"train.micro_batch": "2"})
    for rung in LADDER:
        case = case.on_top(rung)
    assert case.settings == {
        "train.micro_batch": "2",
        "model.attention": "flash_attention_2",
        "model.kernels": "liger",
        "model.compile": "true",
        "model.checkpointing": "full",
    }


@pytest.mark.slow
def test_a_sweep_times_every_case_in_a_process_of_its_own() -> None:
    done = run_tool("benchmark_gpu", *SHORT, "--sweep", "micro_batch=1,x,2")
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
        shape = make_plan(load_run_config(None, SMALL_MODEL), {}, World()).shape
        assert shape
        tflops = flops_per_token(shape, 32) * tokens_per_s / 1e12
        assert line["tflops_per_gpu"] == pytest.approx(tflops)


@pytest.mark.slow
def test_what_is_out_of_memory_is_a_line_beside_its_estimate() -> None:
    longest = "data.seq_len=1000000"
    more = ("model.attention=eager", "model.overrides.max_position_embeddings=1000000")
    done = run_tool("benchmark_gpu", *SHORT, longest, *more, code=1)
    (line,) = [json.loads(text) for text in done.stdout.splitlines()]
    assert line["error"].startswith("out of memory")
    assert line["estimated_gib"] > 1000


@pytest.mark.slow
def test_a_rung_that_this_machine_lacks_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rungs = {name: LADDER[name] for name in ("eager", "flash", "checkpointing")}
    monkeypatch.setattr(benchmark_gpu, "LADDER", rungs)
    args = argparse.Namespace(deepspeed=DEFAULT_DS_JSON, ranks=1, warmup=1, steps=1)
    base = {"train.micro_batch": "1", **dict(text.split("=") for text in SHORT[2:])}
    eager, flash, full = benchmark_gpu._climbed([Case("base", base)], args)
    assert eager["step_time_s"] > 0
    assert "it needs a GPU and the package flash_attn" in flash["skipped"]
    assert full["step_time_s"] > 0  # on top of eager attention, not of flash
    assert len(capsys.readouterr().out.splitlines()) == 3
