"""Adam's moments in 8 bits (bitsandbytes), in a form that a checkpoint can split anywhere.

bitsandbytes stores an 8-bit code per element and a scale per 256 elements of the flat tensor. A
checkpoint stores the scale of every element. If the blocks are the same on reading, codes and
scales are restored bit for bit; a block that now spans several old ones is quantised again.
"""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 256
_CODES, _SCALES, _TABLES = ("state1", "state2"), ("absmax1", "absmax2"), ("qmap1", "qmap2")
_RANGES = ("dynamic", "udynamic")  # signed, unsigned
State = dict[str, Any]


def is_eight_bit(optimizer: Any) -> bool:
    """Return True if an optimizer stores its moments in 8 bits."""
    return type(optimizer).__module__.startswith("bitsandbytes.")


def per_element(state: State) -> State:
    """Return the state with a scale for every element."""
    numel = state[_CODES[0]].numel()
    # On the host: on the device this would take eight bytes per element that are not planned for.
    spread = {key: state[key].cpu().repeat_interleave(BLOCK)[:numel] for key in _SCALES}
    return {**{key: state[key] for key in _CODES}, **spread}


def blank(flat: torch.Tensor) -> State:
    """Return states of `per_element`'s form for a tensor, to be filled."""
    codes = {key: torch.zeros_like(flat, dtype=torch.uint8) for key in _CODES}
    return {**codes, **{key: torch.zeros_like(flat, requires_grad=False) for key in _SCALES}}


def per_block(optimizer: Any, filled: State) -> State:
    """Return bitsandbytes' state, from a filled state of `blank`."""
    from bitsandbytes.functional import quantize_blockwise

    optimizer.fill_qmap()
    numel, device = filled[_CODES[0]].numel(), filled[_CODES[0]].device
    blocks = torch.arange(numel, device=device) // BLOCK
    state: State = {"step": 0}
    for codes, scales, table, values_in in zip(_CODES, _SCALES, _TABLES, _RANGES, strict=True):
        qmap = optimizer.name2qmap[values_in].to(device)
        scale = filled[scales]
        # Padding was not saved: it is zero and must not influence its block's scale.
        code = torch.where(scale == 0, qmap.abs().argmin().to(torch.uint8), filled[codes])
        anew, about = quantize_blockwise(qmap[code.long()] * scale, code=qmap, blocksize=BLOCK)
        by_block = torch.nn.functional.pad(scale, (0, -numel % BLOCK)).view(-1, BLOCK)
        largest = by_block.amax(1)
        mixed = ((by_block != largest[:, None]) & (by_block != 0)).any(1)
        state[codes] = torch.where(mixed[blocks], anew.view(-1), code)
        state[scales] = torch.where(mixed, about.absmax, largest)
        state[table] = qmap
    return state
