"""Bytes that a step sends over two ranks: those of every collective equal the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Result = Callable[[str], list[Any]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_ranks_send_gradients_and_weights(stage: int, result: Result) -> None:
    for rank in result("step_traffic"):
        way = rank[f"zero{stage}"]
        reduced = "_reduce_scatter_base_" if stage == 3 else "allreduce_"
        gathered = {"_allgather_base_": way["weights"]} if stage else {}
        assert way["seen"] == {reduced: way["gradients"], **gathered}
        assert way["gradients"] > 0
        assert bool(way["weights"]) == bool(stage)


def test_tensor_ranks_add_up_hidden_states_and_losses(result: Result) -> None:
    for rank in result("step_traffic"):
        assert rank["tensor"]["seen"] == {"allreduce_": rank["tensor"]["axis"]}


def test_ranks_of_a_row_exchange_heads_and_are_data_ranks(result: Result) -> None:
    for rank in result("step_traffic"):
        rows, whole = rank["sequence"], rank["zero1"]["seen"]
        assert rows["seen"] == {"alltoall_base_": rows["axis"], **whole}


def test_experts_ranks_exchange_every_chosen_token_and_share_all_else(result: Result) -> None:
    """The tokens that come back from a rank depend on the load; only their mean is known."""
    ranks = [rank["expert"] for rank in result("step_traffic")]
    assert sum(rank["seen"]["alltoall_base_"] for rank in ranks) == 2 * ranks[0]["axis"]
    for rank in ranks:
        assert rank["seen"]["allreduce_"] == rank["gradients"]
        assert rank["seen"]["_allgather_base_"] == rank["weights"]


def test_stages_send_hidden_states_and_their_gradients(result: Result) -> None:
    for rank in result("step_traffic"):
        states = rank["pipeline"]["axis"]
        assert rank["pipeline"]["seen"] == {"send": states, "recv_": states}
