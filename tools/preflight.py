"""Looks at the booked nodes before a run starts on them: one table, one verdict.

    srun python tools/preflight.py --deepspeed ds_configs/zero3.json model.name=llama-1b
    torchrun --nproc-per-node 2 tools/preflight.py --deepspeed ds_configs/zero1.json
    python tools/preflight.py --json run.dir=runs/first

The arguments are those of harness/train.py, and so is the way to start it: one process for each
rank. Both configs are planned for this allocation; code, configs, packages and data are compared
between the ranks; GPUs, memory, limits, network and the run folder's storage are measured, and what
falls out of line is named by node and rank. Nothing is built, and nothing stays behind. Exit code 0
(ok, or warnings), or 2: do not start, and do not requeue.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ExitCode
from harness.terminal import say
from tools.preflight_checks.environment import environment_problem, host_name

LIMIT_S = 120.0
# A rank that hangs where Python cannot reach it ends itself so long after the limit: were it killed
# from outside, that would be the preflight's exit code.
_GRACE_S = 30.0
_INTERRUPTED = 130  # as shells have it


def main(argv: list[str]) -> int:
    """argv -> table on rank 0's standard output -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [--json] [--limit-s SECONDS] (what harness/train.py takes)",
    )
    parser.add_argument("--json", action="store_true", help="the table as JSON, for programs")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, metavar="SECONDS", help="for all of it (120)"
    )
    parser.add_argument(
        "--environment", action="store_true", help="only: is Python complete on this node?"
    )
    args, rest = parser.parse_known_args(argv)
    if args.limit_s <= 0:
        parser.error(f"--limit-s {args.limit_s:g}: it must be greater than 0")
    if problem := environment_problem():
        who = "" if args.environment else f"cannot look: {host_name()}: "
        say(f"{who}{problem}", sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    if args.environment:
        return int(ExitCode.DONE)
    from harness.plan.command import parse_command  # pydantic from here on

    command = parse_command(rest)
    # Who does not come is said below, once; torch would add a stack of C++ for each.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from tools.preflight_checks.flight import Absent, fly  # torch from here on

    for number in (signal.SIGTERM, signal.SIGUSR1):  # a batch system's, and the batch script's
        signal.signal(number, _end)
    faulthandler.dump_traceback_later(args.limit_s + _GRACE_S, exit=True)
    try:
        return fly(command, args.json, args.limit_s)
    except (Absent, ValueError) as error:
        say(f"cannot look: {error}", sys.stderr)
        return int(getattr(error, "code", ExitCode.BAD_CONFIG))
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end(number: int, _: object) -> NoReturn:
    """End like Ctrl-C does: what was written to look at is taken away."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
