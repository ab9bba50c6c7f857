"""A host's launches of a layer are measured once and used by later plans on it."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.config.run_config import RunConfig
from harness.engine import launches
from harness.estimate.step_time.host import kept_launch_ms
from harness.layout.world import World
from harness.plan.duration import step_time
from harness.plan.make import make_plan

CPU = torch.device("cpu")
NODE = World(world_size=8, local_world_size=8, accelerator="cuda", gpu="NVIDIA H100 80GB HBM3")


def test_a_slow_host_takes_longer_to_launch_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    usual, linear = launches.launch_seconds(CPU), torch.nn.Linear.forward
    assert torch.equal(torch.rand(3), drawn)  # a run's own random numbers stay

    def late(self: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return linear(self, rows)

    monkeypatch.setattr(launches, "_LAUNCHED", 9)
    monkeypatch.setattr(torch.nn.Linear, "forward", late)
    assert 0 < usual < 0.007 <= launches.launch_seconds(CPU)  # seven linear layers


def test_a_measured_host_is_used_by_plans_on_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launches, "own_device", lambda _: CPU)
    monkeypatch.setattr(launches, "launch_seconds", lambda _: 0.4e-3)
    for world in (replace(NODE, accelerator="cpu"), replace(NODE, local_rank=1)):
        launches.measure_host(world)
        assert kept_launch_ms() is None
    launches.measure_host(NODE)
    assert kept_launch_ms() == 0.4
    monkeypatch.setattr(launches, "launch_seconds", lambda _: 9.9)
    launches.measure_host(NODE)
    assert kept_launch_ms() == 0.4  # once
    scales = []
    for here in (True, False):
        run = RunConfig.model_validate({"model": {"name": "llama-1b"}})
        step = step_time(make_plan(run, {"bf16": {"enabled": True}}, NODE, here=here))
        assert step is not None
        scales.append(step.machine.launch_scale)
    assert scales == [0.25, 1.0]  # of 1.6 ms
    next(tmp_path.rglob("host-*")).write_text("{")
    assert kept_launch_ms() is None
