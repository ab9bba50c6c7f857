"""Curves beside each other; the programs themselves run for minutes, by hand."""

from __future__ import annotations

from tools.proofs.compare_alternatives import _apart, _why


def test_a_failure_is_told_by_its_first_exception() -> None:
    output = "loading\n  raise ValueError\nx.ZeRORuntimeException: of 2, not 1\nEOFError: late\n"
    assert _why(output) == "x.ZeRORuntimeException: of 2, not 1"
    assert _why("killed") == "killed"


def test_curves_are_compared_step_by_step() -> None:
    assert _apart([2.0, 1.0], [2.0, 1.0]) == "2.0000 to 1.0000, 0.0e+00 apart at most"
    assert _apart([2.0, 1.1], [2.0, 1.0]).endswith("1.0e-01 apart at most")
    assert _apart([2.0], [2.0, 1.0]) == "1 losses instead of 2"
    assert _apart("no", [2.0]) == "failed: no"
