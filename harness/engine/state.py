"""Converts the states of DeepSpeed's optimizers to fragments of parameters and back.

Each of DeepSpeed's wrappers flattens groups of parameters and passes one flat fp32 tensor per group
to the optimizer; tests/gates/test_checkpoints.py tests round trips between all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.checkpoint.index import BUFFER, WEIGHT
from harness.checkpoint.tensor_file import Fragment
from harness.engine import eight_bit, swap
from harness.engine.api import Fill, Kinds, Scalars
from harness.engine.deepspeed_0_19 import gradients, internals
from harness.engine.fragments import is_copy, is_frozen_base, part_of
from harness.errors import ConfigError
from harness.layout.box import Part
from harness.layout.grid import Share

_STEP = "step"
# Adafactor's means, and the dimension over which each is taken.
_MEANS = {"row_var": -1, "col_var": -2}


@dataclass(frozen=True)
class FlatPlace:
    """A fragment's location, `flat[start : start + numel]`; `flat` is a key of the states."""

    name: str
    parameter: nn.Parameter
    offset: int
    flat: torch.Tensor
    start: int
    numel: int
    replicated: bool  # equal on all data-parallel ranks

    @property
    def part(self) -> Part:
        """The slice of the full parameter; `offset` counts elements of the slice."""
        return part_of(self.parameter)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fragment of `flat`, or of a state of the same shape."""
        return tensor.detach().view(-1).narrow(0, self.start, self.numel)


def fragments(
    engine: Any, module: nn.Module, share: Share, with_states: bool = True
) -> list[Fragment]:
    """Return the fragments that this rank saves; the ranks together hold every element once.

    Without `with_states`: weights only, which must not be on NVMe.
    """
    saved = []
    is_first = share.ranks("replicas")[0] == share.rank
    flats, states = _flats_and_states(engine) if with_states else (None, {})
    for place in pieces(engine, module, flats):
        if is_copy(place.parameter) or is_frozen_base(place.parameter):
            continue  # another rank saves it, or none
        state = states.get(place.flat, {})
        moments = {k: place.view(v) for k, v in state.items() if _is_per_element(k, v, place.flat)}
        tensors = {WEIGHT: place.view(place.flat), **moments}
        own = Fragment(place.name, place.part, place.offset, tensors)
        saved += _split_among_replicas(own, place, share)
        if is_first:
            means = {key: state[key] for key in _MEANS if key in state}
            saved += [
                Fragment(f"{place.name}:{key}", Part.of(mean.shape), 0, {key: mean.view(-1)})
                for key, mean in means.items()
            ]
    if is_first and with_states:
        saved += [
            Fragment(name, Part.of(buffer.shape), 0, {BUFFER: buffer.detach().reshape(-1)})
            for name, buffer in _persistent_buffers(module)
        ]
    return saved


def _split_among_replicas(whole: Fragment, place: FlatPlace, share: Share) -> list[Fragment]:
    """Return this rank's share of a fragment, if any: replicas divide their common elements."""
    if not place.replicated:
        return [whole]
    holders = share.ranks(share.holders(place.name, place.part.whole))
    own = whole.share(holders.index(share.rank), len(holders))
    return [] if own is None else [own]


@torch.no_grad()
def restore(engine: Any, module: nn.Module, fill: Fill, kinds: Kinds) -> None:
    """Fill all that `fragments` returns, whatever layout saved it; then call `refresh_weights`.

    Creates optimizer states that do not exist yet; states that were not saved become zeros. Not
    collective: `fill` may raise on one rank only.
    """
    inner = internals.inner_optimizer(engine)
    if internals.is_swapped(engine.optimizer):
        trained = (name for name, p in module.named_parameters() if p.requires_grad)
        swap.make_states(engine.optimizer, kinds(next(trained)))
    flats, states = _flats_and_states(engine)
    for place in pieces(engine, module, flats):
        if is_frozen_base(place.parameter):
            continue
        name = getattr(place.parameter, "tied_to", place.name)
        fill(name, WEIGHT, place.offset, place.view(place.flat), place.part)
        if place.parameter.requires_grad:
            wanted = kinds(name)  # empty for a weight that never had a gradient
            for kind, moment in states.get(place.flat, {}).items():
                if kind not in wanted and _is_per_element(kind, moment, place.flat):
                    place.view(moment).zero_()
            for kind in wanted:
                if eight_bit.is_eight_bit(inner) and place.flat not in states:
                    states[place.flat] = eight_bit.blank(place.flat)
                state = states[place.flat]
                if kind not in state:
                    state[kind] = torch.zeros_like(place.flat, requires_grad=False)
                fill(name, kind, place.offset, place.view(state[kind]), place.part)
            for key, dimension in _MEANS.items():
                if kinds(f"{name}:{key}"):
                    shape = list(place.parameter.shape)
                    shape[dimension] = 1
                    mean = states[place.flat].setdefault(key, place.flat.new_empty(shape))
                    fill(f"{name}:{key}", key, 0, mean.view(-1), Part.of(mean.shape))
    if eight_bit.is_eight_bit(inner):
        inner.state.update({flat: eight_bit.per_block(inner, s) for flat, s in states.items()})
    for name, buffer in _persistent_buffers(module):
        flat = torch.empty_like(buffer).view(-1)
        fill(name, BUFFER, 0, flat, Part.of(buffer.shape))
        buffer.copy_(flat.view_as(buffer))


