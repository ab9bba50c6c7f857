"""Memory and CPU time of every attention against the length of a sequence.

    python tools/proofs/measure_attention.py --write docs/attention_cost.md

Forward and backward pass of one attention with a few heads on one CPU core. Each point is a process
of its own, forked from this one: its peak above what lay there before, and its own user time, which
other processes of the machine disturb less than the clock.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.layout.attention_table import ATTENTIONS
from harness.models.efficient_attention.kinds import KINDS, function_name
from tools.made_with import versions

HEADS, WIDTH = 2, 32
LENGTHS = tuple(2048 << doublings for doublings in range(6))
WRITTEN_OUT = "eager"
_LONGEST_WRITTEN_OUT = 8192  # 1.6 GiB of scores
_FIRST = 512
_MIB = 2**20

Point = tuple[float, float]
"""MiB at the peak, and seconds of user time."""


def main(argv: list[str]) -> int:
    """argv -> table, and a page with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--write", type=Path, help="page to write")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    points = {name: measured(name, arguments.lengths) for name in (WRITTEN_OUT, "sdpa", *KINDS)}
    text = page(points, arguments.lengths)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)
    return 0


def measured(attention: str, lengths: list[int]) -> dict[int, Point]:
    """Return the point of each length."""
    points = {}
    for length in lengths:
        if attention == WRITTEN_OUT and length > _LONGEST_WRITTEN_OUT:
            continue
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=_measure, args=(attention, length, theirs)
        )
        process.start()
        points[length] = ours.recv()
        process.join()
        print(attention, length, *(f"{value:.2f}" for value in points[length]), flush=True)
    return points


def _measure(attention: str, length: int, pipe: Connection) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, length, WIDTH)
    states = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
    _output(attention, [state[:, :, :_FIRST] for state in states]).sum().backward()  # loads code
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = _peak_mib(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    _output(attention, states).sum().backward()
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - start
    pipe.send((_peak_mib() - before, seconds))
    pipe.close()
    os._exit(0)


def _output(attention: str, states: list[torch.Tensor]) -> torch.Tensor:
    if attention in KINDS:
        name = function_name(attention, ATTENTIONS[attention].sizes, 0)
        output, _ = ALL_ATTENTION_FUNCTIONS[name](SimpleNamespace(layer_idx=0), *states, None)
        assert isinstance(output, torch.Tensor)
        return output
    if attention == "sdpa":
        return functional.scaled_dot_product_attention(*states, is_causal=True)
    query, key, value = states
    later = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    scores = (query @ key.mT * WIDTH**-0.5).masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ value


def _peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) * 1024 / _MIB


def slope(points: dict[int, Point], number: int) -> float:
    """Return the exponent of the length in a fit of number `number` of the points to its power."""
    xs = [math.log(length) for length in points]
    ys = [math.log(max(point[number], 1e-3)) for point in points.values()]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    products = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return products / sum((a - x) ** 2 for a in xs)


def page(points: dict[str, dict[int, Point]], lengths: list[int]) -> str:
    """Return the tables of memory and time."""
    return f"""# What the kinds of attention cost

Forward and backward pass of one attention with {HEADS} heads of {WIDTH} in fp32 on one CPU core,
{versions()}. Sizes are the defaults.
`{WRITTEN_OUT}` is written out, `sdpa` torch's fused kernel: both are exact. The last column is the
power of the length that fits best. The machine had other work, which is why time is that of the
process on its core (user time), and only its growth says much. Written by
`python tools/proofs/measure_attention.py --write docs/attention_cost.md`.

Peak of memory above queries, keys and values, MiB:

{_table(points, lengths, 0, "{:,.0f}")}

Seconds of user time:

{_table(points, lengths, 1, "{:,.2f}")}
"""


def _table(points: dict[str, dict[int, Point]], lengths: list[int], number: int, form: str) -> str:
    head = ["`model.attention`", *(f"{length:,}" for length in lengths), "power"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name, own in points.items():
        cells = [form.format(own[n][number]) if n in own else "" for n in lengths]
        cells.append(f"{slope(own, number):.2f}" if len(own) > 1 else "")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
