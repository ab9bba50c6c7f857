"""model.kernels and model.compile: what is refused, what is said, what a compiled run does."""

from __future__ import annotations

import gzip
import importlib.util
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from harness.checkpoint.resume import resume_problems
from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.plan.text import describe
from harness.runfolder import RunFolder
from tests.two_ranks import REPOSITORY, SHORT_RUN, SMALL_MODEL, events
from tools.proofs.zygote import Zygote

GPU = World(accelerator="cuda", gpu="h100-80")


def planned(*words: str, world: World = GPU, **ds: object) -> Plan:
    return make_plan(load_run_config(None, words), ds, world)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with the packages."""
    find_spec = importlib.util.find_spec
    theirs = ("liger_kernel", "triton")

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name in theirs else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_liger_needs_a_gpu_and_its_package() -> None:
    with pytest.raises(ConfigError, match="it needs a GPU and the package liger-kernel"):
        planned("model.kernels=liger", world=World())
    if importlib.util.find_spec("liger_kernel") is None:
        with pytest.raises(ConfigError, match=r"model\.kernels is 'liger' \(command line\)"):
            make_plan(load_run_config(None, ("model.kernels=liger",)), {}, GPU, here=True)
    assert planned("model.kernels=liger").estimate  # of another machine, whose packages are its own


@pytest.mark.usefixtures("installed")
def test_liger_is_for_families_that_were_compared() -> None:
    assert planned("model.kernels=liger").config.model.kernels == "liger"
    with pytest.raises(ConfigError, match="it is for llama, mistral, qwen2, qwen3, not gpt2"):
        planned("model.kernels=liger", "model.name=gpt2-124m")


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"model\.compile is True .*it needs a C\+\+ compiler"):
        planned("model.compile=true", world=World())


def test_neither_goes_with_pipeline_stages() -> None:
    with pytest.raises(ConfigError, match=r"model\.compile \(command line\): not with pipeline"):
        planned("model.compile=true", world=World(world_size=2), pipeline={"stages": 2})


@pytest.mark.usefixtures("installed")
def test_the_plan_says_so_and_its_estimate_is_a_guess() -> None:
    plain, fused = planned(), planned("model.kernels=liger", "model.compile=true")
    assert ", kernels: liger, decoder layers compiled" in describe(fused)
    assert "compiled" not in describe(plain)
    (event,) = [event for event in fused.events if event["kind"] == "estimated_unfused"]
    assert event["message"] in describe(fused)
    for plan, evidence in ((plain, "traced"), (fused, "guessed")):
        assert plan.estimate
        assert plan.estimate.worst.evidence("activations: mlp") == evidence


def test_both_may_change_when_a_run_goes_on() -> None:
    before = {"run": {"model": {"kernels": "none", "compile": False}}}
    after = {"run": {"model": {"kernels": "liger", "compile": True}}}
    assert resume_problems(before, after, []) == []


@pytest.mark.slow
def test_a_run_goes_on_compiled_with_the_curve_of_one_that_is_not(
    zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    words = [
        f"--deepspeed={REPOSITORY / 'ds_configs' / 'zero3_offload.json'}",
        *(*SMALL_MODEL, *SHORT_RUN, *data, "model.checkpointing=full", "sample.tokens=6"),
        *("model.overrides.num_hidden_layers=3", "optim.schedule=constant"),
    ]

    def train(name: str, *more: str) -> RunFolder:
        arguments = [*words, *more, f"run.dir={tmp_path / name}"]
        ended = zygote.run(arguments, tmp_path / "logs", ranks=1, limit_s=400)
        assert ended.codes == [0], ended.output
        assert "recompile_limit" not in ended.output
        return RunFolder(tmp_path / name)

    plain = train("plain", "train.steps=6")
    train("compiled", "train.steps=3")
    compiled = train("compiled", "train.steps=6", "model.compile=true", "profile.steps=4:6")
    (resumed,) = events(compiled, "resumed")
    assert "model.compile" in {change["key"] for change in resumed["changes"]}
    curves = [[line.get("loss") for line in run.read_metrics()] for run in (plain, compiled)]
    assert curves[1][1:4] == curves[0][1:4]
    assert curves[1][4:] == pytest.approx(curves[0][4:], abs=2e-6)
    with gzip.open(compiled.profile_dir / "trace-4-5.json.gz", "rt") as trace:
        assert "CompiledFunctionBackward" in trace.read()
    assert "aten.mm" in (compiled.profile_dir / "flops-6.txt").read_text()
