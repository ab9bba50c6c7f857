"""The memory gate: model states against live tensors on CPU ranks, and peaks on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.layout.shape import num_parameters
from harness.layout.world import World
from harness.plan.command import Command, plan_from
from tests.gates.cells import covering_cases, memory_cases
from tests.gates.gpu_memory import GPU_CASES, GpuCase, error_of, measure_gpu, verdict_of
from tests.run_tools import run_tool
from tests.tables import beside


def test_the_covering_set_covers() -> None:
    chosen, every = covering_cases(), memory_cases()
    assert set(chosen) <= set(every)
    for field in ("layout", "precision", "accumulation"):
        assert {getattr(case, field) for case in chosen} == {getattr(c, field) for c in every}


@pytest.mark.gate("memory")
def test_live_tensors_of_real_runs_are_what_was_predicted(tmp_path: Path) -> None:
    done = run_tool("measure_memory", f"--out={tmp_path}")
    saved = [c for c in covering_cases() if c.counts_saved and not c.layout.endswith("zero3")]
    # Three points on every rank, and the saved bytes.
    counts = sum(3 * case.ranks for case in covering_cases()) + sum(case.ranks for case in saved)
    assert done.stdout.splitlines()[-1] == f"{counts} counts, 0 off by more than 1%"


def planned(case: GpuCase) -> Any:
    settings = {"train.global_batch": str(case.micro_batch * case.accumulation), **case.settings}
    assignments = tuple(f"{key}={value}" for key, value in settings.items())
    world = World(accelerator="cuda", gpu="h100-80")
    return plan_from(Command(case.deepspeed, assignments=assignments), world=world)


def test_the_cases_are_many_and_span_what_was_asked_for() -> None:
    assert len({case.name for case in GPU_CASES}) == len(GPU_CASES) >= 20
    plans = [planned(case) for case in GPU_CASES]
    assert {plan.zero_stage for plan in plans} == {0, 1, 2, 3}
    lengths = [plan.config.data.seq_len for plan in plans]
    assert (min(lengths), max(lengths)) == (512, 32768)
    sizes = [num_parameters(plan.shape) for plan in plans]
    assert min(sizes) < 0.2e9
    assert max(sizes) > 8e9
    assert {plan.config.model.checkpointing for plan in plans} == {"none", "full"}
    assert any("offload" in case.json for case in GPU_CASES)
    verdicts = [plan.estimate.verdict for plan in plans]
    assert verdicts.count("fits") >= 20
    assert "guessed" not in {plan.estimate.evidence for plan in plans if plan.zero_stage == 0}


def row(estimated: float, measured: float, more: dict[str, Any]) -> dict[str, Any]:
    found = {"case": "c", "verdict": "fits", "estimated_gib": estimated, **more}
    return {**found, "peak_allocated_gib": measured} if measured else found


@pytest.mark.parametrize(("rows", "said", "as_aimed"), beside(__file__, "memory.toml")["rows"])
def test_what_the_rows_come_to(rows: list[Any], said: str, as_aimed: bool) -> None:
    text, found = verdict_of([row(*values) for values in rows])
    assert said in text
    assert found is as_aimed


@pytest.mark.gate("memory")
def test_a_case_runs_in_a_process_of_its_own_and_is_kept(tmp_path: Path) -> None:
    case = GpuCase("tiny", "fp32", 32, 1, ("model.overrides.num_hidden_layers=1",))
    (first,) = measure_gpu([case], tmp_path, ranks=1)
    assert first["estimated_gib"] > 0
    assert first["peak_process_gib"] > 0  # of a CPU rank, which is not compared
    assert error_of(first) is None
    (kept,) = tmp_path.iterdir()
    kept.write_text(json.dumps({"estimated_gib": 1.0, "peak_allocated_gib": 2.0}))
    (again,) = measure_gpu([case], tmp_path, ranks=1)
    assert error_of(again) == -0.5


def test_without_a_gpu_it_says_so() -> None:
    refused = run_tool("measure_memory", "--gpu", code=2)
    assert "there is no GPU on this machine" in refused.stderr
