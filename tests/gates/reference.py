"""The reference: a plain PyTorch loop, and its distance from itself in other orders."""

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
from tests.gates import recipe
from tests.gates.cell import GLOBAL_BATCH, STEPS
from tests.gates.models import LEARNED
from tests.gates.plain_model import Gradients, PlainModel, Split, Way
from tests.gates.recipe import global_batch, held_out
from tests.gates.trajectory import (
    Difference,
    Trajectory,
    difference,
    rounding,
    unit_of,
    worst_relative,
)
from tools.made_with import machine, versions

ORDERS = 8
ORDERS_OF_COMPILED_MIXTURES = 40


@dataclass(frozen=True)
class Task:
    """Batches, learning rates and the number of steps."""

    steps: int
    batch: Callable[[int], Batch]
    """Returns the global batch of a step, counted from 0."""
    rate: Callable[[int], float]
    """Returns the learning rate of a step, counted from 0."""
    held_out: Batch


GATE = Task(STEPS, global_batch, recipe.learning_rate, held_out())


def train(way: Way, split: Split, balance: bool = True, task: Task = GATE) -> Trajectory:
    """Return the gradients and the changes of one SGD step, then AdamW steps from the same start
    and an evaluation.

    `balance` switches the balancing loss of a mixture of experts.
    """
    result = Trajectory()
    fresh = PlainModel(way, balance)
    torch.manual_seed(dropout_seed(recipe.SEED, 0, 0))
    fresh.accumulate(way.batch(task.batch(0)), split)
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
        result.losses.append(model.accumulate(way.batch(task.batch(step)), split))
        result.norms.append(_clip(model.masters.values(), recipe.CLIP_NORM))
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step) * group["multiplier"]
        model.step(optimizer)
    result.held_out = model.evaluate(way.batch(task.held_out), len(split.micro_batches[0]))
    return result


trained = functools.cache(train)
"""`train`, cached for trajectories that are compared several times in a process."""


def _clip(masters: Iterable[torch.Tensor], limit: float) -> float:
    """Scale gradients to a norm of at most `limit`; return the norm before.

    The norm is summed in fp64: torch's fp32 norm is off by more than the effect of the order of
    samples.
    """
    gradients = [master.grad for master in masters if master.grad is not None]
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm


