"""The measurements as tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tools.proofs.overhead.job import ACCUMULATED, LAYERS, MODEL, SEQ_LEN
from tools.proofs.overhead.spread import NAMES, kernel_rows, name_of, seconds_of, spread_rows
from tools.proofs.overhead.turns import COUNTED

SIDES = tuple(NAMES)
GOALS = {("harness", "bare"): "1.01 at most", ("harness", "trainer"): "below 1.00"}
STARTS = {("harness", "bare"): "1.15 at most", ("harness", "trainer"): ""}
DATA_GOAL, TEXT_GOAL = 100, 0.9
Results = dict[str, Any]
Value = Callable[[list[Results]], float]  # of one process group


def tables(results: Results) -> list[str]:
    """Everything, line by line."""
    cells, starts = results["cells"], results.get("starts", results["cells"])
    lines = [_head("seconds a step", cells)]
    lines += _compared(cells, GOALS, seconds_of, _step_processor_s)
    lines += ["", _head("of all starts: 5 %, **half**, 95 % are below", cells)]
    lines += [
        _row(title, values) for title, values in spread_rows(cells, results["arguments"]["turns"])
    ]
    lines += ["", _head("seconds from the command to the end of the first step", starts)]
    lines += _compared(starts, STARTS, _start_s, _start_processor_s)
    lines += ["", _head("the harness's start-up: seconds until then", starts)]
    for mark in starts[0]["rounds"][0]["harness"][0]["marks"]:
        row = [f"{_medians(cell, 'harness', _mark_s(mark)):.2f}" for cell in starts]
        lines.append(_row(mark, row))
    lines += ["", _head("in a step of rank 0", cells)]
    lines += [_row("milliseconds of the harness outside of its engine", map(_outside, cells))]
    for kind, text in (("syncs", "waits for a device"), ("collectives", "collectives")):
        for side in SIDES:
            row = [f"{sum(_counted(cell, side, kind).values()) / COUNTED:g}" for cell in cells]
            lines.append(_row(f"{text}: {NAMES[side]}", row))
    lines += ["", _head("the kernel's work in a step of rank 0", cells)]
    lines += [_row(title, values) for title, values in kernel_rows(cells)]
    lines += ["", _head("losses: the largest difference from bare DeepSpeed's, relative", cells)]
    for side in ("harness", "trainer"):
        lines.append(_row(NAMES[side], (f"{_apart(cell, side):.1g}" for cell in cells)))
    return [*lines, "", *_data(results)]


def _head(title: str, cells: list[Results]) -> str:
    return f"{_row(title, map(name_of, cells))}\n|---|{'---:|' * len(cells)}"


def _row(title: str, values: Any) -> str:
    return f"| {title} | {' | '.join(values)} |"


def _compared(
    cells: list[Results], goals: dict[tuple[str, str], str], wall: Value, work: Value
) -> Iterator[str]:
    """Each side's median, then the ratios."""
    for side in SIDES:
        yield _row(NAMES[side], (f"{_medians(cell, side, wall):.3f}" for cell in cells))
    for (over, under), goal in goals.items():
        title = f"{NAMES[over]} / {NAMES[under]}{f' ({goal})' if goal else ''}"
        yield _row(title, (_ratio(cell, over, under, wall) for cell in cells))
        worked = (_ratio(cell, over, under, work) for cell in cells)
        yield _row("of the processor's seconds", worked)


def _medians(cell: Results, side: str, value: Value) -> float:
    return statistics.median(value(round_[side]) for round_ in cell["rounds"])


def _ratio(cell: Results, over: str, under: str, value: Value) -> str:
    """Of the medians; in brackets the least and the most of the rounds' own."""
    ratio = _medians(cell, over, value) / _medians(cell, under, value)
    each = [value(round_[over]) / value(round_[under]) for round_ in cell["rounds"]]
    return f"**{ratio:.3f}** ({min(each):.2f} to {max(each):.2f})"


def _step_processor_s(ranks: list[Results]) -> float:
    """Of all ranks."""
    return sum(statistics.median(rank["processor_s"]) for rank in ranks)


def _start_s(ranks: list[Results]) -> float:
    return max(rank["marks"]["first step"][0] for rank in ranks)


def _start_processor_s(ranks: list[Results]) -> float:
    return sum(rank["marks"]["first step"][1] for rank in ranks)


def _mark_s(name: str) -> Value:
    return lambda ranks: ranks[0]["marks"][name][0]


def _outside(cell: Results) -> str:
    """Between the engine's steps: the loop, the metrics, the run folder, the next batch."""
    ranks = [round_["harness"][0] for round_ in cell["rounds"]]
    each = [
        step - engine
        for rank in ranks
        for step, engine in zip(rank["step_s"], rank["engine_s"], strict=True)
    ]
    return f"{statistics.median(each) * 1e3:.1f}"


def _apart(cell: Results, side: str) -> float:
    """Of the steps that both have logged, over all rounds."""
    return max(
        abs(mine / theirs - 1)
        for round_ in cell["rounds"]
        for mine, theirs in zip(
            round_[side][0]["losses"], round_["bare"][0]["losses"], strict=False
        )
    )


def _counted(cell: Results, side: str, kind: str) -> Counter[str]:
    return Counter(cell["rounds"][0][side][0][kind])


