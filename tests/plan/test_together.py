"""Layouts that exclude each other, and sizes that do not divide: one report with alternatives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.make import make_plan
from tools.proofs.models import LEARNED

STAGES = {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}
ROWS = {"sequence_parallel_size": 2}
TENSORS = {"tensor_parallel": {"autotp_size": 2}}
TENSOR, SEQUENCE, EXPERT = (
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    "expert_parallel.autoep_size",
)


def experts(size: int) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, "autoep_size": size}}


def problems(
    ds: dict[str, Any], ranks: int = 4, *, estimating: bool = False, **sections: Any
) -> list[str]:
    run = RunConfig.model_validate({"model": {"name": "llama-1b"}, **sections})
    world = World(0, ranks, 0, ranks, "torch", "cpu", "")
    with pytest.raises(ConfigError) as raised:
        make_plan(run, ds, world, estimating=estimating)
    return raised.value.problems


@pytest.fixture
def mixture(tmp_path: Path) -> dict[str, Any]:
    """Of 4 experts, 4 heads and 2 key heads."""
    (tmp_path / "config.json").write_text(json.dumps(LEARNED["mixtral"]))
    return {"model": {"name": str(tmp_path)}, "data": {"seq_len": 16}}


@pytest.mark.parametrize("estimating", [False, True])
@pytest.mark.parametrize(
    ("model", "seq_len", "instead"),
    [
        ("llama-1b", 128, f"use {TENSOR}=2 and {SEQUENCE}=2 without pipeline.stages"),
        # 3 heads of each of 2 tensor ranks are not divided over 2 ranks of a row.
        ("tiny", 128, f"use pipeline.stages=2 and {TENSOR}=2 without {SEQUENCE}"),
    ],
)
def test_stages_of_rows_are_refused_with_the_reason_and_the_nearest_layout(
    model: str, seq_len: int, instead: str, estimating: bool
) -> None:
    sections = {"model": {"name": model}, "data": {"seq_len": seq_len}}
    (problem,) = problems({**STAGES, **ROWS}, estimating=estimating, **sections)
    assert problem.startswith(f"{SEQUENCE} is 2")
    assert "not built together with pipeline.stages=2: stages hand on hidden states" in problem
    assert problem.endswith(instead)


def test_stages_of_experts_too(mixture: dict[str, Any]) -> None:
    (problem,) = problems({**STAGES, **experts(2)}, **mixture)
    assert problem.startswith(f"{EXPERT} is 2")
    assert "would wait for ever for a stage that has no experts" in problem
    assert problem.endswith(f"use {TENSOR}=2 and {EXPERT}=2 without pipeline.stages")


def test_experts_that_do_not_divide_hide_no_stages(mixture: dict[str, Any]) -> None:
    apart, size = problems({**STAGES, **experts(3)}, **mixture)
    assert apart.endswith(f"use pipeline.stages=2 without {EXPERT}")
    assert "it does not divide 4 experts and 2 data ranks: use 1 or 2" in size


def test_of_all_axes_those_that_do_not_go_with_stages_are_named(mixture: dict[str, Any]) -> None:
    rows, mixed = problems({**STAGES, **ROWS, **TENSORS, **experts(2)}, 16, **mixture)
    # 4 tensor ranks would leave a row's 2 ranks one head each.
    nearest = f"pipeline.stages=2 and {TENSOR}=4 without {SEQUENCE} and {EXPERT}"
    assert (rows.startswith(SEQUENCE), mixed.startswith(EXPERT)) == (True, True)
    assert rows.endswith(nearest)
    assert mixed.endswith(nearest)


def test_sizes_that_divide_nothing_are_in_one_report_with_those_that_would() -> None:
    ds = {"tensor_parallel": {"autotp_size": 3}, SEQUENCE: 5}
    report = problems(ds, model={"name": "tiny"}, data={"seq_len": 511})
    ranks, heads, vocabulary, rows = report
    assert ranks.startswith("4 ranks cannot be split into pipeline 1 x tensor 3 x sequence 5 = 15")
    assert "use 15 ranks, or sizes with a product of 4" in ranks
    assert heads.startswith(f"{TENSOR} is 3")
    assert heads.endswith("(and 20 like it): use 1 or 2")
    assert "a vocabulary of 8,192 cannot be divided over 3" in vocabulary
    assert "model.overrides.vocab_size=8193 can" in vocabulary
    assert rows.startswith(f"{SEQUENCE} is 5")
    assert "511 tokens cannot be divided over 5 ranks and 6 attention heads cannot" in rows
    assert rows.endswith(": use 1")


def test_experts_and_ranks_that_do_not_divide_are_in_it_too(mixture: dict[str, Any]) -> None:
    mixture["data"]["seq_len"] = 18
    ds = {SEQUENCE: 4, **experts(3), "zero_optimization": {"stage": 1}}
    ranks, rows, mixed = problems(ds, 6, **mixture)
    assert "6 ranks cannot be split" in ranks
    assert "use 4 or 8 ranks, or sizes with a product of 3 or 6" in ranks
    assert "18 tokens cannot be divided over 4 ranks: use 1 or 2, or 16 or 20 tokens" in rows
    assert "it does not divide 4 experts: use 1 or 2" in mixed, mixed


def test_more_ranks_than_asked_for_are_among_the_legal_numbers() -> None:
    (problem,) = problems({"tensor_parallel": {"autotp_size": 12}}, 48, data={"seq_len": 128})
    assert problem.endswith("use 1 or 2 or 4 or 8 or 16"), problem
