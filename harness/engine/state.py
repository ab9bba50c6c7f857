"""What DeepSpeed's optimizers hold of each parameter on this rank, as fragments; and back again.

Each of DeepSpeed's wrappers flattens groups of parameters and gives the optimizer one flat fp32
tensor per group; where a parameter lies in it is read from private attributes, which
tests/engine/test_state.py guards with a round trip between all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.checkpoint.fragment import BUFFER, WEIGHT, Fragment
from harness.engine import quirks

# Fills a flat tensor with elements [offset, offset + numel) of (name, kind), where it is stored.
Fill = Callable[[str, str, int, torch.Tensor], None]
# The kinds of optimizer state that were saved of a parameter.
Kinds = Callable[[str], Iterable[str]]
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_ADAPTS = "last_overflow_iter"
_STEP = "step"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class _Place:
    """Where a fragment of a parameter lies: `flat[start : start + numel]`, a key of the state."""

    name: str
    parameter: nn.Parameter
    offset: int
    flat: torch.Tensor
    start: int
    numel: int
    replicated: bool  # on all data ranks alike

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().view(-1).narrow(0, self.start, self.numel)


def fragments(engine: Any, module: nn.Module, data_rank: int, data_ranks: int) -> list[Fragment]:
    """What this rank is to save: together the ranks hold every element once.

    What all data ranks hold alike is dealt out among them.
    """
    found = []
    for place in _places(engine, module):
        if getattr(place.parameter, "ds_pipe_replicated", False):
            continue  # the other end of the pipeline saves it
        state = _state(engine).get(place.flat, {})
        moments = {k: place.view(v) for k, v in state.items() if _is_per_element(k, v, place.flat)}
        fragment = Fragment(
            place.name,
            tuple(getattr(place.parameter, "ds_shape", place.parameter.shape)),
            place.offset,
            {WEIGHT: place.view(place.flat), **moments},
        )
        own = fragment.share(data_rank, data_ranks) if place.replicated else fragment
        if own is not None:
            found.append(own)
    if data_rank == 0:
        found += [
            Fragment(name, tuple(buffer.shape), 0, {BUFFER: buffer.detach().reshape(-1)})
            for name, buffer in _persistent_buffers(module)
        ]
    return found


@torch.no_grad()
def restore(engine: Any, module: nn.Module, fill: Fill, kinds: Kinds) -> None:
    """Fill everything that `fragments` names, whoever saved it; collective.

    What the optimizer has not made yet is made; a parameter of which nothing but the weight was
    saved, since it never had a gradient, gets nothing else.
    """
    for place in _places(engine, module):
        name = getattr(place.parameter, "tied_to", place.name)
        fill(name, WEIGHT, place.offset, place.view(place.flat))
        if place.parameter.requires_grad:
            for kind in kinds(name):
                state = _state(engine)[place.flat]
                if kind not in state:
                    state[kind] = torch.zeros_like(place.flat, requires_grad=False)
                fill(name, kind, place.offset, place.view(state[kind]))
    for name, buffer in _persistent_buffers(module):
        flat = torch.empty_like(buffer).view(-1)
        fill(name, BUFFER, 0, flat)
        buffer.copy_(flat.view_as(buffer))
    _refresh_weights(engine)


def scalars(engine: Any) -> dict[str, dict[str, Any]]:
    """Counters, loss scaling and the optimizer's steps: plain numbers, the same on all ranks."""
    scaler, inner = _scaler(engine), _inner(engine)
    counts = [held[_STEP] for held in (*inner.state.values(), *inner.param_groups) if _STEP in held]
    return {
        "counters": {name: int(getattr(engine, name)) for name in _COUNTERS},
        "loss_scaling": {name: getattr(scaler, name) for name in _SCALER if hasattr(scaler, name)},
        "optimizer": {_STEP: float(counts[0])} if counts else {},
    }


def restore_scalars(engine: Any, saved: dict[str, dict[str, Any]]) -> None:
    """Set what `scalars` gave; after `restore`."""
    for name, value in saved["counters"].items():
        setattr(engine, name, value)
    scaler, inner = _scaler(engine), _inner(engine)
    adapts = hasattr(scaler, _ADAPTS) and _ADAPTS in saved["loss_scaling"]
    for name, value in saved["loss_scaling"].items() if adapts else ():  # a fixed one is the JSON's
        setattr(scaler, name, value)
    # torch's optimizers count in tensors, DeepSpeed's in integers; FusedAdam once per group.
    as_tensor = type(inner).__module__.startswith("torch.")
    for name, value in saved["optimizer"].items():
        for state in inner.state.values():
            state[name] = torch.tensor(value) if as_tensor else int(value)
        if not as_tensor:
            for group in inner.param_groups:
                group[name] = int(value)
    quirks.replay_adam_steps(engine.optimizer)


def _places(engine: Any, module: nn.Module) -> Iterator[_Place]:
    """Every parameter's fragment on this rank, in the module's order; tied ones once."""
    for name, p in module.named_parameters():
        if hasattr(p, "ds_id"):
            yield from _place_zero3(name, p)
        elif not hasattr(p, "_hp_mapping"):  # ZeRO-0 in fp32, or frozen
            yield _Place(name, p, 0, p, 0, p.numel(), True)
        elif p._hp_mapping is not None:
            held, address = p._hp_mapping, p._hp_mapping.hp_fragment_address
            flat = _flats(engine.optimizer)[held.param_group_index]
            offset = held.lp_fragment_address.start
            yield _Place(name, p, offset, flat, address.start, address.numel, False)


def _flats(optimizer: Any) -> list[torch.Tensor]:
    """One flat fp32 tensor per parameter group: this rank's share, under ZeRO-1 and ZeRO-2."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return list(optimizer.single_partition_of_fp32_groups)
    return list(optimizer.fp32_groups_flat_partition)  # BF16_Optimizer


def _place_zero3(name: str, p: Any) -> Iterator[_Place]:
    size = p.ds_tensor.ds_numel
    if not p.requires_grad:  # nobody has a flat copy of it
        rank = torch.distributed.get_rank(p.ds_process_group)
        flat, start = p.ds_tensor.data, 0
    else:
        optimizer = p._z3_optimizer
        rank = optimizer._get_param_partition_rank(p)
        group, start, _ = optimizer.grad_position[optimizer.get_param_id(p)]
        flat = optimizer.fp32_partitioned_groups_flat[group]
    offset = rank * size
    numel = min(size, p.ds_numel - offset)  # the last ranks' shares end in padding
    if numel > 0:
        yield _Place(name, p, offset, flat, start, numel, False)


def _refresh_weights(engine: Any) -> None:
    """The weights that the model computes with, from the master weights just read."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        _refresh_zero3(optimizer)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _refresh_zero3(optimizer: Any) -> None:
    # As DeepSpeed's own _rigid_load_state_dict does after reading.
    groups = zip(
        optimizer.fp32_partitioned_groups_flat,
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


def _inner(engine: Any) -> Any:
    """The optimizer inside DeepSpeed's wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _state(engine: Any) -> Any:
    return _inner(engine).state


def _scaler(engine: Any) -> Any:
    """The object that holds the loss scale; None where nothing is scaled."""
    return getattr(engine.optimizer, "loss_scaler", None)


def _is_per_element(key: str, value: Any, flat: torch.Tensor) -> bool:
    return key != _STEP and torch.is_tensor(value) and value.shape == flat.shape