def call_sites(results: Results) -> list[str]:
    """List the call sites that wait, per step, of each side and cell, most often first."""
    lines = []
    for cell in results["cells"]:
        for side in SIDES:
            sites = _counted(cell, side, "syncs").most_common()
            text = ", ".join(f"{count / COUNTED:g} x {site}" for site, count in sites)
            lines.append(f"- ZeRO {cell['stage']}, {cell['ranks']}, {NAMES[side]}: {text}")
    return lines


def _data(results: Results) -> Iterator[str]:
    """Beside what the fastest cell consumes."""
    rounds = results["data"]
    if not rounds:
        return
    median = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    yield "| the data path alone | median | least to most |\n|---|---:|---:|"
    for name, text in (("raw", "the tokenizer's own rate"), ("text", "text files to .bin/.idx")):
        yield _row(f"{text}, MB/s", _rate(rounds, name, ".2f"))
    share = median["text"] / median["raw"]
    yield f"| the second / the first ({TEXT_GOAL:g} at least) | **{share:.2f}** | |"
    consumed = max(
        cell["ranks"] * ACCUMULATED * SEQ_LEN / _medians(cell, "harness", seconds_of)
        for cell in results["cells"]
    )
    for name in list(median)[2:]:
        yield _row(f"batches of {name}, tokens/s", _rate(rounds, name, ",.0f"))
        times = median[name] / consumed
        yield f"| times what training consumes ({DATA_GOAL} at least) | **{times:,.0f}** | |"


def _rate(rounds: list[dict[str, float]], name: str, how: str) -> list[str]:
    values = [each[name] for each in rounds]
    low, middle, high = (
        format(value, how) for value in (min(values), statistics.median(values), max(values))
    )
    return [middle, f"{low} to {high}"]


def _typed(args: dict[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in args.items())


def markdown(results: Results) -> str:
    """docs/overhead.md."""
    args = results["arguments"]
    body = "\n".join(tables(results))
    sites = "\n".join(call_sites(results))
    return f"""# What the harness costs in time

Written by `python tools/proofs/benchmark_overhead.py {_typed(args)} --markdown docs/overhead.md`.

A Llama of 25 million parameters ({LAYERS} layers, {MODEL["hidden_size"]} wide; where it has others,
the table says so), samples of {SEQ_LEN} tokens, two micro-batches of one sample on each rank in a
step, `ds_configs/zero1.json` and `zero3.json`. All three begin with the same weights, read the same
batches and give DeepSpeed the same resolved JSON:

- the harness as `harness/train.py` runs it, with run folder, watchdog and a line of metrics in
  every step, reading `.bin/.idx`;
- bare DeepSpeed: forward, backward, step; its batches wait in memory, it reads no loss before the
  end and writes nothing;
- the Trainer of transformers with `TrainingArguments(deepspeed=...)`, a log in every step.

On a CPU the harness has malloc keep what a step frees. The others are told to by
`MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_`: as they come, they take
[much longer](overhead_starts.md).

In a round every side is started anew, as one process per rank with one thread each, in another
order each time. It trains {args["warm_up"]} steps and waits. With all three alive, each trains in
{args["turns"]} turns: a step that is not counted, then {args["steps"]} that are. A step lasts from
the end of one optimizer step to the end of the next. Given are medians over a start's steps, then
over rounds; the ratio of these; and in brackets the least and the most of the rounds' own ratios.
The processor's seconds are those of all ranks together: others on the machine disturb them less.
Start-up is without a launcher, which takes as long for all, and includes the harness's first
held-out loss (of one sample).

![Seconds a step of every start](overhead.svg)

**Why a start differs from the next, of whichever side.** As it comes, glibc returns to the kernel
most of what a step frees, and the kernel clears and maps these pages again in the next. How long
that takes depends on where it finds them, which differs from start to start and from step to step:
[with pages returned and kept](overhead_starts.md), suspect by suspect. With pages kept the kernel
has hardly any work (the table of it), and what is left is where a start's pages lie: the processor
translates addresses within few 2 MiB blocks faster than within many. The first start of a round
gets what others left free here and there, later ones find stretches of free memory; the second
table has the time of each, and how it follows the density of its pages. Its last two rows split the
spread of the ratio to bare DeepSpeed (random effects of one factor): how far turns of the same two
starts lie apart, and how far starts do beyond that.

Under ZeRO 1 in bf16 the harness's fp32 gradients are summed where they lie and not copied. What
each side executes in a step, whatever the machine's pace: [instructions](overhead_instructions.md).

{body}

The whole start is timed: the tokenizer is opened, each file read and checked, the tokens are
written, hashed and split. Only tokenising uses both cores; the rest is one Python process. By the
processor's seconds (6 MB, two rounds, 8192 pieces) the tokenizer alone took 1.44 and 1.50, writing
tokens with it 1.41 and 1.63, a whole start 1.53 and 1.88: what is ours takes 6 to 25 % more of a
processor, and both cores wait for it. `tools/tokenize_data.py` divides all of it among processes,
and [reaches 1.09](cleaning_proof.md) of the rate of the tokenizer's threads: use it for a large
corpus.

Waits for a device: a CPU has none, so what would be one is counted, for {COUNTED} further steps of
the first round, on rank 0: `aten::_local_scalar_dense` (`item`, `float`, `int`, `bool` and `if` on
a tensor), `nonzero`, `masked_select`, `unique`, and calls of `tolist`, `cpu` and `numpy`. Some of
these tensors are on the host on a GPU too, so this is an upper bound. Where:

{sites}

{results["machine"]}, in {results["precision"]}, on average {results["busy_elsewhere_cores"]:.1f} of
them busy with other processes; {results["versions"]}; commit {results["commit"]}.
"""
