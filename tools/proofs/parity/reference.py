"""The truth: a plain PyTorch loop on one process around a model built by transformers alone."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harness.data.batches import Batch
from harness.models.initialize import materialize
from harness.models.pieces import decoder_layers
from harness.models.skeleton import DTYPES, hf_config, skeleton
from tools.proofs.cells import GLOBAL_BATCH
from tools.proofs.models import ATTENTION, LEARNED
from tools.proofs.parity import recipe
from tools.proofs.parity.cells import STEPS
from tools.proofs.parity.measure import Difference, Trajectory, difference, rounding, worst_relative
from tools.proofs.parity.samples import global_batch, held_out, rows, targets

FP16_SCALE = 2.0**12
ORDERS = 8

Gradients = dict[str, torch.Tensor]


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


@dataclass(frozen=True)
class Task:
    """What is learned from, how fast, and for how long."""

    steps: int
    batch: Callable[[int], Batch]
    """The global batch of a step, counted from 0."""
    rate: Callable[[int], float]
    """The learning rate of a step, counted from 0."""
    held_out: Batch


GATE = Task(STEPS, global_batch, recipe.learning_rate, held_out())


class _Model:
    """A model in its own precision with fp32 masters and fp32 accumulated gradients.

    With `way.bf16_states` masters are in bf16, moments as the masters, and so is the summed
    gradient that the optimizer is given.
    """

    def __init__(self, way: Way, balance: bool) -> None:
        self.balance = balance
        self.dtype = DTYPES[way.precision]
        self.scale = FP16_SCALE if way.precision == "fp16" else 1.0
        self.model = _built_by_transformers(way.architecture, self.dtype)
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
        total = 0.0
        sums = {n: torch.zeros_like(m, dtype=torch.float32) for n, m in self.masters.items()}
        for loss, gradients in self.each_micro_batch(batch, split):
            total += loss
            for name, gradient in gradients.items():
                sums[name] += gradient
        for name, master in self.masters.items():
            master.grad = sums[name].to(master.dtype)
        return total

    def each_micro_batch(self, batch: Batch, split: Split) -> Iterator[tuple[float, Gradients]]:
        """Yield each micro-batch's share of the mean loss, and its fp32 gradients."""
        count = targets(batch)
        for chosen in split.micro_batches:
            loss, balancing = self._loss(rows(batch, list(chosen)))
            share = loss / count
            reported = float(share.detach())
            if balancing is not None and self.balance:
                share = share + balancing / len(split.micro_batches)
            (share * self.scale).backward()
            gradients = {}
            for name, parameter in self.model.named_parameters():
                assert parameter.grad is not None
                gradients[name] = parameter.grad.float() / self.scale
                parameter.grad = None
            yield reported, gradients

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the masters, and compute with them from now on."""
        optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])

    def untied(self) -> dict[str, str]:
        """Give a tied head a weight of its own; return its name, by that of the embedding."""
        head, before = self.model.get_output_embeddings(), {*self.masters}
        assert head is not None
        embedding = {id(p): name for name, p in self.model.named_parameters()}[id(head.weight)]
        head.weight = nn.Parameter(head.weight.detach().clone())
        added = {name for name, _ in self.model.named_parameters()} - before
        return dict.fromkeys((embedding,), *added) if added else {}

    @torch.no_grad()
    def evaluate(self, batch: Batch, micro_batch: int) -> float:
        """Return the mean loss over all target tokens of `batch`, in nats."""
        self.model.eval()
        every = range(len(batch.labels))
        parts = [rows(batch, [*every[s : s + micro_batch]]) for s in every[::micro_batch]]
        return sum(float(self._loss(part)[0]) for part in parts) / targets(batch)

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss summed over target tokens and the weighted balancing loss, if any."""
        outputs = self.model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        )
        loss = functional.cross_entropy(
            outputs.logits.float().flatten(0, 1), batch.labels.flatten(), reduction="sum"
        )
        balancing = getattr(outputs, "aux_loss", None)
        if balancing is not None:
            balancing = balancing * self.model.config.router_aux_loss_coef
        return loss, balancing


