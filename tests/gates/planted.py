"""A gate with two tests, one of which fails unless told to pass; test_gates.py runs it."""

import os

import pytest

pytestmark = pytest.mark.gate("planted")


def test_passes() -> None:
    pass


def test_fails() -> None:
    assert "PLANTED_PASSES" in os.environ
