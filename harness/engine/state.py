"""What DeepSpeed's optimizers hold of each parameter on this rank, as fragments; and back again.

Each of DeepSpeed's wrappers flattens groups of parameters and gives the optimizer one flat fp32
tensor per group; where a parameter lies in it is read from private attributes, which
tests/test_checkpoints.py guards with a round trip between all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.checkpoint.fragment import BUFFER, WEIGHT, Fragment
from harness.engine import eight_bit, swap
from harness.engine.deepspeed_0_19 import settlements
from harness.engine.parts import is_copy, part_of
from harness.layout.box import Part
from harness.layout.share import Share

# Fills a flat tensor with elements [offset, offset + numel) of a part of (name, kind), where it is
# stored.
Fill = Callable[[str, str, int, torch.Tensor, Part], None]
# The kinds of optimizer state that were saved of a parameter.
Kinds = Callable[[str], Collection[str]]
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_STEP = "step"
# Adafactor's means over rows and columns, and the dimension that they are taken over.
_MEANS = {"row_var": -1, "col_var": -2}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class Place:
    """Where a fragment of a parameter lies: `flat[start : start + numel]`, a key of the state."""

    name: str
    parameter: nn.Parameter
    offset: int
    flat: torch.Tensor
    start: int
    numel: int
    replicated: bool  # on all data ranks alike

    @property
    def part(self) -> Part:
        """What the tensor is of the whole model's parameter, of which `offset` counts elements."""
        return part_of(self.parameter)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fragment of `flat`, or of a state of the same shape."""
        return tensor.detach().view(-1).narrow(0, self.start, self.numel)


def fragments(engine: Any, module: nn.Module, share: Share) -> list[Fragment]:
    """What this rank is to save: together the ranks hold every element once.

    What all its replicas hold alike is dealt out among them.
    """
    found = []
    replicas = share.ranks("replicas")
    place_among = replicas.index(share.rank)
    flats, states = _held(engine)
    for place in pieces(engine, module, flats):
        if is_copy(place.parameter):
            continue  # another rank saves it
        state = states.get(place.flat, {})
        moments = {k: place.view(v) for k, v in state.items() if _is_per_element(k, v, place.flat)}
        fragment = Fragment(
            place.name,
            place.part,
            place.offset,
            {WEIGHT: place.view(place.flat), **moments},
        )
        own = fragment.share(place_among, len(replicas)) if place.replicated else fragment
        if own is not None:
            found.append(own)
        if place_among == 0:
            means = {key: state[key] for key in _MEANS if key in state}
            found += [
                Fragment(f"{place.name}:{key}", Part.of(mean.shape), 0, {key: mean.view(-1)})
                for key, mean in means.items()
            ]
    if place_among == 0:
        found += [
            Fragment(name, Part.of(buffer.shape), 0, {BUFFER: buffer.detach().reshape(-1)})
            for name, buffer in _persistent_buffers(module)
        ]
    return found


@torch.no_grad()
def restore(engine: Any, module: nn.Module, fill: Fill, kinds: Kinds) -> None:
    """Fill everything that `fragments` names, whoever saved it; `refresh_weights` is to follow.

    What the optimizer has not made yet is made, and what was not made yet when that was saved is
    zeros. Talks to no other rank: where `fill` raises on one of them, none is left waiting.
    """
    inner = inner_optimizer(engine)
    if swap.is_swapped(engine.optimizer):
        trained = (name for name, p in module.named_parameters() if p.requires_grad)
        swap.make_states(engine.optimizer, kinds(next(trained)))
    flats, states = _held(engine)
    for place in pieces(engine, module, flats):
        name = getattr(place.parameter, "tied_to", place.name)
        fill(name, WEIGHT, place.offset, place.view(place.flat), place.part)
        if place.parameter.requires_grad:
            wanted = kinds(name)  # none for a weight that never had a gradient
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


def scalars(engine: Any) -> dict[str, dict[str, Any]]:
    """Counters, loss scaling and the optimizer's steps: plain numbers, the same on all ranks."""
    inner, scaler = inner_optimizer(engine), _scaler(engine)
    counts = [held[_STEP] for held in (*inner.state.values(), *inner.param_groups) if _STEP in held]
    return {
        "counters": {name: int(getattr(engine, name)) for name in _COUNTERS},
        "loss_scaling": {n: getattr(scaler, n) for n in _SCALER if hasattr(scaler, n)},
        "optimizer": {_STEP: float(counts[0])} if counts else {},
    }


def restore_scalars(engine: Any, saved: dict[str, dict[str, Any]]) -> None:
    """Set what `scalars` gave; after `restore`."""
    inner, scaler = inner_optimizer(engine), _scaler(engine)
    for name in _COUNTERS:
        if name in saved["counters"]:
            setattr(engine, name, saved["counters"][name])
    for name in _SCALER:
        if hasattr(scaler, name) and name in saved["loss_scaling"]:
            setattr(scaler, name, saved["loss_scaling"][name])
    # torch's optimizers count in tensors, DeepSpeed's in integers; FusedAdam once per group.
    as_tensor = isinstance(inner, torch.optim.Adam | torch.optim.Adafactor)
    count = saved["optimizer"].get(_STEP)
    for held in (*inner.state.values(), *(() if as_tensor else inner.param_groups)):
        if count is not None or _STEP in held:  # which may be beyond what was saved before any step
            held[_STEP] = torch.tensor(float(count or 0)) if as_tensor else int(count or 0)
    settlements.replay_adam_steps(engine.optimizer)


