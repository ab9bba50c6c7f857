"""The time in a plan: for clusters that are elsewhere, and no guess on CPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.command import parse_command, plan_from
from harness.plan.duration import job_of, length, step_time
from harness.plan.other_machine import cluster
from harness.plan.text import describe, summary
from tests.run_tools import printed

ROOT = Path(__file__).parents[2]
WORDS = ["--dry-run", "model.name=llama-1b", "data.seq_len=2048", "train.global_batch=64"]


def test_a_cluster_is_planned_from_a_laptop() -> None:
    command = parse_command([*WORDS, "--gpus", "64", "--gpu", "h100-80"])
    world = command.elsewhere()
    assert world == World(world_size=64, local_world_size=8, accelerator="cuda", gpu="h100-80")
    plan = plan_from(command, world=world)
    text = describe(plan, elsewhere=True)
    assert re.search(r"^time  .* s a step .* GPU-hours without", text, re.MULTILINE)
    assert re.search(r"^the cluster    fits", text, re.MULTILINE)
    assert "this machine" not in text
    step = step_time(plan)
    assert step is not None
    job = job_of(plan, step)
    assert job is not None
    assert job.seconds == pytest.approx(100 * step.seconds)


def test_a_cluster_that_is_too_small_gets_changes_that_help() -> None:
    command = parse_command([*WORDS, "model.name=llama-3-70b", "--gpus", "8", "--gpu", "a100-80"])
    text = describe(plan_from(command, world=command.elsewhere()), elsewhere=True)
    assert re.search(r"^the cluster    does not fit: \w", text, re.MULTILINE)


def test_nobody_guesses_the_time_on_a_cpu() -> None:
    plan = plan_from(parse_command(WORDS), {"DS_ACCELERATOR": "cpu"})
    assert step_time(plan) is None
    assert "\ntime " not in summary(plan)


def test_a_cluster_has_all_its_problems_in_one_report() -> None:
    with pytest.raises(ConfigError) as caught:
        cluster(0, -1, "h9000")
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="--gpus 12 do not fill nodes of 8"):
        cluster(12, None, "h100-80")


def test_other_machines_are_for_dry_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command(["--gpus", "4"])
    assert "add --dry-run" in capsys.readouterr().err


def test_a_plan_with_its_time_needs_no_torch() -> None:
    code = """
import sys
from harness.plan.command import parse_command, plan_from
from harness.plan.text import describe
command = parse_command(["--dry-run", "--gpus", "8", "--gpu", "a100-80", "model.name=llama-1b"])
text = describe(plan_from(command, world=command.elsewhere()), True)
print("time" in text, "torch" in sys.modules)
"""
    assert printed(code).splitlines()[-1] == "True False"


def test_lengths_are_read_at_a_glance() -> None:
    assert [length(s) for s in (90, 7200, 86400, 864000)] == [
        *("2 minutes", "2.0 hours", "24.0 hours", "10.0 days")
    ]
