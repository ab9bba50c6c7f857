"""Divided rows on two ranks: the undivided model's logits, losses and documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Result = Callable[[str], list[Any]]


def test_logits_losses_and_an_evaluation_are_the_undivided_models(result: Result) -> None:
    for apart in result("row_logits"):
        assert apart["logits"] < 1e-6
        assert apart["sums"] < 1e-4  # of some hundred tokens, nats
        assert apart["losses"] < 1e-5
        assert apart["later"] < 1e-4
        assert apart["moved"] > 0.01


def test_shorter_rows_at_the_start_of_a_ramp_are_divided_too(result: Result) -> None:
    assert all(apart < 1e-4 for apart in result("short_rows"))


def test_tokens_attend_within_their_document_across_ranks(result: Result) -> None:
    for differences in result("documents_kept"):
        assert differences["apart"] == 0
        assert differences["together"] > 1e-4
