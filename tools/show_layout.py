"""Show the layout of a plan: each rank's position, contents and schedule.

    python tools/show_layout.py --model llama-3-8b --deepspeed ds_configs/pipeline4.json --gpus 16
    python tools/show_layout.py --model gpt2-124m --gpus 8 ds.pipeline.stages=4 \\
        ds.pipeline.partition=memory --accumulation 16

The numbers come from the plan that train.py would make from the same arguments; tools/studio.py
draws the same. Exit code 0, or 2 for arguments that cannot be planned. Needs neither GPU nor torch.
"""

import argparse
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ExitCode
from harness.terminal import HelpFormatter, columns, say
from tools.layout.text import describe
from tools.plan_args import add_plan_arguments, plan_of


def main(argv: list[str]) -> int:
    """Run the command: argv -> text on standard output -> exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add_plan_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    try:
        plan = plan_of(args)
        text = describe(plan, columns(sys.stdout))
    except ValueError as error:
        say(f"cannot show: {error}", sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    say(text)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other commands do before `| head`
    sys.exit(main(sys.argv[1:]))
