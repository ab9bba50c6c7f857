"""8-bit moments out of bitsandbytes and back, without an engine."""

from __future__ import annotations

import pytest
import torch

from harness.engine.eight_bit import BLOCK, blank, per_block, per_element

optim = pytest.importorskip("bitsandbytes.optim")
PADDED, NUMEL = 2 * BLOCK, 2 * BLOCK - 12  # the end of a rank's last shard is padding


def stepped() -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    torch.manual_seed(0)
    flat = torch.nn.Parameter(torch.randn(PADDED))
    optimizer = optim.AdamW8bit([flat], min_8bit_size=1)
    for _ in range(3):
        flat.grad = torch.randn(PADDED)
        flat.grad[NUMEL:] = 0
        optimizer.step()
    return optimizer, flat


def test_the_same_blocks_come_back_bit_for_bit_without_their_padding() -> None:
    optimizer, flat = stepped()
    state = optimizer.state[flat]
    filled = blank(flat)
    for key, values in per_element(state).items():
        filled[key][:NUMEL] = values[:NUMEL]  # what a checkpoint has
    found = per_block(optimizer, filled)
    for key in ("state1", "state2", "absmax1", "absmax2"):
        kept = NUMEL if key.startswith("state") else None
        assert torch.equal(found[key][:kept], state[key][:kept]), key


def test_other_blocks_are_quantised_anew() -> None:
    optimizer, flat = stepped()
    state = optimizer.state[flat]
    moved = {key: values.roll(100) for key, values in per_element(state).items()}
    found = per_element(per_block(optimizer, moved))
    for codes, scales, table in (("state1", "absmax1", "qmap1"), ("state2", "absmax2", "qmap2")):
        before = state[table][moved[codes].long()] * moved[scales]
        after = state[table][found[codes].long()] * found[scales]
        assert not torch.equal(found[scales], moved[scales])
        assert float((after - before).abs().max()) < 0.02 * float(before.abs().max())
