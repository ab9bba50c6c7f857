"""Divisions that DeepSpeed does not run, each as it was seen to fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.estimate.changes import helpful_changes
from harness.estimate.dividable import division_problems
from harness.estimate.inputs import GIB, Inputs
from harness.estimate.timeline import estimate_memory
from harness.layout.grid import Grid
from harness.layout.shape import Shape
from tests.estimate.test_activations import FAMILIES, WAYS, inputs_of

ALONE = Grid(1)


def run(family: str = "llama", grid: Grid = ALONE, **changes: Any) -> Inputs:
    found = replace(inputs_of(FAMILIES[family], *WAYS[0]), grid=grid)
    zero = replace(found.zero, optimizer="adamw", **changes.pop("zero", {}))
    return replace(found, zero=zero, **changes)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (run(), []),
        (run(grid=Grid(2, tensor=2)), []),
        (run(grid=Grid(2, sequence=2)), []),
        (run("mixtral", Grid(2, sequence=2)), []),
        (run("mixtral", Grid(2, tensor=2)), ["DeepSpeed cannot divide mixtral, only llama,"]),
        (run(grid=Grid(4, tensor=2, sequence=2)), ["runs only one of them at a time"]),
        (run("gpt2", Grid(2, sequence=2)), ["Ulysses cannot run gpt2, only llama,"]),
        (run("bloom", Grid(2, sequence=2)), ["Ulysses cannot run bloom"]),
        (run(grid=Grid(2, sequence=2), attention="eager"), ["Ulysses has no eager attention"]),
        (
            run(grid=Grid(3, sequence=3)),
            ["must divide 8 attention heads", "2 key heads, or they it", "data.seq_len, 64"],
        ),
        (
            run(grid=Grid(2, sequence=2), zero={"stage": 1, "sum_bytes": 4}),
            ["stage 1 in bf16 with sums in fp32 fails in its step: use stage 2 or 3"],
        ),
    ],
)
def test_what_deepspeed_does_not_run_is_said(inputs: Inputs, said: list[str]) -> None:
    found = division_problems(inputs)
    assert len(found) == len(said)
    for problem, text in zip(found, said, strict=True):
        assert text in problem


def test_pipelines_divide_nothing_else() -> None:
    both = run(grid=Grid(4, pipeline=2, tensor=2))
    assert division_problems(both) == [
        "pipeline.stages 2 and tensor_parallel.autotp_size 2: DeepSpeed runs only one of them at "
        "a time"
    ]
    assert division_problems(run(grid=Grid(2, pipeline=2))) == []


def test_no_change_is_proposed_that_deepspeed_does_not_run() -> None:
    grid = Grid(4, sequence=2)
    divided = run(grid=grid, zero={"stage": 2, "sum_bytes": 4}, seq_len=2048, micro_batch=1)
    texts = [c.text for c in helpful_changes(estimate_memory(divided, GIB))]
    assert "model.checkpointing=full" in texts
    assert not any("pipeline" in text for text in texts)


def test_every_rank_reads_the_whole_model_before_it_is_divided() -> None:
    whole = run(loads_weights=True, zero={"stage": 1})
    parts = [
        sum(
            p.bytes
            for p in estimate_memory(inputs).worst.held
            if p.component == "weights being made"
        )
        for inputs in (whole, replace(whole, grid=Grid(2, tensor=2)))
    ]
    assert parts[0] == parts[1] == 2 * whole.parameters


def test_divided_logits_are_there_in_full_precision_three_times() -> None:
    """sequence/cross_entropy.py; in bf16 14 bytes of each logit, of half the vocabulary."""
    tied = {**FAMILIES["llama"], "tie_word_embeddings": True}
    inputs = replace(run(grid=Grid(2, tensor=2)), shape=Shape.from_hf(tied))
    held = estimate_memory(inputs).worst
    assert held.phase("loss")["logits and loss"] == 14 * 150 * inputs.tokens
    assert held.evidence("logits and loss") == "read"
    assert (
        estimate_memory(run(grid=Grid(2, tensor=2))).worst.evidence("logits and loss") == "traced"
    )
