from __future__ import annotations

from harness.guard.judge import Patience


def test_it_is_over_after_so_many_evaluations_without_a_better_one() -> None:
    patience = Patience(2, least=0.1)
    seen = []
    for step, loss in enumerate([3.0, 2.95, 2.8, 2.75, 2.75]):
        patience.see(loss, step)
        seen.append(patience.is_over)
    assert seen == [False, False, False, False, True]
    assert (patience.best, patience.best_step) == (2.8, 2)


def test_it_survives_a_checkpoint() -> None:
    patience, again = Patience(2, 0.0), Patience(2, 0.0)
    patience.see(2.0, 1)
    patience.see(3.0, 2)
    again.restore(patience.state())
    again.see(3.0, 3)
    assert again.is_over
    again.restore({})  # of a run without
    assert not again.is_over


def test_none_is_never_over() -> None:
    patience = Patience(0, 0.0)
    for step in range(9):
        patience.see(1.0, step)
    assert not patience.is_over
