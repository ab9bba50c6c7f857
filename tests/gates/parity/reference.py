"""The truth: a plain PyTorch loop on one process, and its distance from itself in other orders."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.data.batch import Batch
from harness.launch.ranks import REPOSITORY
from harness.models.skeleton import DTYPES
from harness.steps import dropout_seed
from tests.gates.cells import GLOBAL_BATCH
from tests.gates.models import LEARNED
from tests.gates.parity import recipe
from tests.gates.parity.cells import STEPS
from tests.gates.parity.measure import (
    Difference,
    Trajectory,
    difference,
    rounding,
    unit_of,
    worst_relative,
)
from tests.gates.parity.model import Gradients, PlainModel, Split, Way
from tests.gates.parity.recipe import global_batch, held_out
from tools.made_with import machine, versions

ORDERS = 8
ORDERS_OF_COMPILED_MIXTURES = 40


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


def spreads(way: Way, task: Task = GATE) -> Iterator[Difference]:
    """Yield the largest distance of the plain loop from itself when only the order of its sums
    changes: over the quickest order, over the two quickest, and so on. The last one is the spread.

    Trajectories over the same global batches, each in another order of the samples and with
    micro-batches of 1 to 8. Two such orders are too few: on some processors a third one differs by
    five times as much. None of the spreads is smaller than the one before: a difference that an
    early one allows is allowed by the last.
    """
    distances = []
    for number in range(orders_of(way)):
        distances.append(distance(way, number, task))
        yield Difference.largest(distances)


def orders_of(way: Way) -> int:
    """Return the number of orders over which the spread of `way` is taken.

    In half precision an order may send a token to another expert, and the loss then jumps. Of a
    compiled mixture, which rounds less often, 8 orders show half of the jump that 40 do (mixtral in
    fp16, held out: 1.4e-4 and 2.9e-4).
    """
    mixture = "num_experts_per_tok" in LEARNED[way.architecture]
    jumps = mixture and way.compiled and way.precision != "fp32"
    return ORDERS_OF_COMPILED_MIXTURES if jumps else ORDERS


def distance(way: Way, number: int, task: Task = GATE) -> Difference:
    """Return the distance of the plain loop in one of its orders from itself, at least a rounding.

    Without the balancing loss of a mixture: that one is not a sum over samples, and another split
    is another loss.
    """
    base = trained(way, Split.even(GLOBAL_BATCH), False, task)
    # Two parts have one sum, whichever comes first.
    turned = replace(way, first_block=number % way.blocks) if way.blocks > 2 else way
    other = train(turned, _orders(orders_of(way))[number], False, task)
    return Difference.largest([rounding(base), difference(other, base)])


@functools.cache
def _orders(count: int) -> list[Split]:
    """So many of them, the quickest first: those with the largest micro-batches."""
    draw, samples, splits = random.Random(recipe.SEED), list(range(GLOBAL_BATCH)), []
    for micro_batch in itertools.islice(itertools.cycle((4, 2, 1, GLOBAL_BATCH)), count):
        draw.shuffle(samples)
        starts = range(0, GLOBAL_BATCH, micro_batch)
        splits.append(Split(tuple(tuple(samples[s : s + micro_batch]) for s in starts)))
    return sorted(splits, key=lambda split: len(split.micro_batches))


FOLDER = REPOSITORY / "build" / "spread"


def kept_spreads(way: Way) -> Iterator[Difference]:
    """Yield the spreads of `way` as `spreads` does, from earlier measurements on a machine of this
    kind, by the same code and packages, where there are any.
    """
    path = FOLDER / f"{_kind(way.device)}-{_digest(json.dumps(asdict(way)))}.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number in range(orders_of(way)):
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # gate and self-test run side by side
            kept = json.loads(path.read_text()) if path.exists() else []
            if len(kept) == number:
                kept.append(asdict(distance(way, number)))
                partial = path.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(kept))
                partial.replace(path)
        yield Difference.largest([Difference(**values) for values in kept[: number + 1]])


@functools.cache
def _kind(device: str) -> str:
    """Name everything that rounding depends on: the processor, the kernels, the packages, us."""
    here = Path(__file__).parent
    files = [here.parent / "cells.py", here.parent / "models.py", *sorted(here.glob("*.py"))]
    source = b"".join(path.read_bytes() for path in files)
    environment = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_ROUNDING))
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    parts = (machine(), versions(), torch.backends.cpu.get_cpu_capability(), gpu, *environment)
    return _digest("".join(parts), source)


_ROUNDING = ("ATEN_", "CUBLAS_", "MKL_", "ONEDNN_", "DNNL_", "OMP_", "KMP_")


def _digest(text: str, more: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + more).hexdigest()[:16]


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
