"""A host's launches of a layer are measured once and used by later plans on such hosts."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.config.run_config import RunConfig
from harness.engine import launches
from harness.estimate.step_time.calibration import Site
from harness.estimate.step_time.host import kept_launch_ms
from harness.layout.world import World
from harness.plan.duration import step_time
from harness.plan.make import make_plan

CPU = torch.device("cpu")
NODE = World(world_size=8, local_world_size=8, accelerator="cuda", gpu="NVIDIA H100 80GB HBM3")
GPU = "h100-sxm"


def test_a_slow_host_takes_longer_to_launch_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    monkeypatch.setattr(launches, "_LAUNCHED", 9)
    usual, linear = launches.launch_ms(CPU), torch.nn.Linear.forward
    assert torch.equal(torch.rand(3), drawn)  # a run's own random numbers stay
    assert usual

    def late(self: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return linear(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", late)
        slow = launches.launch_ms(CPU)
    assert slow
    assert slow - usual > 100  # seven linear layers
    monkeypatch.setattr(torch.nn.Linear, "forward", None)
    assert launches.launch_ms(CPU) is None  # it ends no run


def test_a_measured_host_is_used_by_plans_on_it(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launches, "own_device", lambda _: CPU)
    monkeypatch.setattr(launches, "launch_ms", lambda _: 0.4)
    changes: list[dict[str, Any]] = [{"local_rank": 1}, {"ranks_per_gpu": 2}, {"gpu": "unknown"}]
    for change in changes:
        gathered: list[None] = []
        monkeypatch.setattr(launches, "gather_objects", gathered.append)
        assert launches.measure_host(replace(NODE, **change)) == ""
        assert len(gathered) == 2  # ranks that measure nothing wait with the others
        assert not [*tmp_path.rglob("*")]
    assert launches.measure_host(replace(NODE, accelerator="cpu")) == ""
    assert launches.measure_host(NODE).startswith("this host launches a layer in 0.40 ms: kept")
    monkeypatch.setattr(launches, "launch_ms", lambda _: 9.9)
    assert launches.measure_host(NODE) == ""  # once
    assert (kept_launch_ms(GPU), kept_launch_ms("a100-80")) == (0.4, None)

    Site(GPU, "bf16", 8, {"launch_scale": 2.0}, 1, 0.0).write(tmp_path / "site.json")
    scales = []
    for here, rates in ((True, None), (False, None), (True, str(tmp_path / "site.json"))):
        run = RunConfig.model_validate({"model": {"name": "llama-1b"}, "plan": {"rates": rates}})
        step = step_time(make_plan(run, {"bf16": {"enabled": True}}, NODE, here=here))
        assert step is not None
        scales.append(step.machine.launch_scale)
    assert scales == [0.25, 1.0, 2.0]  # of 1.6 ms
    next(tmp_path.rglob("host-*")).write_text("{")
    assert kept_launch_ms(GPU) is None