def scalars(engine: Any) -> Scalars:
    """Return counters, loss scaling and the step count; equal on all ranks."""
    inner = internals.inner_optimizer(engine)
    counts = [state[_STEP] for state in inner.state.values() if _STEP in state]
    return {
        "counters": internals.read_counters(engine),
        "loss_scaling": internals.read_loss_scaling(engine),
        "optimizer": {_STEP: float(counts[0])} if counts else {},
    }


def restore_scalars(engine: Any, saved: Scalars) -> None:
    """Restore the values returned by `scalars`; call it after `restore`."""
    inner = internals.inner_optimizer(engine)
    internals.write_counters(engine, saved["counters"])
    internals.write_loss_scaling(engine, saved["loss_scaling"])
    set_steps(inner, saved["optimizer"].get(_STEP))
    gradients.replay_adam_steps(engine.optimizer)


def check_states(engine: Any) -> None:
    """Raise ConfigError for states of an optimizer of run.code that no checkpoint would hold."""
    for flat, state in internals.inner_optimizer(engine).state.items():
        for key, value in state.items():
            if key != _STEP and not _is_per_element(key, value, flat):
                why = 'a checkpoint holds "step" and tensors of the shape of the parameter'
                raise ConfigError(f"optim.name: its optimizer keeps {key!r}, but {why}")


def set_steps(inner: torch.optim.Optimizer, count: float | None) -> None:
    """Set the number of steps that an optimizer has taken; None if none had been taken.

    torch's optimizers count in tensors, fused ones on the device; DeepSpeed's count in integers.
    """
    # A class of torch's own, or one that is derived from it; Adafactor's module is "torch.optim".
    kinds = (kind for kind in type(inner).__mro__ if kind is not torch.optim.Optimizer)
    in_tensors = any(f"{kind.__module__}.".startswith("torch.optim.") for kind in kinds)
    fused = bool(inner.defaults.get("fused"))
    for flat, state in inner.state.items():
        if count is None and _STEP not in state:
            continue
        if in_tensors:
            device = flat.device if fused else None
            state[_STEP] = torch.tensor(float(count or 0), device=device)
        else:
            state[_STEP] = int(count or 0)


def pieces(
    engine: Any, module: nn.Module, flats: list[torch.Tensor] | None = None
) -> Iterator[FlatPlace]:
    """Yield the location of this rank's piece of each parameter, in module order; tied ones once.

    `flats` replaces the optimizer's own flat tensors under ZeRO-3.
    """
    optimizer = engine.optimizer
    for name, p in module.named_parameters():
        if internals.is_partitioned(p):
            shard, by_group = internals.shard_of(p), flats or internals.zero3_flats(optimizer)
            flat = internals.shard_tensor(p) if shard.group is None else by_group[shard.group]
            if shard.numel > 0:  # the last ranks' shards end in padding
                yield FlatPlace(name, p, shard.offset, flat, shard.start, shard.numel, False)
        elif not internals.is_linked(p):  # ZeRO-0 in fp32, or frozen
            yield FlatPlace(name, p, 0, p, 0, p.numel(), True)
        elif (part := internals.linked_shard(p)) is not None and part.group is not None:
            flat = internals.linked_flats(optimizer)[part.group]
            yield FlatPlace(name, p, part.offset, flat, part.start, part.numel, False)


def flat_of(engine: Any, parameter: nn.Parameter) -> torch.Tensor:
    """Return the flat tensor of a parameter's group, even if this rank has no element of it."""
    optimizer = engine.optimizer
    if internals.is_partitioned(parameter):
        group = internals.shard_of(parameter).group
        assert group is not None, "a parameter that nobody trains is in no group"
        return internals.zero3_flats(optimizer)[group]
    if not internals.is_linked(parameter):
        return parameter
    return internals.linked_flats(optimizer)[internals.linked_group(optimizer, parameter)]


@torch.no_grad()
def refresh_weights(engine: Any) -> None:
    """Update the weights used for computing from the restored master weights. Collective."""
    optimizer = engine.optimizer
    if not internals.is_zero3(optimizer):
        internals.refresh_linked(optimizer)
        return
    masters = internals.zero3_flats(optimizer)
    if internals.is_swapped(optimizer):
        masters = swap.flats(optimizer)
        swap.flush(masters, optimizer)
    internals.refresh_zero3(engine, masters)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _flats_and_states(engine: Any) -> tuple[list[torch.Tensor] | None, Any]:
    """Return the flat weights and the states per element; mapped from files if they are on NVMe."""
    if not internals.is_swapped(engine.optimizer):
        return None, _per_element(engine)
    flats = swap.flats(engine.optimizer)
    return flats, swap.states(engine.optimizer, flats)


def _per_element(engine: Any) -> Any:
    """Return the optimizer's states by flat tensor, with a value for every element."""
    inner = internals.inner_optimizer(engine)
    if not eight_bit.is_eight_bit(inner):
        return inner.state
    return {flat: eight_bit.per_element(state) for flat, state in inner.state.items()}


def _is_per_element(key: str, value: Any, flat: torch.Tensor) -> bool:
    return key != _STEP and torch.is_tensor(value) and value.shape == flat.shape
