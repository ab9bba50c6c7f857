"""Sequence parallelism in a plan: what is rejected, and what DeepSpeed never sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.plan.text import describe
from tools.proofs.hybrids import HYBRIDS


def plan(ranks: int = 4, places: int = 2, ds: Any = None, **sections: Any) -> Plan:
    run = RunConfig.model_validate({"model": {"name": "tiny"}, **sections})
    divided = {"sequence_parallel_size": places, **(ds or {})}
    return make_plan(run, divided, World(0, ranks, 0, ranks, "torch", "cpu", ""))


def test_deepspeed_takes_the_ranks_of_a_row_for_data_ranks() -> None:
    made = plan(train={"global_batch": 8})
    assert (made.grid.sequence, made.grid.data) == (2, 2)
    assert "sequence_parallel_size" not in made.deepspeed
    assert made.deepspeed["train_batch_size"] == 2 * made.global_batch == 16
    assert made.share.positions(512) == (0, 256)
    assert "4 ranks (2 data x 2 sequence)" in describe(made)


def test_with_tensors_both_are_divided() -> None:
    made = plan(4, 2, {"tensor_parallel": {"autotp_size": 2}}, model={"name": "llama-1b"})
    assert (made.grid.sequence, made.grid.tensor, made.grid.data) == (2, 2, 1)


@pytest.mark.parametrize(
    ("ranks", "places", "sections", "problem"),
    [
        (
            3,
            3,
            {},
            "128 tokens cannot be divided over 3 ranks and 2 key heads cannot be divided over 3",
        ),
        (
            2,
            2,
            {"data": {"seq_len": 511}},
            "511 tokens cannot be divided over 2 ranks: use 1, or 510 or 512 tokens",
        ),
        (
            4,
            4,
            {"data": {"seq_len": 8}, "ramp": {"length_from": 2, "length_tokens": 1000}},
            "2 tokens cannot be divided over 4 ranks and 6 attention heads cannot be divided over "
            "4: use 1 or 2",
        ),
        (
            4,
            2,
            {"ds": {"tensor_parallel": {"autotp_size": 2}}},
            "3 attention heads of each of 2 tensor ranks cannot be divided over 2: use 1",
        ),
        (2, 2, {"model": {"name": "tiny", "kernels": "liger"}}, "model.kernels=liger: remove one"),
    ],
)
def test_what_cannot_be_divided_is_rejected_before_a_device_is_touched(
    ranks: int, places: int, sections: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match="sequence_parallel_size") as raised:
        plan(ranks, places, **sections)
    assert any(problem in text for text in raised.value.problems), raised.value.problems


def test_rows_of_layers_with_a_state_are_not_divided(tmp_path: Path) -> None:
    """Jamba's attention could be exchanged, and the error would hide in the first batch."""
    (tmp_path / "config.json").write_text(json.dumps(HYBRIDS["jamba"]))
    model, data = {"name": str(tmp_path)}, {"seq_len": 32}
    with pytest.raises(ConfigError, match="nobody has divided the rows of jamba: use 1"):
        plan(2, 2, model=model, data=data)
