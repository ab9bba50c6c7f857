"""Gradients at step 0, added up over micro-batches and ranks as a layout does."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.models.skeleton import DTYPES
from tests.gates.parity import recipe
from tests.gates.parity.measure import worst_relative
from tests.gates.parity.model import Gradients, PlainModel, Split, Way
from tests.gates.parity.samples import global_batch
from tests.gates.parity.spread import ORDERS


@dataclass(frozen=True)
class Sum:
    """A layout's way to add up the gradients of its micro-batches: in `precision` on each rank, and
    over several ranks in the precision that the model computes in.
    """

    precision: str
    micro_batch: int
    ranks: int
    every_micro_batch: bool
    """Ranks add up each micro-batch, as ZeRO 2 and 3 do; else their sums at the end."""
    stages: int = 1
    """Pipeline stages: the first and the last each add up their own part of a tied weight's."""
    by_module: bool = False
    """A tensor that several modules read gets one gradient of each of them, as under ZeRO 3, whose
    hooks take a module's inputs apart."""


def gradients(way: Way, by: Sum) -> tuple[Gradients, float]:
    """Return the gradients at step 0, added up as `by` says, and how far they are from themselves
    when the order changes: relative, of the worst parameter.

    Each micro-batch's gradients are the same to the bit as in a layout that splits alike. A sum in
    a lower precision therefore shows, even where micro-batches are computed in it. A GPU's kernels
    may add atomically, as fused attention's backward pass does: there the gradients are computed
    once more, and how far they then are from themselves counts, too.
    """
    model = PlainModel(way, balance=True)
    model.scale *= by.ranks  # which divide by their number before they add up, where it may round
    tied = model.untied() if by.stages > 1 else {}
    if by.by_module:
        for module in model.model.modules():
            module.register_forward_pre_hook(_inputs_apart)
    split = Split.even(by.micro_batch)

    def computed() -> list[list[Gradients]]:
        """Return the first micro-batch of every rank, the second..."""
        parts = [part for _, part in model.each_micro_batch(global_batch(0), split)]
        return [parts[start : start + by.ranks] for start in range(0, len(parts), by.ranks)]

    rounds = computed()
    again = [computed()] if may_differ(way.device) else []
    draw, sums = random.Random(recipe.SEED), []
    for number in range(1 + ORDERS + len(again)):
        ranks = [*range(by.ranks)]
        if number > ORDERS:
            rounds = again[0]
        elif number:
            draw.shuffle(ranks)
            rounds = draw.sample(rounds, len(rounds))
        in_order = [[round_[rank] for rank in ranks] for round_ in rounds]
        total = {}
        for name in model.masters:
            copies = [name, tied[name]] if name in tied else [name]
            each = [[part[copy] for part in round_] for copy in copies for round_ in in_order]
            total[name] = _sum(each, model, by)
        sums.append(total)
    return sums[0], max(worst_relative(total_, sums[0]) for total_ in sums[1:])


def may_differ(device: str) -> bool:
    """Return True if a device may compute the same operations otherwise the second time."""
    return device != "cpu"


def _inputs_apart(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_Apart.apply(x) if torch.is_tensor(x) else x for x in inputs)


class _Apart(torch.autograd.Function):
    """The same tensor, whose gradients are added up before they go on."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return gradient


def _sum(rounds: list[list[torch.Tensor]], model: PlainModel, by: Sum) -> torch.Tensor:
    """Add up one parameter's fp32 gradients, by round and rank."""
    kept = DTYPES[by.precision]

    def added(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        first, *others = [tensor.to(dtype) for tensor in tensors]
        return functools.reduce(torch.add, others, first)

    def over_ranks(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if by.ranks == 1:
            return tensors[0]
        return added([tensor.to(model.dtype) / by.ranks for tensor in tensors], model.dtype)

    scaled = [[tensor * model.scale for tensor in round_] for round_ in rounds]
    if by.every_micro_batch:
        total = added([over_ranks(round_) for round_ in scaled], kept)
    else:
        total = over_ranks([added(own, kept) for own in zip(*scaled, strict=True)])
    return (total.float() / (model.scale / by.ranks)).cpu()
