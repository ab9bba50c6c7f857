"""The optimizers that DeepSpeed lacks, or gets wrong once ZeRO has cut weights into flat pieces.

They see fp32 master weights and gradients that DeepSpeed has summed, unscaled and clipped, in
whatever pieces: what they do to an element is the same in every layout. DeepSpeed 0.19.8 has a
Lion for GPUs alone and one for offload alone; an Adagrad that fails with two groups; and a Muon
whose update is clipped at some stages, its gradient at others (docs/deepspeed_findings.md, 29, 30).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Adafactor, AdamW, Optimizer

from harness.engine.matrices import Matrices
from harness.plan.plan import Plan


class Lion(Optimizer):
    """The sign of an interpolated momentum, with decoupled decay (arXiv 2302.06675, program 1)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody has one
        """Take one step with the gradients that are there."""
        for group, p, state in _with_gradients(self):
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(p)
            beta1, beta2 = group["betas"]
            update = state["exp_avg"].lerp(p.grad, 1 - beta1).sign_()
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
            state["exp_avg"].lerp_(p.grad, 1 - beta2)


class Adagrad(Optimizer):
    """Gradients over the root of the sum of all their squares (JMLR 12, 2011); L2 decay.

    torch's own makes its states when it is built, before DeepSpeed cuts the weights up.
    """

    def __init__(self, params: Any, lr: float, eps: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody has one
        """Take one step with the gradients that are there."""
        for group, p, state in _with_gradients(self):
            if "sum" not in state:
                state["sum"] = torch.zeros_like(p)
            decay = group["weight_decay"]
            gradient = p.grad.add(p, alpha=decay) if decay else p.grad
            state["sum"].addcmul_(gradient, gradient)
            p.addcdiv_(gradient, state["sum"].sqrt().add_(group["eps"]), value=-group["lr"])


class Orthogonalizing(AdamW):
    """Muon: orthogonalised momentum for the layers' matrices, AdamW for the rest.

    The update is torch.optim.Muon's (5 Newton-Schulz steps in bf16, Nesterov momentum), as large as
    AdamW's (arXiv 2502.16982, section 2.2): one learning rate serves both. `matrices` is to be set
    once DeepSpeed has cut the weights up, which takes any class called Muon for its own.
    """

    matrices: Matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody has one
        """Take one step with the gradients that are there."""
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
    """(group, parameter, its state) of all that has a gradient."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                yield group, p, optimizer.state[p]


def _adam8bit(params: Any, **settings: Any) -> Optimizer:
    from bitsandbytes.optim.adamw import AdamW8bit  # where it is installed

    # All of it: which tensors are small would depend on how ZeRO cuts them.
    return AdamW8bit(params, min_8bit_size=1, **settings)


# By the type in the resolved JSON, given parameter groups and its params.
BUILT_HERE: dict[str, Callable[..., Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adagrad": Adagrad,
    "Lion": Lion,
    "Muon": lambda groups, momentum, **settings: Orthogonalizing(
        [{**group, "momentum": momentum} for group in groups], **settings
    ),
    "Adafactor": Adafactor,
    "AdamW8bit": _adam8bit,
}


def our_optimizer(plan: Plan) -> Callable[[list[dict[str, Any]]], Optimizer] | None:
    """Return the function that builds the plan's optimizer; None if DeepSpeed builds it."""
    section = plan.deepspeed["optimizer"]
    make = BUILT_HERE.get(section["type"])
    return None if make is None else lambda groups: make(groups, **section["params"])
