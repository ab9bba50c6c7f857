"""Check the booked nodes before a run starts on them: one table, one verdict.

    srun python tools/preflight.py --deepspeed ds_configs/zero3.json model.name=llama-1b
    torchrun --nproc-per-node 2 tools/preflight.py --deepspeed ds_configs/zero1.json
    python tools/preflight.py --json run.dir=runs/first

Takes the arguments of harness/train.py and starts the same way, with one process per rank. It plans
both configs for this allocation, compares code, configs, packages and data between the ranks,
measures GPUs, memory, limits, network and the run folder's storage, and names the nodes and ranks
that stand out. It builds nothing and leaves nothing behind. Exit code 0 (ok, or warnings), or 2: do
not start, and do not requeue.
"""

import faulthandler
import os
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.engine.importing import importing
from harness.errors import ExitCode
from harness.terminal import command_parser, say

LIMIT_S = 120.0
# A rank that hangs out of Python's reach ends itself this long after the limit. Killed from
# outside, its code would become the preflight's.
_GRACE_S = 30.0
NEEDED = (  # by every run
    "tomllib",  # Python 3.11
    "torch",
    "deepspeed",
    "transformers",
    "accelerate",
    "pydantic",
    "numpy",
    "safetensors",
)


def main(argv: list[str]) -> int:
    """Run the command: argv -> table on rank 0's standard output -> exit code."""
    usage = "%(prog)s [--json] [--limit-s SECONDS] (arguments of harness/train.py)"
    parser, add = command_parser(__doc__, allow_abbrev=False, usage=usage)
    limit = "Time limit for the whole check (default: %(default)g)."
    add("--json", action="store_true", help="Print the table as JSON, for other programs.")
    add("--limit-s", type=float, default=LIMIT_S, metavar="SECONDS", help=limit)
    only = "Check only whether Python can import what a run needs on this node."
    add("--environment", action="store_true", help=only)
    args, rest = parser.parse_known_args(argv)
    if args.limit_s <= 0:
        parser.error(f"--limit-s {args.limit_s:g}: it must be greater than 0")
    # The scheduler's name of this node, under which it can be drained.
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    with importing():
        problem = environment_problem()
    if problem:
        say(f"{'' if args.environment else f'cannot check: {host}: '}{problem}", sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    if args.environment:
        return int(ExitCode.DONE)
    from harness.plan.command import parse_command  # imports pydantic

    command = parse_command(rest)
    # The report names absent ranks once; torch would add a C++ stack for each.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    with importing():
        from tools.preflight_checks.flight import fly  # torch from here on
        from tools.preflight_checks.network import Absent
    from tools.workers import INTERRUPTED

    for number in (signal.SIGTERM, signal.SIGUSR1):  # from a batch system, from the batch script
        signal.signal(number, _end)
    faulthandler.dump_traceback_later(args.limit_s + _GRACE_S, exit=True)
    try:
        return fly(command, host, args.json, args.limit_s)
    except (Absent, ValueError) as error:
        say(f"cannot check: {error}", sys.stderr)
        return int(getattr(error, "code", ExitCode.BAD_CONFIG))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        faulthandler.cancel_dump_traceback_later()


def environment_problem() -> str | None:
    """Return the reason why this Python cannot import a run's packages; None if it can.

    Torch is really imported, since it loads libraries that may be missing; the others are only
    looked up.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"{sys.executable} cannot import {', '.join(missing)}"
    try:
        import torch  # noqa: F401
    except Exception as error:  # a broken installation raises anything
        return f"{sys.executable} cannot import torch: {type(error).__name__}: {error}"
    return None


def _end(number: int, _: object) -> NoReturn:
    """Exit as Ctrl-C does, so that temporary files are removed."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
