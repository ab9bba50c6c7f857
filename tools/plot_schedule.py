"""Show learning rate, batch size and sequence length over a run, from its config.

    python tools/plot_schedule.py --config run.toml --plot schedule.svg
    python tools/plot_schedule.py --plot schedule.png optim.schedule=wsd train.steps=2000 \\
        train.global_batch=512 ramp.batch_from=32 ramp.batch_tokens=20000000

Prints the schedule in a few lines; --plot also draws it. The numbers are those that train.py uses.
With train.epochs the number of steps depends on the data: pass it with --steps. Exit code 0, or 2
for a config that cannot be planned. Needs neither a GPU nor torch.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.config.sections import MAX_COUNT
from harness.errors import ConfigError, ExitCode
from harness.layout.world import World
from harness.plan.command import Command, plan_from
from harness.plan.plan import Plan
from harness.report.palette import SERIES
from harness.terminal import command_parser, say
from tools.figure import new_figure, plot_problems, with_thousands, write_plot
from tools.plan_args import add_config_arguments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = 2000  # more would be indistinguishable
_EACH = 100_000
"""Step from which longer runs are sampled at every n-th step."""


def main(argv: list[str]) -> int:
    """Run the command: argv -> text on standard output, optional plot -> exit code."""
    parser, add = command_parser(__doc__)
    add_config_arguments(parser)
    add("--steps", type=int, help="Number of steps, for a run whose length is given in epochs.")
    add("--plot", type=Path, metavar="FILE.svg|.png", help="Draw the schedule.")
    args = parser.parse_intermixed_args(argv)
    try:
        problems = [*plot_problems(args.plot)]
        if args.steps is not None and args.steps < 1:
            problems.append(f"--steps is {args.steps}: it must be at least 1")
        if args.steps is not None and args.steps > MAX_COUNT:
            problems.append(f"--steps is {args.steps}: it must be at most {MAX_COUNT}")
        if problems:
            raise ConfigError(problems)
        command = Command(args.deepspeed, args.config, tuple(args.assignments))
        plan = plan_from(command, world=World())
        steps = args.steps or plan.steps
        if steps is None:
            raise ConfigError(
                "train.epochs: the number of steps depends on the data; set it with --steps"
            )
        if steps == 0:
            raise ConfigError("train.steps is 0: there is nothing to draw")
    except ValueError as error:
        say(f"cannot draw: {error}", sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    points = schedule_of(plan, steps)
    say(as_text(plan, points))
    if args.plot:
        write_plot(args.plot, drawn(plan, thinned(points, max(1, steps // _POINTS))))
    return int(ExitCode.DONE)


Point = tuple[int, int, float, int, int]
"""(step, tokens before it, learning rate, tokens of the step, tokens per sequence)."""


def schedule_of(plan: Plan, steps: int) -> list[Point]:
    """Return a point for every step; beyond _EACH steps for every n-th and the last."""
    seq_len, schedule = plan.seq_len, plan.schedule(steps)
    points: list[Point] = []
    number, samples, apart = 1, 0, 1
    while number <= steps:
        step = plan.curriculum.at(samples)
        points.append(
            (
                *(number, samples * seq_len, schedule.lr(number)),
                *(step.global_batch * seq_len, seq_len // step.pieces),
            )
        )
        if number >= _EACH:
            apart = max(1, steps // _EACH)
        taken = min(apart, steps - number) or 1
        samples, number = plan.curriculum.samples_after(taken, samples), number + taken
    return points


def thinned(points: list[Point], apart: int) -> list[Point]:
    """Return points at least `apart` steps apart, and the last one."""
    kept = [points[0]]
    for point in points:
        if point[0] >= kept[-1][0] + apart:
            kept.append(point)
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def as_text(plan: Plan, points: list[Point]) -> str:
    """Return a table of the steps at which the schedule changes, one per line."""
    last = len(points) - 1
    peak = max(range(last + 1), key=lambda index: points[index][2])
    middle = bisect_left(points, (points[last][0] + 1) // 2, key=itemgetter(0))
    chosen = {0, peak, middle, last}
    chosen |= {n for n in range(1, last + 1) if points[n][3:] != points[n - 1][3:]}
    header = (
        f"{'step':>10} {'tokens before':>16} {'learning rate':>14} {'batch, tokens':>14} length"
    )
    lines = [
        f"{step:>10,} {tokens:>16,} {lr:>14.4g} {batch:>14,} {length:>6,}"
        for step, tokens, lr, batch, length in (points[index] for index in sorted(chosen))
    ]
    if len(lines) > 24:
        lines = [*lines[:12], f"{'...':>10}", *lines[-12:]]
    return "\n".join(
        [f"{plan.config.optim.schedule} with {plan.config.optim.name}", header, *lines]
    )


def drawn(plan: Plan, points: list[Point]) -> Figure:
    """Return a figure of the learning rate, and of batch and length if they grow."""
    steps, tokens, rates, batches, lengths = zip(*points, strict=True)
    grows = len(set(lengths)) > 1
    optim = plan.config.optim
    title = f"{plan.config.model.name}: {optim.schedule} with {optim.name}"
    warmup = plan.schedule(steps[-1]).warmup
    subtitle = f"rate {optim.lr:g} at its highest, {warmup:,} steps of warm-up"
    panels = [("learning rate", rates)]
    if len(set(batches)) > 1:
        panels.append(("tokens per step", batches))
    if grows:
        panels.append(("tokens per sequence", lengths))
    figure = new_figure(10, 1.4 + 2.2 * len(panels), title, subtitle)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for place, (axis, (name, values)) in enumerate(zip(axes, panels, strict=True)):
        colour = SERIES[place].light
        if place:
            axis.step(steps, values, where="post", color=colour)
            with_thousands(axis.yaxis)
        else:
            axis.plot(steps, values, color=colour)
        axis.set_title(name)
        axis.set_ylim(bottom=0)
    with_thousands(axes[-1].xaxis)
    axes[-1].set_xlabel(f"step ({tokens[-1]:,} tokens before the last one)")
    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