def _groups(model: PlainModel) -> list[dict[str, Any]]:
    """Return a group for each parameter, so that every parameter has its own settings."""
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
    changes: over the fastest order, over the two fastest, and so on. The last one is the spread.

    The trajectories use the same global batches, each in another order of samples and with
    micro-batches of 1 to 8. Two orders are too few: on some processors, a third one differs by five
    times as much. No spread is smaller than the previous one, so a difference that an early spread
    allows is also allowed by the last.
    """
    distances = []
    for number in range(orders_of(way)):
        distances.append(_kept(way, number) if task is GATE else distance(way, number, task))
        yield Difference.largest(distances)


def orders_of(way: Way) -> int:
    """Return the number of orders over which the spread of `way` is taken.

    In half precision, an order may send a token to another expert, and the loss then jumps. For a
    compiled mixture, which rounds less often, 8 orders show half of the jump that 40 do (mixtral in
    fp16, held out: 1.4e-4 and 2.9e-4).
    """
    mixture = "num_experts_per_tok" in LEARNED[way.architecture]
    jumps = mixture and way.compiled and way.precision != "fp32"
    return ORDERS_OF_COMPILED_MIXTURES if jumps else ORDERS


def distance(way: Way, number: int, task: Task = GATE) -> Difference:
    """Return the distance of the plain loop in one of its orders from itself, at least a rounding.

    The balancing loss of a mixture is left out: it is not a sum over samples, so another split
    gives another loss.
    """
    base = trained(way, Split.even(GLOBAL_BATCH), False, task)
    # Two parts have the same sum in either order.
    turned = replace(way, first_block=number % way.blocks) if way.blocks > 2 else way
    other = train(turned, _orders(orders_of(way))[number], False, task)
    return Difference.largest([rounding(base), difference(other, base)])


@functools.cache
def _orders(count: int) -> list[Split]:
    """Return `count` orders, the fastest (with the largest micro-batches) first."""
    draw, samples, splits = random.Random(recipe.SEED), list(range(GLOBAL_BATCH)), []
    for micro_batch in itertools.islice(itertools.cycle((4, 2, 1, GLOBAL_BATCH)), count):
        draw.shuffle(samples)
        starts = range(0, GLOBAL_BATCH, micro_batch)
        splits.append(Split(tuple(tuple(samples[s : s + micro_batch]) for s in starts)))
    return sorted(splits, key=lambda split: len(split.micro_batches))


FOLDER = REPOSITORY / "build" / "spread"


def _kept(way: Way, number: int) -> Difference:
    """Return the distance in one order, as kept for this machine, code and packages, or now."""
    path = FOLDER / f"{_kind(way.device)}-{_digest(json.dumps(asdict(way)))}.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # gate and self-test run concurrently
        kept = json.loads(path.read_text()) if path.exists() else []
        if len(kept) == number:
            kept.append(asdict(distance(way, number)))
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(kept))
            partial.replace(path)
    return Difference(**kept[number])


@functools.cache
def _kind(device: str) -> str:
    """Return a name for what rounding depends on: processor, kernels, packages, our code."""
    source = b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in _CODE)
    environment = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_ROUNDING))
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    parts = (machine(), versions(), torch.backends.cpu.get_cpu_capability(), gpu, *environment)
    return _digest("".join(parts), source)


_CODE = ("cell", "layouts", "models", "plain_model", "recipe", "reference", "trajectory")
_ROUNDING = ("ATEN_", "CUBLAS_", "MKL_", "ONEDNN_", "DNNL_", "OMP_", "KMP_")


def _digest(text: str, more: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + more).hexdigest()[:16]


@dataclass(frozen=True)
class Sum:
    """How a layout sums gradients: in `precision` on a rank, as the model over ranks."""

    precision: str
    micro_batch: int
    ranks: int
    every_micro_batch: bool
    """True if ranks sum each micro-batch, as ZeRO 2 and 3 do; False if they sum only the totals."""
    stages: int = 1
    """Pipeline stages; the first and the last each sum their part of a tied gradient."""
    by_module: bool = False
    """True if each module that reads a tensor gets a separate gradient, as with ZeRO 3."""


def gradients(way: Way, by: Sum) -> tuple[Gradients, float]:
    """Return the gradients at step 0, summed as `by` says, and their distance from themselves when
    the order changes: relative, for the worst parameter.

    Each micro-batch's gradients are bit-equal to those of a layout with the same split, so a sum in
    a lower precision shows, even if micro-batches are computed in it. A GPU's kernels may add
    atomically, as fused attention's backward pass does: then the gradients are computed once more,
    and the distance between the two counts, too.
    """
    model = PlainModel(way, balance=True)
    model.scale *= by.ranks  # ranks divide by their number before they sum, which may round
    tied = model.untied() if by.stages > 1 else {}
    if by.by_module:
        for module in model.model.modules():
            module.register_forward_pre_hook(_inputs_apart)
    split = Split.even(by.micro_batch)

    def computed() -> list[list[Gradients]]:
        """Return the micro-batches' gradients: the first of every rank, the second, and so on."""
        parts = [part for _, part in model.each_micro_batch(way.batch(global_batch(0)), split)]
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
    """Return True if a device may compute the same operations differently the second time."""
    return device != "cpu"


def _inputs_apart(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_Apart.apply(x) if torch.is_tensor(x) else x for x in inputs)


class _Apart(torch.autograd.Function):
    """The identity, whose gradients are summed before they go on."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return gradient


def _sum(rounds: list[list[torch.Tensor]], model: PlainModel, by: Sum) -> torch.Tensor:
    """Return the sum of one parameter's fp32 gradients, given by round and rank."""
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
