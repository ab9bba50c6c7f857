"""Show the layout of a plan: each rank's place, contents and schedule.

    python tools/show_layout.py --model llama-3-8b --deepspeed ds_configs/pipeline4.json --gpus 16
    python tools/show_layout.py --model gpt2-124m --gpus 8 ds.pipeline.stages=4 \\
        ds.pipeline.partition=memory --accumulation 16 --plot schedule.svg

The numbers are those of the plan that train.py would make from the same arguments. Exit code 0,
or 2 for arguments that cannot be planned. Needs neither a GPU nor, but for --measure, torch.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode
from harness.terminal import columns, say
from tools.figure import write_plot
from tools.layout import plot, zero
from tools.layout.measure import measured
from tools.layout.text import describe
from tools.plan_args import add_plan_arguments, plan_of


def main(argv: list[str]) -> int:
    """argv -> text on standard output -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_plan_arguments(parser)
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run a small model in as many stages on CPU ranks, and time their waiting",
    )
    args = parser.parse_intermixed_args(argv)
    try:
        plan = plan_of(args)
        if args.measure and plan.stages is None:
            raise ConfigError("--measure: nothing waits without pipeline stages")
        text = describe(plan, columns(sys.stdout))
    except ValueError as error:
        say(f"cannot show: {error}", sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    say(text)
    if args.measure:
        say(f"\n{measured(plan.grid.pipeline)}")
    if args.plot:
        write_plot(args.plot, (zero if plan.stages is None else plot).drawn(plan))
    return int(ExitCode.DONE)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as any command before `| head`
    sys.exit(main(sys.argv[1:]))
