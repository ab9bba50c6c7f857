"""The harness's own cost on a rank does not grow with the number of ranks."""

from __future__ import annotations

import pytest

from tools.proofs.own_cost.measure import Row, agreement, heartbeat, measured
from tools.proofs.own_cost.report import beyond
from tools.proofs.own_cost.simulated import Group

FEW, MANY = 4, 16
# Of a rank that is not rank 0. Their bytes are a file's that lists all ranks' files or pieces.
LISTS_ALL = ("verification (a start)", "index (a start)")


@pytest.fixture(scope="module")
def rows() -> dict[str, tuple[Row, Row]]:
    """Each thing at few and at many ranks."""
    pairs = zip(measured(FEW), measured(MANY), strict=True)
    return {few.what: (few, many) for few, many in pairs}


def test_a_rank_asks_the_file_system_as_often_of_many(rows: dict[str, tuple[Row, Row]]) -> None:
    for what, (few, many) in rows.items():
        assert many.calls[1] == few.calls[1] <= 4, what


def test_rank_0_asks_once_more_for_each_rank_where_it_removes_its_file(
    rows: dict[str, tuple[Row, Row]],
) -> None:
    further = {what: many.calls[0] - few.calls[0] for what, (few, many) in rows.items()}
    assert further.pop("a save") == MANY - FEW
    assert further.pop("a report of a hang (once)") == 2 * (MANY - FEW)
    assert set(further.values()) == {0}


def test_a_rank_is_sent_as_much_of_many(rows: dict[str, tuple[Row, Row]]) -> None:
    for what, (few, many) in rows.items():
        if what not in LISTS_ALL:
            assert many.bytes[1] <= few.bytes[1] + 8, what


def test_all_heartbeats_are_few_calls_a_second() -> None:
    beats = [heartbeat(ranks) for ranks in (64, 256, 1_024, 16_384)]
    assert max(beat.calls_per_s for beat in beats) <= 3 * 64
    assert [beat.tick_s for beat in beats] == [5, 5, 16, 256]


def test_an_answer_passes_few_ranks() -> None:
    assert [agreement(ranks) for ranks in (1, 64, 256, 16_384)] == [
        (0, 0),
        (63, 126),
        (30, 60),
        (254, 508),
    ]


def test_a_gather_to_all_would_be_seen() -> None:
    """The count that the other tests rely on."""
    costs = []
    for ranks in (FEW, MANY):
        group = Group(ranks)

        def work(rank: int, group: Group = group) -> None:
            group.all_gather_object([None] * group.ranks, "x")

        group.run(work)
        costs.append(group.costs[1].bytes)
    assert costs[1] == 4 * costs[0]


def test_what_grows_goes_on_in_a_straight_line() -> None:
    assert beyond((114, 306), (64, 256), (1_024, 16_384)) == [1_074, 16_434]
    assert beyond((3, 3), (64, 256), (16_384,)) == [3]
    assert beyond((1.2, 0.9), (64, 256), (16_384,)) == [0.9]  # noise
