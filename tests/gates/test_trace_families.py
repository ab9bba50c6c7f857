"""The bytes that a family keeps for the backward pass, against a trace of the whole model."""

from __future__ import annotations

from tests.gates.trace_families import error_of, traced_row


def test_a_family_is_traced_as_it_is_counted() -> None:
    row = traced_row("opt")
    assert abs(error_of(row)) < 0.001
    assert row["way"] == "counted"
