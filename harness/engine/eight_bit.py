"""Adam's moments in 8 bits (bitsandbytes), in a form that a checkpoint can split anywhere.

bitsandbytes stores an 8-bit code per element and a scale per 256 elements of the flat tensor. A
checkpoint stores the scale of every element. If the blocks are the same on reading, codes and
scales are restored bit for bit; a block that now spans several old ones is quantised again.

bitsandbytes counts the elements of a call in 32 bits. A rank's flat tensor may have more, and a
single call would then update only some of them, or none. All calls here therefore take slices.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from harness.layout.adapters import quiet_bitsandbytes

BLOCK = 256
SLICE = 2**30
"""Most elements in a call of bitsandbytes: a multiple of BLOCK."""
_READ_AT_ONCE = 2**24
"""Elements restored at a time; limits the temporary memory on the device."""
_CODES, _SCALES, _TABLES = ("state1", "state2"), ("absmax1", "absmax2"), ("qmap1", "qmap2")
_RANGES = ("dynamic", "udynamic")  # signed, unsigned
State = dict[str, Any]


def adam8bit(params: Any, **settings: Any) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with moments in 8 bits, for tensors of any length."""
    # All tensors in 8 bits: sizes, and so the choice, would depend on how ZeRO splits them.
    optimizer: torch.optim.Optimizer = _class()(params, min_8bit_size=1, **settings)
    return optimizer


@cache
def _class() -> Any:
    quiet_bitsandbytes()
    from bitsandbytes.functional import optimizer_update_8bit_blockwise
    from bitsandbytes.optim.adamw import AdamW8bit  # optional dependency

    class SlicedAdamW8bit(AdamW8bit):
        @torch.no_grad()
        def update_step(
            self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int
        ) -> None:
            """Update one tensor, as bitsandbytes does, but in slices."""
            state: State = self.state[p]
            config: dict[str, Any] = self.get_config(gindex, pindex, group)  # type: ignore[no-untyped-call]
            state["step"] += 1
            beta1, beta2 = config["betas"]
            assert p.grad is not None, "step() leaves out parameters without a gradient"
            weights, gradients = p.data.view(-1), p.grad.contiguous().view(-1)
            for own, blocks in _slices(p.numel(), SLICE):
                optimizer_update_8bit_blockwise(
                    self.optimizer_name,
                    gradients[own],
                    weights[own],
                    **{key: state[key].view(-1)[own] for key in _CODES},
                    **{key: state[key] for key in _TABLES},
                    **{key: state[key][blocks] for key in _SCALES},
                    beta1=beta1,
                    beta2=beta2,
                    beta3=0.0,  # this and alpha are those of other optimizers
                    alpha=0.0,
                    eps=config["eps"],
                    step=state["step"],
                    lr=config["lr"],
                    weight_decay=config["weight_decay"],
                )

    return SlicedAdamW8bit


def _slices(numel: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of a flat tensor's elements, each with that of its blocks."""
    for start in range(0, numel, size):
        end = min(start + size, numel)
        yield slice(start, end), slice(start // BLOCK, -(-end // BLOCK))


def is_eight_bit(optimizer: Any) -> bool:
    """Return True if an optimizer stores its moments in 8 bits."""
    return any(each.__module__.startswith("bitsandbytes.") for each in type(optimizer).__mro__)


def per_element(state: State) -> State:
    """Return the state with a scale for every element."""
    numel = state[_CODES[0]].numel()
    # On the host: on the device this would take eight bytes per element that are not planned for.
    spread = {key: state[key].cpu().repeat_interleave(BLOCK)[:numel] for key in _SCALES}
    return {**{key: state[key] for key in _CODES}, **spread}


def blank(flat: torch.Tensor) -> State:
    """Return states of `per_element`'s form for a tensor, to be filled; scales on the host."""
    codes = {key: torch.zeros_like(flat, dtype=torch.uint8) for key in _CODES}
    return {**codes, **{key: torch.zeros(flat.shape, dtype=torch.float32) for key in _SCALES}}


def per_block(optimizer: Any, filled: State) -> State:
    """Return bitsandbytes' state, made from a filled `blank` state, whose codes it overwrites."""
    optimizer.fill_qmap()
    state: State = {"step": 0}
    for codes, scales, table, values_in in zip(_CODES, _SCALES, _TABLES, _RANGES, strict=True):
        code, scale = filled[codes].view(-1), filled[scales].view(-1)
        qmap = optimizer.name2qmap[values_in].to(code.device)
        by_block = torch.empty(-(-len(code) // BLOCK), device=code.device)
        for own, blocks in _slices(len(code), _READ_AT_ONCE):
            code[own], by_block[blocks] = _blocks_of(code[own], scale[own].to(code.device), qmap)
        state[codes], state[scales], state[table] = filled[codes], by_block, qmap
    return state


def _blocks_of(
    code: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and the scale of each block, from codes and scales of all elements."""
    from bitsandbytes.functional import quantize_blockwise

    # Padding was not saved: it is zero and must not influence its block's scale.
    code = torch.where(scale == 0, qmap.abs().argmin().to(torch.uint8), code)
    anew, about = quantize_blockwise(qmap[code.long()] * scale, code=qmap, blocksize=BLOCK)
    by_block = torch.nn.functional.pad(scale, (0, -len(scale) % BLOCK)).view(-1, BLOCK)
    largest = by_block.amax(1)
    mixed = ((by_block != largest[:, None]) & (by_block != 0)).any(1)
    of_element = mixed.repeat_interleave(BLOCK)[: len(scale)]
    return torch.where(of_element, anew.view(-1), code), torch.where(mixed, about.absmax, largest)
