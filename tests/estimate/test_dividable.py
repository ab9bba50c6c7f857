"""Divisions that cannot be run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.estimate.dividable import division_problems
from harness.estimate.fit import helpful_changes
from harness.estimate.held import GIB
from harness.estimate.inputs import Inputs
from harness.estimate.timeline import estimate_memory
from harness.layout.grid import Grid
from tests.estimate.test_activations import FAMILIES, WAYS, inputs_of

ALONE = Grid(1)


def run(family: str = "llama", grid: Grid = ALONE, **changes: Any) -> Inputs:
    base = replace(inputs_of(FAMILIES[family], *WAYS[0]), grid=grid)
    zero = replace(base.zero, optimizer="adamw", **changes.pop("zero", {}))
    return replace(base, zero=zero, **changes)


@pytest.mark.parametrize(
    ("inputs", "texts"),
    [
        (run(), []),
        (run(grid=Grid(2, tensor=2)), []),
        (run(grid=Grid(2, sequence=2)), []),
        (run("mixtral", Grid(2, sequence=2)), []),
        (run("bloom", Grid(2, tensor=2)), []),
        (run(grid=Grid(4, tensor=2, sequence=2)), []),
        (run("gpt2", Grid(2, sequence=2)), []),
        (run("bloom", Grid(2, sequence=2)), ["sequence parallelism does not support bloom: use 1"]),
        (run(grid=Grid(2, sequence=2), attention="eager"), []),
        (
            run(grid=Grid(3, sequence=3)),
            [
                "64 tokens cannot be divided over 3 ranks and 8 attention heads cannot be divided "
                "over 3 and 2 key heads cannot be divided over 3, nor be shared: use 1"
            ],
        ),
        (run(grid=Grid(2, sequence=2), zero={"stage": 1, "sum_bytes": 4}), []),
    ],
)
def test_divisions_that_cannot_be_run_are_refused(inputs: Inputs, texts: list[str]) -> None:
    problems = division_problems(inputs)
    assert len(problems) == len(texts)
    for problem, text in zip(problems, texts, strict=True):
        assert text in problem


def test_stages_divide_tensors_and_not_sequences() -> None:
    problem, *_ = division_problems(run(grid=Grid(4, pipeline=2, sequence=2)))
    assert problem.startswith("sequence_parallel_size is 2: cannot be combined with pipeline.st")
    assert (
        "needs the masks of whole rows in every stage; use tensor_parallel.autotp_size=2 and se"
        in problem
    )
    assert division_problems(run(grid=Grid(2, pipeline=2))) == []
    assert division_problems(run(grid=Grid(4, pipeline=2, tensor=2))) == []


def test_no_change_is_proposed_that_cannot_be_run() -> None:
    grid = Grid(4, sequence=2)
    divided = run(grid=grid, zero={"stage": 2, "sum_bytes": 4}, seq_len=2048, micro_batch=1)
    texts = [c.text for c in helpful_changes(estimate_memory(divided, GIB))]
    assert "model.checkpointing=full" in texts
    assert not any("pipeline" in text for text in texts)


def test_a_rank_reads_the_whole_model_or_a_piece_at_a_time_of_what_it_divides() -> None:
    whole = run(loads_weights=True, zero={"stage": 1})
    parts = [
        sum(
            p.bytes
            for p in estimate_memory(inputs).worst.parts
            if p.component == "weights being made"
        )
        for inputs in (whole, replace(whole, grid=Grid(2, tensor=2)))
    ]
    largest = max(sum(t.numel for t in unit) for unit in whole.shape.body.units)
    assert parts == [2 * whole.parameters, 2 * largest]


def test_divided_logits_are_there_in_full_precision_three_times() -> None:
    """models/vocabulary_loss.py; in bf16 14 bytes of each logit, of half the vocabulary."""
    inputs = run(grid=Grid(2, tensor=2))
    rank = estimate_memory(inputs).worst
    assert rank.phase("loss")["logits and loss"] == 14 * 150 * inputs.tokens
    assert rank.evidence("logits and loss") == "read"
    assert estimate_memory(run()).worst.evidence("logits and loss") == "traced"
