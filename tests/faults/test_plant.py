from __future__ import annotations


def test_every_place_exists() -> None:
    from tests.faults.plant import PLACES  # imports the engine, for seconds

    assert "in an evaluation" in PLACES