def pieces(
    engine: Any, module: nn.Module, flats: list[torch.Tensor] | None = None
) -> Iterator[Place]:
    """Where this rank has what of every parameter, in the module's order; tied ones once.

    `flats`: under ZeRO-3, in the place of the optimizer's own.
    """
    for name, p in module.named_parameters():
        if hasattr(p, "ds_id"):
            yield from _place_zero3(name, p, flats)
        elif not hasattr(p, "_hp_mapping"):  # ZeRO-0 in fp32, or frozen
            yield Place(name, p, 0, p, 0, p.numel(), True)
        elif p._hp_mapping is not None:
            held, address = p._hp_mapping, p._hp_mapping.hp_fragment_address
            flat = _flats(engine.optimizer)[held.param_group_index]
            offset = held.lp_fragment_address.start
            yield Place(name, p, offset, flat, address.start, address.numel, False)


def flat_of(engine: Any, parameter: Any) -> torch.Tensor:
    """The flat tensor that the optimizer is given for a parameter's group, whoever has the
    parameter's elements: all ranks have one of each group.
    """
    if hasattr(parameter, "ds_id"):
        optimizer = parameter._z3_optimizer
        group, _, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        return optimizer.fp32_partitioned_groups_flat[group]
    if not hasattr(parameter, "_hp_mapping"):
        return parameter
    optimizer = engine.optimizer
    groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
    index = next(n for n, group in enumerate(groups) if any(p is parameter for p in group))
    return _flats(optimizer)[index]


def _flats(optimizer: Any) -> list[torch.Tensor]:
    """One flat fp32 tensor per parameter group: this rank's share, under ZeRO-1 and ZeRO-2."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return list(optimizer.single_partition_of_fp32_groups)
    return list(optimizer.fp32_groups_flat_partition)  # BF16_Optimizer


def _place_zero3(name: str, p: Any, flats: list[torch.Tensor] | None) -> Iterator[Place]:
    size = p.ds_tensor.ds_numel
    if not p.requires_grad:  # nobody has a flat copy of it
        rank = torch.distributed.get_rank(p.ds_process_group)
        flat, start = p.ds_tensor.data, 0
    else:
        optimizer = p._z3_optimizer
        rank = optimizer._get_param_partition_rank(p)
        group, start, _ = optimizer.grad_position[optimizer.get_param_id(p)]
        flat = (flats or optimizer.fp32_partitioned_groups_flat)[group]
    offset = rank * size
    numel = min(size, p.ds_numel - offset)  # the last ranks' shares end in padding
    if numel > 0:
        yield Place(name, p, offset, flat, start, numel, False)


@torch.no_grad()
def refresh_weights(engine: Any) -> None:
    """The weights that the model computes with, from the master weights just read; collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for parameter in engine.module.parameters():
            # hpZ's second copy, of the weights before; DeepSpeed forgets those that nobody trains.
            parameter.ds_secondary_tensor = None
        _refresh_zero3(optimizer)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _refresh_zero3(optimizer: Any) -> None:
    # As DeepSpeed's own _rigid_load_state_dict does after reading.
    masters = optimizer.fp32_partitioned_groups_flat
    if swap.is_swapped(optimizer):
        masters = swap.flats(optimizer)
        swap.flush(masters, optimizer)
    groups = zip(
        masters,
        optimizer.fp16_partitioned_groups_flat,
        optimizer.fp16_partitioned_groups,
        strict=True,
    )
    for master, flat, group in groups:
        if master.numel():
            flat.data.copy_(master.data)
        for parameter, piece in zip(group, optimizer.unflatten(flat, group), strict=True):
            parameter.data = piece.data
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
    optimizer.checkpoint_event_epilogue()


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def inner_optimizer(engine: Any) -> Any:
    """The optimizer inside DeepSpeed's wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _held(engine: Any) -> tuple[list[torch.Tensor] | None, Any]:
    """What `pieces` and `_per_element` are to give: of files, where states are on NVMe."""
    if not swap.is_swapped(engine.optimizer):
        return None, _per_element(engine)
    flats = swap.flats(engine.optimizer)
    return flats, swap.states(engine.optimizer, flats)


def _per_element(engine: Any) -> Any:
    """The optimizer's states by flat tensor, a value for every element; where it keeps them so,
    its own.
    """
    inner = inner_optimizer(engine)
    if not eight_bit.is_eight_bit(inner):
        return inner.state
    return {flat: eight_bit.per_element(state) for flat, state in inner.state.items()}


def _scaler(engine: Any) -> Any:
    """The object that holds a loss scale that adapts; None where the JSON fixes it, which may be at
    another value than for the run that saved.
    """
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def _is_per_element(key: str, value: Any, flat: torch.Tensor) -> bool:
    return key != _STEP and torch.is_tensor(value) and value.shape == flat.shape
