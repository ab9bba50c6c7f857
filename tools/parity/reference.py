"""The truth: a plain PyTorch loop on one process, with nothing of DeepSpeed in it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from harness.data.batches import Batch
from harness.models.initialize import materialize
from harness.models.loss import forward
from harness.models.pieces import decoder_layers
from harness.models.skeleton import DTYPES, described_parameters, hf_config, skeleton
from tools.parity.cells import ARCHITECTURES, ATTENTION, GLOBAL_BATCH, STEPS
from tools.parity.measure import Difference, Trajectory, difference, rounding
from tools.parity.recipe import BETAS, CLIP_NORM, EPS, LR, SEED, SGD_LR, WEIGHT_DECAY
from tools.parity.samples import global_batch, rows, targets

FP16_SCALE = 2.0**12
ORDERS = 8


@dataclass(frozen=True)
class Split:
    """One way to walk through a global batch: which samples go into each micro-batch."""

    micro_batches: tuple[tuple[int, ...], ...]

    @classmethod
    def even(cls, micro_batch: int) -> Split:
        """Consecutive samples, `micro_batch` at a time."""
        starts = range(0, GLOBAL_BATCH, micro_batch)
        return cls(tuple(tuple(range(s, s + micro_batch)) for s in starts))


@dataclass(frozen=True)
class Way:
    """How the plain loop computes."""

    architecture: str
    precision: str
    bf16_states: bool = False
    compiled: bool = False
    """Every decoder layer: what a compiler fuses into one operation rounds once, not each time, so
    what is compiled is held to what is."""


class _Model:
    """A model in its own precision with fp32 masters and fp32 accumulated gradients.

    With `way.bf16_states` masters are in bf16, moments as the masters, and so is the summed
    gradient that the optimizer is given.
    """

    def __init__(self, way: Way, balance: bool) -> None:
        self.balance = balance
        self.dtype = DTYPES[way.precision]
        self.scale = FP16_SCALE if way.precision == "fp16" else 1.0
        attention = ATTENTION.get(way.architecture, "sdpa")
        self.model = skeleton(hf_config(ARCHITECTURES[way.architecture]), self.dtype, attention)
        self.decayed = {p.name for p in described_parameters(self.model) if p.matrix}
        materialize(self.model, SEED, torch.device("cpu"))
        self.model.train()
        if way.compiled:
            torch.compiler.reset()  # as in worker.py
            for layer in decoder_layers(self.model)[1]:
                layer.forward = torch.compile(layer.forward)
        kept = torch.bfloat16 if way.bf16_states else torch.float32
        named = self.model.named_parameters()
        self.masters = {n: p.detach().to(kept, copy=True) for n, p in named}

    def accumulate(self, batch: Batch, split: Split) -> float:
        """Fill the masters' gradients; returns the mean loss over the batch's target tokens."""
        total, count = 0.0, targets(batch)
        sums = {n: torch.zeros_like(m, dtype=torch.float32) for n, m in self.masters.items()}
        for chosen in split.micro_batches:
            part = rows(batch, list(chosen))
            token_loss, auxiliary = forward(
                self.model, part.input_ids, part.labels, part.position_ids
            )
            share = token_loss / count
            total += float(share.detach())
            if auxiliary is not None and self.balance:
                share = share + auxiliary / len(split.micro_batches)
            (share * self.scale).backward()
            for name, parameter in self.model.named_parameters():
                sums[name] += parameter.grad.float() / self.scale
                parameter.grad = None
        for name, master in self.masters.items():
            master.grad = sums[name].to(master.dtype)
        return total

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])


def train(way: Way, split: Split, balance: bool = True) -> Trajectory:
    """Gradients and one SGD step, then 20 AdamW steps from the same start.

    `balance` switches the balancing loss of a mixture of experts.
    """
    result = Trajectory()
    fresh = _Model(way, balance)
    fresh.accumulate(global_batch(0), split)
    result.gradients = {n: m.grad.float() for n, m in fresh.masters.items()}
    before = {n: m.to(torch.float32, copy=True) for n, m in fresh.masters.items()}
    fresh.step(torch.optim.SGD(fresh.masters.values(), lr=SGD_LR))
    result.sgd_changes = {n: m.float() - before[n] for n, m in fresh.masters.items()}

    model = _Model(way, balance)
    optimizer = torch.optim.AdamW(_groups(model), lr=LR, betas=BETAS, eps=EPS)
    for step in range(STEPS):
        result.losses.append(model.accumulate(global_batch(step), split))
        norm = torch.nn.utils.clip_grad_norm_(model.masters.values(), CLIP_NORM)
        result.norms.append(float(norm))
        model.step(optimizer)
    return result


def spread(way: Way) -> Difference:
    """Return the largest distance of the plain loop from itself when only the order of its sums
    changes.

    ORDERS trajectories over the same global batches, each in another order of the samples and with
    micro-batches of 1 to 8. Two such orders are too few: on some processors a third one differs by
    five times as much. Without the balancing loss of a mixture: that one is not a sum over samples,
    and another split is another loss.
    """
    base = train(way, Split.even(GLOBAL_BATCH), balance=False)
    others = [train(way, split, balance=False) for split in _orders()]
    return Difference.largest([rounding(base), *(difference(other, base) for other in others)])


def _orders() -> Iterator[Split]:
    draw, samples = random.Random(SEED), list(range(GLOBAL_BATCH))
    for micro_batch in itertools.islice(itertools.cycle((4, 2, 1, GLOBAL_BATCH)), ORDERS):
        draw.shuffle(samples)
        starts = range(0, GLOBAL_BATCH, micro_batch)
        yield Split(tuple(tuple(samples[s : s + micro_batch]) for s in starts))


def _groups(model: _Model) -> list[dict[str, Any]]:
    named = model.masters.items()
    return [
        {"params": [m for n, m in named if n in model.decayed], "weight_decay": WEIGHT_DECAY},
        {"params": [m for n, m in named if n not in model.decayed], "weight_decay": 0.0},
    ]
