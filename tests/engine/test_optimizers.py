"""Every optimizer in the real engine on two ranks, against torch's own on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.layout.optimizer_table import OPTIMIZERS

pytestmark = pytest.mark.slow

LR, WIDE = 1e-2, 64
# Muon computes in bf16, where the last bit of a gradient can be the last of an update: that of the
# largest update, four times.
BF16_BITS = 4 * LR * 0.2 * WIDE**0.5 * 2**-8
EXACT = {name for name in OPTIMIZERS if name != "adam8bit"}


@pytest.mark.parametrize("name", sorted(EXACT))
def test_every_optimizer_is_torchs_in_every_layout(
    name: str, result: Callable[[str], list[Any]]
) -> None:
    for rank in result("every_optimizer"):
        assert rank[name]
        for layout, found in rank[name].items():
            assert found["moved"] > 1e-3, layout
            assert found["error"] < (BF16_BITS if name == "muon" else 3e-7), layout


@pytest.mark.parametrize("name", ["adafactor", "adagrad", "lion", "momentum", "muon"])
def test_every_optimizer_resumes(name: str, result: Callable[[str], list[Any]]) -> None:
    for rank in result("resumed_optimizers"):
        same, *others = rank[name]
        assert same == 0.0
        assert all(error < (BF16_BITS if name == "muon" else 3e-7) for error in others)


def test_eight_bit_moments_resume(result: Callable[[str], list[Any]]) -> None:
    pytest.importorskip("bitsandbytes")
    for rank in result("resumed_optimizers"):
        on_one_rank_less, split, moved = rank["adam8bit"]
        assert on_one_rank_less == split == 0.0
        assert moved < LR  # blocks lie otherwise, and are quantised anew


def test_eight_bit_moments_train_as_adamw(result: Callable[[str], list[Any]]) -> None:
    pytest.importorskip("bitsandbytes")
    for error in result("eight_bit_beside_adamw"):
        assert 0 < error < 0.1
