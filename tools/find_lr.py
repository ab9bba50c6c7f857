"""Find a learning rate by a range test with the real engine and the run's own files.

    python tools/find_lr.py --deepspeed ds_configs/zero1.json model.name=tiny
    deepspeed --num_accelerators 2 tools/find_lr.py --deepspeed ds_configs/zero3.json \\
        --plot lr.svg --config run.toml

Takes optimizer steps while the learning rate grows exponentially from --from to --to, as in Smith
(arXiv 1506.01186), until the loss has risen for good; then suggests a rate. Batches, layout,
optimizer and clipping are the run's. Weights are new, or those of model.init_from or resume.from.
Nothing is kept: the run folder is temporary. Exit code 0, 2, 74 if data.cache_dir has no room, or
75 after a signal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode, RunStopped
from harness.layout.world import World, slurm_port
from harness.plan.command import Command, plan_from
from harness.report.palette import SERIES
from harness.terminal import command_parser, say
from tools.figure import new_figure, plot_problems, write_plot
from tools.plan_args import add_config_arguments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from harness.plan.plan import Plan

_SMOOTHING = 0.9  # weight of the previous value in a smoothed loss
Curve = tuple[list[float], list[float]]  # rates and losses
_NOISE = 5.0  # times the deviation of one loss: a smaller fall suggests nothing
GIVE_UP = 1.5
"""Nats above the best smoothed loss, from which it will not recover."""


@dataclass(frozen=True)
class Found:
    """The result of a range test: rates, the losses in nats before their steps, and suggestions."""

    rates: list[float]
    losses: list[float]
    smooth: list[float]
    suggested: float
    """Learning rate at which the smoothed loss falls fastest."""
    lowest: float
    """Learning rate with the lowest smoothed loss; above it, steps do harm."""


def main(argv: list[str]) -> int:
    """Run the command: argv -> text, optional plot and JSON -> exit code."""
    parser, add = command_parser(__doc__)
    add_config_arguments(parser)
    least, most = "Lowest learning rate (%(default)g).", "Highest learning rate (%(default)g)."
    add("--from", dest="lowest", type=float, default=1e-6, metavar="LR", help=least)
    add("--to", dest="highest", type=float, default=1.0, metavar="LR", help=most)
    add("--steps", type=int, default=100, help="Number of steps (default: %(default)s).")
    add("--plot", type=Path, metavar="FILE.svg|.png", help="Also draw the losses.")
    add("--json", action="store_true", help="Print one JSON object.")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    try:
        world = World.from_environ()
    except ValueError as error:
        say(f"cannot search: {error}", sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    folder = _temporary(world)
    if world.rank == 0:  # left by a killed launch
        shutil.rmtree(folder, ignore_errors=True)
    try:
        problems = [*plot_problems(args.plot)]
        if not 0 < args.lowest < args.highest:
            limits = f"--from {args.lowest:g} --to {args.highest:g}"
            problems.append(f"{limits}: --from must be above 0 and below --to")
        if args.steps < 10:
            problems.append(f"--steps is {args.steps}: it must be at least 10")
        if problems:
            raise ConfigError(problems)
        own = (f"run.dir={folder}", "save.export=false")
        plan = plan_from(Command(args.deepspeed, args.config, (*args.assignments, *own)))
        result = judged(*_on_all_ranks(plan, args.lowest, args.highest, args.steps, folder))
    except RunStopped as stop:
        say(stop.message, sys.stderr)
        return int(stop.code)
    except ConfigError as error:
        if world.rank == 0:
            say(f"cannot search: {error}", sys.stderr)
        return int(error.code)
    finally:
        if world.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if world.rank == 0:
        if args.json:
            print(json.dumps(vars(result)))
        else:
            say(as_text(result))
        if args.plot:
            write_plot(args.plot, drawn(result))
    return int(ExitCode.DONE)


def _on_all_ranks(plan: Plan, lowest: float, highest: float, steps: int, folder: Path) -> Curve:
    """Run the range test; `folder` is removed even if a failure of this rank ends the process."""
    from harness.engine.processes import ending_together

    with ending_together("cannot search"), redirect_stdout(sys.stderr):  # progress
        try:
            return range_test(plan, lowest, highest, steps)
        finally:
            if plan.world.local_rank == 0:
                shutil.rmtree(folder, ignore_errors=True)


def _temporary(world: World) -> Path:
    """Return a folder name that all ranks of this launch share, and no other launch has."""
    own = slurm_port() if world.launcher == "slurm" else os.getpid()
    launch = os.environ.get("MASTER_PORT") or own
    return Path(tempfile.gettempdir()) / f"find-lr-{os.getuid()}-{launch}"


def rates_to_try(lowest: float, highest: float, steps: int) -> list[float]:
    """Return a rate for each step, each the same multiple of the one before."""
    return [lowest * (highest / lowest) ** (number / (steps - 1)) for number in range(steps)]


def range_test(plan: Plan, lowest: float, highest: float, steps: int) -> Curve:
    """Take the steps, on all ranks. Raises ConfigError if the run cannot be built."""
    import torch

    from harness.run.build import build
    from harness.run.ending import break_off

    run = build(plan)
    rates: list[float] = []
    losses: list[float] = []
    try:
        with closing(run.steps):
            for number, rate in enumerate(rates_to_try(lowest, highest, steps)):
                run.pulse("step", number)
                step = run.steps.take()
                torch.manual_seed(step.dropout_seed)
                try:
                    result = run.engine.train_batch(step.batches, step.targets, rate)
                except RunStopped:  # fp16's loss scale is at its minimum
                    break
                run.steps.done(step)
                if not step.targets:
                    continue
                loss = float(run.engine.sum_over_ranks(result.loss_share.clone()))
                if not math.isfinite(loss):
                    break
                rates.append(rate)
                losses.append(loss)
                run.progress.say(f"step {number + 1:>4}/{steps} | lr {rate:.3e} | loss {loss:.4f}")
                if run.stop_asked()[0]:
                    raise RunStopped(ExitCode.STOPPED, f"stopped at a rate of {rate:.2e}")
                if smoothed(losses)[-1] > min(smoothed(losses)) + GIVE_UP:
                    break
        return rates, losses
    finally:
        run.progress.enabled = False  # the report's folder is removed
        break_off(run)


def smoothed(losses: list[float]) -> list[float]:
    """Return exponential moving averages, corrected for their start at zero."""
    smooth, average = [], 0.0
    for number, loss in enumerate(losses, 1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        smooth.append(average / (1 - _SMOOTHING**number))
    return smooth


def judged(rates: list[float], losses: list[float]) -> Found:
    """Return the suggestion of a loss curve. Raises ConfigError if it suggests nothing."""
    smooth = smoothed(losses)
    low = min(range(len(smooth)), key=smooth.__getitem__, default=0)
    if low < 3:
        raise ConfigError(
            f"the loss never fell, from the lowest rate on ({rates[0] if rates else 0:.2e}): start "
            "lower (--from), or check whether the run learns at all"
        )
    steps = [after - before for before, after in pairwise(losses[: low + 1])]
    usual = statistics.median(steps)
    noise = statistics.median(abs(step - usual) for step in steps)  # about a loss's deviation
    if (fall := smooth[0] - smooth[low]) < _NOISE * noise:
        raise ConfigError(
            f"the loss fell by {fall:.2g} nats, which may be noise: go higher (--to), or take a "
            "larger batch"
        )
    steep = min(range(1, low), key=lambda n: smooth[n + 1] - smooth[n - 1])
    return Found(rates, losses, smooth, suggested=rates[steep], lowest=rates[low])


def as_text(result: Found) -> str:
    """Return the learning rate to try, with the reason."""
    return "\n".join(
        [
            f"try optim.lr={result.suggested:.2g}",
            f"there the smoothed loss fell fastest; it was lowest at {result.lowest:.2g}"
            + (
                " and rose from there"
                if result.rates[-1] > result.lowest
                else ", the highest rate tried: raise --to"
            ),
        ]
    )


def drawn(result: Found) -> Figure:
    """Return a figure of the loss over the learning rate, with the rate to try."""
    figure = new_figure(8, 4.5, f"Try a learning rate of {result.suggested:.2g}")
    axis = figure.subplots()
    blue, orange, aqua = (colour.light for colour in SERIES[:3])
    axis.plot(result.rates, result.losses, color=blue, alpha=0.35, lw=0.9, label="loss")
    axis.plot(result.rates, result.smooth, color=blue, label="smoothed")
    axis.axvline(result.suggested, color=aqua, label=f"try {result.suggested:.2g}")
    axis.axvline(result.lowest, color=orange, ls="--", label=f"lowest at {result.lowest:.2g}")
    axis.set(xscale="log", xlabel="learning rate", ylabel="loss, nats per token")
    # The explosion of the loss must not hide its fall.
    finite = [loss for loss in result.smooth if math.isfinite(loss)]
    axis.set_ylim(top=max(finite[0], min(finite)) + 0.3 * (finite[0] - min(finite)) + 0.1)
    axis.legend(loc="lower left")
    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