def _built_by_transformers(architecture: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the architecture as transformers does from its file, with the harness's own weights."""
    attention = ATTENTION.get(architecture, "sdpa")
    return copy.deepcopy(_built_once(json.dumps(LEARNED[architecture]), dtype, attention))


@functools.cache
def _built_once(config_json: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    values = json.loads(config_json)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    drawn = skeleton(hf_config(json.loads(config_json)), dtype, attention)
    materialize(drawn, recipe.SEED, torch.device("cpu"))
    weights = dict(drawn.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights, f"transformers' own model lacks {sorted(weights)}"
    return model


def train(way: Way, split: Split, balance: bool = True, task: Task = GATE) -> Trajectory:
    """Gradients and one SGD step, then AdamW steps from the same start, and an evaluation.

    `balance` switches the balancing loss of a mixture of experts.
    """
    result = Trajectory()
    fresh = _Model(way, balance)
    fresh.accumulate(task.batch(0), split)
    result.gradients = {n: m.grad.float() for n, m in fresh.masters.items()}
    before = {n: m.to(torch.float32, copy=True) for n, m in fresh.masters.items()}
    fresh.step(torch.optim.SGD(fresh.masters.values(), lr=recipe.SGD_LR))
    result.sgd_changes = {n: m.float() - before[n] for n, m in fresh.masters.items()}

    model = _Model(way, balance)
    groups = _groups(model)
    optimizer = torch.optim.AdamW(groups, betas=recipe.BETAS, eps=recipe.EPS)
    for step in range(task.steps):
        result.losses.append(model.accumulate(task.batch(step), split))
        result.norms.append(_clip(model.masters.values(), recipe.CLIP_NORM))
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step) * group["multiplier"]
        model.step(optimizer)
    result.held_out = model.evaluate(task.held_out, len(split.micro_batches[0]))
    return result


@dataclass(frozen=True)
class Sum:
    """How a layout adds up the gradients of its micro-batches: in `precision` on each rank, and
    over several ranks in the one that the model computes in.
    """

    precision: str
    micro_batch: int
    ranks: int
    every_micro_batch: bool
    """Whether ranks add up each micro-batch, as ZeRO 2 and 3 do; else their sums at the end."""
    stages: int = 1
    """Pipeline stages: the first and the last each add up their own part of a tied weight's."""


def gradients(way: Way, by: Sum) -> tuple[Gradients, float]:
    """Return the gradients at step 0, added up as `by` says, and how far they are from themselves
    when the order changes: relative, of the worst parameter.

    Each micro-batch's gradients are the same to the bit as in a layout that splits alike. A sum in
    a lower precision therefore shows, even where micro-batches are computed in it.
    """
    model = _Model(way, balance=True)
    model.scale *= by.ranks  # which divide by their number before they add up, where it may round
    tied = model.untied() if by.stages > 1 else {}
    split = Split.even(by.micro_batch)
    parts = [part for _, part in model.each_micro_batch(global_batch(0), split)]
    # The first micro-batch of every rank, the second...
    rounds = [parts[start : start + by.ranks] for start in range(0, len(parts), by.ranks)]
    draw, sums = random.Random(recipe.SEED), []
    for number in range(1 + ORDERS):
        ranks = [*range(by.ranks)]
        if number:
            draw.shuffle(ranks)
            rounds = draw.sample(rounds, len(rounds))
        in_order = [[round_[rank] for rank in ranks] for round_ in rounds]
        total = {}
        for name in model.masters:
            copies = [name, tied[name]] if name in tied else [name]
            each = [[part[copy] for part in round_] for copy in copies for round_ in in_order]
            total[name] = _sum(each, model, by)
        sums.append(total)
    return sums[0], max(worst_relative(other, sums[0]) for other in sums[1:])


def _sum(rounds: list[list[torch.Tensor]], model: _Model, by: Sum) -> torch.Tensor:
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
    return total.float() / (model.scale / by.ranks)


def _clip(masters: Iterable[torch.Tensor], limit: float) -> float:
    """Scale gradients to a norm of at most `limit`; returns the norm before.

    It is summed in fp64: torch's own, in fp32, is off by more than the order of samples changes it.
    """
    gradients = [master.grad for master in masters if master.grad is not None]
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm


def spread(way: Way, task: Task = GATE) -> Difference:
    """Return the largest distance of the plain loop from itself when only the order of its sums
    changes.

    ORDERS trajectories over the same global batches, each in another order of the samples and with
    micro-batches of 1 to 8. Two such orders are too few: on some processors a third one differs by
    five times as much. Without the balancing loss of a mixture: that one is not a sum over samples,
    and another split is another loss.
    """
    base = train(way, Split.even(GLOBAL_BATCH), False, task)
    others = [train(way, split, False, task) for split in _orders()]
    return Difference.largest([rounding(base), *(difference(other, base) for other in others)])


def _orders() -> Iterator[Split]:
    draw, samples = random.Random(recipe.SEED), list(range(GLOBAL_BATCH))
    for micro_batch in itertools.islice(itertools.cycle((4, 2, 1, GLOBAL_BATCH)), ORDERS):
        draw.shuffle(samples)
        starts = range(0, GLOBAL_BATCH, micro_batch)
        yield Split(tuple(tuple(samples[s : s + micro_batch]) for s in starts))


def _groups(model: _Model) -> list[dict[str, Any]]:
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
