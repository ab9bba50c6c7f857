"""Families with tensor parallelism: two ranks have the loss and gradients of one."""

from __future__ import annotations

import pytest

from tests.run_tools import run_tool

# Windows and a separate norm for queries; parallel layers; biases; a trained activation.
FAMILIES = ("gemma3_text", "cohere2", "starcoder2", "apertus")


@pytest.mark.gate("models")
def test_divided_families_have_the_undivided_models_loss_and_gradients() -> None:
    done = run_tool("compare_divided", "--families", *FAMILIES)
    assert f"{len(FAMILIES)} families compared, 0 differ" in done.stdout


@pytest.mark.gate("models")
def test_a_family_without_a_plan_is_refused_by_name() -> None:
    done = run_tool("compare_divided", "--families", "mamba", code=2)
    assert "no plan to divide mamba; there are " in done.stdout
