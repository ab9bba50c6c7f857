"""The truth: a plain PyTorch loop on one process."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.data.batch import Batch
from harness.steps import dropout_seed
from tests.gates.parity import recipe
from tests.gates.parity.cells import STEPS
from tests.gates.parity.measure import Trajectory, unit_of
from tests.gates.parity.model import PlainModel, Split, Way
from tests.gates.parity.samples import global_batch, held_out


@dataclass(frozen=True)
class Task:
    """Batches, learning rates and the number of steps."""

    steps: int
    batch: Callable[[int], Batch]
    """The global batch of a step, counted from 0."""
    rate: Callable[[int], float]
    """The learning rate of a step, counted from 0."""
    held_out: Batch


GATE = Task(STEPS, global_batch, recipe.learning_rate, held_out())


def train(way: Way, split: Split, balance: bool = True, task: Task = GATE) -> Trajectory:
    """Gradients and one SGD step, then AdamW steps from the same start, and an evaluation.

    `balance` switches the balancing loss of a mixture of experts.
    """
    result = Trajectory()
    fresh = PlainModel(way, balance)
    torch.manual_seed(dropout_seed(recipe.SEED, 0, 0))
    fresh.accumulate(task.batch(0), split)
    result.gradients = {n: m.grad.float().cpu() for n, m in fresh.masters.items()}
    before = {n: m.to(torch.float32, copy=True) for n, m in fresh.masters.items()}
    fresh.step(torch.optim.SGD(fresh.masters.values(), lr=recipe.SGD_LR))
    result.sgd_changes = {n: (m.float() - before[n]).cpu() for n, m in fresh.masters.items()}
    result.units = {n: unit_of(m.float(), before[n]).cpu() for n, m in fresh.masters.items()}

    model = PlainModel(way, balance)
    groups = _groups(model)
    optimizer = torch.optim.AdamW(groups, betas=recipe.BETAS, eps=recipe.EPS)
    for step in range(task.steps):
        torch.manual_seed(dropout_seed(recipe.SEED, step, 0))
        result.losses.append(model.accumulate(task.batch(step), split))
        result.norms.append(_clip(model.masters.values(), recipe.CLIP_NORM))
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step) * group["multiplier"]
        model.step(optimizer)
    result.held_out = model.evaluate(task.held_out, len(split.micro_batches[0]))
    return result


trained = functools.cache(train)
"""The same, once in a process: of what is compared several times."""


def _clip(masters: Iterable[torch.Tensor], limit: float) -> float:
    """Scale gradients to a norm of at most `limit`; returns the norm before.

    It is summed in fp64: torch's own, in fp32, is off by more than the order of samples changes it.
    """
    gradients = [master.grad for master in masters if master.grad is not None]
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm


def _groups(model: PlainModel) -> list[dict[str, Any]]:
    """Return a group for each parameter, so that none is stepped as its neighbour is."""
    embeddings = {
        f"{name}.weight"
        for name, module in model.model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    groups = []
    for name, master in model.masters.items():
        decay, multiplier = recipe.WEIGHT_DECAY, 1.0
        if master.ndim < 2 or name in embeddings:
            decay = 0.0
        if re.search(recipe.GROUP_PATTERN, name):
            decay, multiplier = recipe.GROUP_WEIGHT_DECAY, recipe.GROUP_LR_MULTIPLIER
        groups.append({"params": [master], "weight_decay": decay, "multiplier": multiplier})
    return groups
