"""The plain loop's distance from itself when the order of its sums changes."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import json
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from tests.gates.cells import GLOBAL_BATCH
from tests.gates.models import LEARNED
from tests.gates.parity import recipe
from tests.gates.parity.measure import Difference, difference, rounding
from tests.gates.parity.model import Split, Way
from tests.gates.parity.reference import GATE, Task, train, trained
from tools.made_with import machine, versions

ORDERS = 8
ORDERS_OF_COMPILED_MIXTURES = 40


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


FOLDER = Path(__file__).resolve().parents[3] / "build" / "spread"


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
