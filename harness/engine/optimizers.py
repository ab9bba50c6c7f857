"""Optimizers that DeepSpeed lacks, or gets wrong once ZeRO has split weights into flat pieces.
layout/optimizer_table.py has a row for each value of `optim.name`.

They receive fp32 master weights and gradients that DeepSpeed has summed, unscaled and clipped, in
pieces of any size: the update of an element is the same in every layout. DeepSpeed 0.19.8 has a
Lion for GPUs only and another for offload only; an Adagrad that fails with two parameter groups;
and a Muon that clips its update at some stages (docs/deepspeed_findings.md, 29, 30).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Adafactor, AdamW, Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _zeropower_via_newtonschulz

from harness.config.own import ROWS, Row
from harness.engine.deepspeed_0_19 import internals
from harness.engine.eight_bit import adam8bit
from harness.engine.state import flat_of, pieces
from harness.errors import ConfigError
from harness.plan.plan import Plan


@dataclass(frozen=True)
class _Matrix:
    """A matrix or a stack: `numel` elements from `offset` on are at `start` of the flat tensor."""

    shape: tuple[int, ...]
    offset: int
    start: int
    numel: int
    holders: tuple[int, ...]  # ranks of the group with a piece; empty if every rank has all of it


class Matrices:
    """The matrices that `engine` steps with Muon, by the flat tensor that contains their pieces.

    `group`: the ranks over which the states are sharded. Collective.
    """

    def __init__(
        self, engine: Any, module: torch.nn.Module, names: set[str], group: dist.ProcessGroup | None
    ) -> None:
        self._group = group or dist.group.WORLD
        self._device = engine.device
        self._rank = dist.get_rank(self._group)
        places = {place.name: place for place in pieces(engine, module) if place.name in names}
        spread: list[Any] = [None] * dist.get_world_size(self._group)
        mine = {name for name, place in places.items() if not place.replicated}
        dist.all_gather_object(spread, mine, group=self._group)
        self._of: dict[int, list[_Matrix]] = defaultdict(list)
        for name, parameter in module.named_parameters():
            if name not in names:
                continue
            shape = internals.whole_shape(parameter)
            holders = tuple(rank for rank, names_there in enumerate(spread) if name in names_there)
            place = places.get(name)
            position = (place.offset, place.start, place.numel) if place else (0, 0, 0)
            self._of[id(flat_of(engine, parameter))].append(_Matrix(shape, *position, holders))

    def orthogonalized(
        self, flat: torch.Tensor, update: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield (orthogonalised piece, its location in `flat`, longer side of the matrix) for each
        matrix.

        A matrix on one rank is computed there. One that spans several ranks is assembled on one of
        them, in turn. Pieces are exchanged in bf16, the precision of the computation, so nothing is
        lost. Collective if a matrix is split.
        """
        source, target = update.view(-1), flat.detach().view(-1)
        split = []
        for matrix in self._of[id(flat)]:
            if len(matrix.holders) > 1:
                split.append(matrix)
            elif matrix.numel:
                yield _part(matrix, _orthogonal(self._filled(matrix, source)), target)
        ranks = dist.get_world_size(self._group)
        for start in range(0, len(split), ranks):  # one or two matrices per rank at a time
            yield from self._of_several(split[start : start + ranks], source, target)

    def _of_several(
        self, matrices: list[_Matrix], source: torch.Tensor, target: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield as `orthogonalized` does, for matrices that span several ranks. Collective."""
        mine: dict[int, torch.Tensor] = {}
        for number, matrix in enumerate(matrices):
            whole, owner = self._filled(matrix, source), _owner(number, matrix)
            dist.reduce(whole, group_dst=owner, group=self._group)
            if owner == self._rank:
                mine[number] = _orthogonal(whole)
        for number, matrix in enumerate(matrices):
            if number in mine:
                whole = mine.pop(number)
            else:
                whole = torch.empty(matrix.shape, dtype=torch.bfloat16, device=self._device)
            dist.broadcast(whole, group_src=_owner(number, matrix), group=self._group)
            if matrix.numel:
                yield _part(matrix, whole, target)

    def _filled(self, matrix: _Matrix, source: torch.Tensor) -> torch.Tensor:
        """Return a matrix with this rank's piece filled in and zeros elsewhere."""
        whole = torch.zeros(matrix.shape, dtype=torch.bfloat16, device=self._device)
        piece = source.narrow(0, matrix.start, matrix.numel)
        whole.view(-1).narrow(0, matrix.offset, matrix.numel).copy_(piece)
        return whole


def _part(
    matrix: _Matrix, whole: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return this rank's piece of `whole`, its location in `target`, and the longer side."""
    piece = whole.view(-1).narrow(0, matrix.offset, matrix.numel)
    place = target.narrow(0, matrix.start, matrix.numel)
    return piece.to(place.device), place, max(matrix.shape[-2:])


def _owner(number: int, matrix: _Matrix) -> int:
    return matrix.holders[number % len(matrix.holders)]


def _orthogonal(whole: torch.Tensor) -> torch.Tensor:
    """Replace a matrix, or each of a stack of experts, by roughly its nearest orthogonal matrix."""
    for matrix in whole.view(-1, *whole.shape[-2:]):
        coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
        matrix.copy_(_zeropower_via_newtonschulz(matrix.clone(), coefficients, 5, 1e-7))
    return whole


class Lion(Optimizer):
    """Steps by the sign of an interpolated momentum (arXiv 2302.06675, program 1)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody has one
        """Take one step with the current gradients."""
        for group, p, state in _with_gradients(self):
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(p)
            beta1, beta2 = group["betas"]
            update = state["exp_avg"].lerp(p.grad, 1 - beta1).sign_()
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
            state["exp_avg"].lerp_(p.grad, 1 - beta2)


class Adagrad(Optimizer):
    """Divides gradients by the root of the sum of their squares (JMLR 12, 2011); L2 decay.

    torch's Adagrad creates its states in the constructor, before DeepSpeed splits the weights.
    """

    def __init__(self, params: Any, lr: float, eps: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody has one
        """Take one step with the current gradients."""
        for group, p, state in _with_gradients(self):
            if "sum" not in state:
                state["sum"] = torch.zeros_like(p)
            decay = group["weight_decay"]
            gradient = p.grad.add(p, alpha=decay) if decay else p.grad
            state["sum"].addcmul_(gradient, gradient)
            p.addcdiv_(gradient, state["sum"].sqrt().add_(group["eps"]), value=-group["lr"])


class Orthogonalizing(AdamW):
    """Muon: orthogonalised momentum for the matrices of the layers, AdamW for the rest.

    The update is that of torch.optim.Muon (5 Newton-Schulz steps in bf16, Nesterov momentum),
    scaled to the size of AdamW's (arXiv 2502.16982, section 2.2), so that one learning rate fits
    both. Set `matrices` once DeepSpeed has split the weights. Not named Muon, because DeepSpeed
    mistakes any class of that name for its own.
    """

    matrices: Matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody has one
        """Take one step with the current gradients."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            if self.param_groups:
                super().step()
        finally:
            self.param_groups = groups
        for group, p, state in _with_gradients(self):
            if not group["muon"]:
                continue
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            update = p.grad.lerp(state["momentum_buffer"], group["momentum"])
            p.mul_(1 - group["lr"] * group["weight_decay"])
            for piece, place, size in self.matrices.orthogonalized(p, update):
                place.add_(piece, alpha=-group["lr"] * 0.2 * size**0.5)


def _with_gradients(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Any, dict[str, Any]]]:
    """Yield (group, parameter, its state) of each parameter with a gradient."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                yield group, p, optimizer.state[p]


# Optimizers by the type in the resolved JSON; called with parameter groups and its params.
BUILT_HERE: dict[str, Callable[..., Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adagrad": Adagrad,
    "Lion": Lion,
    "Muon": lambda groups, momentum, **settings: Orthogonalizing(
        [{**group, "momentum": momentum} for group in groups], **settings
    ),
    "Adafactor": Adafactor,
    "AdamW8bit": adam8bit,
}


def _made_by(
    row: Row, values: Mapping[str, Any], groups: list[dict[str, Any]], **settings: Any
) -> Optimizer:
    """Return the optimizer that the function of run.code makes. Raises ConfigError."""
    try:
        made = row.bound(values)(groups, **settings)
    except Exception as error:
        raise row.failed(error) from error
    if not isinstance(made, Optimizer):
        raise ConfigError(f"{row} returns a {type(made).__name__}, not a torch.optim.Optimizer")
    if made.state:
        why = "but ZeRO divides the weights after that: create them in the first step"
        raise ConfigError(f"{row} creates states when it is made, {why}")
    return made


def our_optimizer(plan: Plan) -> Callable[[list[dict[str, Any]]], Optimizer] | None:
    """Return the function that builds the plan's optimizer; None if DeepSpeed builds it."""
    section = plan.deepspeed["optimizer"]
    make = BUILT_HERE.get(section["type"])
    if row := ROWS.get(("optimizer", plan.config.optim.name)):
        make = partial(_made_by, row, plan.config.own.given)
    return None if make is None else lambda groups: make(groups, **section["params"])
