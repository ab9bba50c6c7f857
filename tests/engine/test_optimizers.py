"""Every optimizer in the real engine on two ranks, against torch's own on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.engine.state import set_steps
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
        for layout, measured in rank[name].items():
            assert measured["moved"] > 1e-3, layout
            assert measured["fused"] is layout.endswith("fused"), layout
            assert measured["error"] < (BF16_BITS if name == "muon" else 3e-7), layout


@pytest.mark.parametrize("name", ["adafactor", "adagrad", "adamw", "lion", "momentum", "muon"])
def test_every_optimizer_resumes(name: str, result: Callable[[str], list[Any]]) -> None:
    for rank in result("resumed_optimizers"):
        same, *others = rank[name]
        assert same == 0.0
        # Two steps; what last bits make of one of Muon's depends on the CPU's products in bf16.
        most = 2 * 5 * result("muon_spread")[0] if name == "muon" else 3e-7
        assert all(error < most for error in others)


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


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_a_fused_optimizer_counts_its_steps_on_the_device(fused: bool, device: str) -> None:
    """Its kernel reads the count: one on the host would be refused in the first resumed step."""
    flat = torch.nn.Parameter(torch.empty(4, device="meta"))
    inner = torch.optim.AdamW([flat], fused=fused)
    inner.state[flat]["exp_avg"] = torch.empty_like(flat)
    set_steps(inner, 7)
    assert inner.state[flat]["step"].device.type == device
    assert inner.state[flat]["step"].dtype == torch.float32
