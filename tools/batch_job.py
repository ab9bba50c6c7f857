"""Answer the questions of slurm/train.sbatch and slurm/node.sh, without importing torch.

    python tools/batch_job.py run-dir --config my.toml model.name=llama-1b
    python tools/batch_job.py port
    python tools/batch_job.py attempt runs/first
    python tools/batch_job.py verdict train.py 137 runs/first 1

run-dir: the run folder that the arguments of harness/train.py set; an empty line if neither the
command line nor the run config sets one. port: a rendezvous port for ranks, the first of which
runs on this node. attempt: how many times the run was started. verdict: what to do after the
ranks ended with that code, for a run started that many times before; prints "requeue" or an empty
line, and ends with the job's exit code.
"""

import argparse
import os
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.config.assignments import assign_all
from harness.config.run_file import read_toml
from harness.errors import ConfigError, ExitCode
from harness.files.paths import user_path
from harness.guard.time_left import slurm_seconds_left
from harness.layout.world import free_port, slurm_port
from harness.plan.command import DS_PREFIX, Command, parse_command
from harness.runfolder import RunFolder
from harness.terminal import HelpFormatter

MOST_REQUEUES = 3  # without a newer checkpoint in between
LATE_S = 300.0  # Slurm's own warning comes at most this long before the time limit
# Codes after which another attempt would end the same way.
FINAL = {
    ExitCode.DONE,
    ExitCode.BAD_CONFIG,
    ExitCode.CANNOT_SAVE,
    ExitCode.DIVERGED,
    ExitCode.NO_CHECKPOINT,
    ExitCode.OVER_BUDGET,
}
PRUNED = "pruned"
"""File in the folder of a sweep's trial that was stopped early; such a trial is finished."""
_KILLED = 128  # plus the signal's number


def main(argv: list[str]) -> int:
    """Run the command: argv -> the answer on standard output -> exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    questions = parser.add_subparsers(dest="question", required=True)
    questions.add_parser("run-dir", add_help=False)
    questions.add_parser("port")
    questions.add_parser("attempt").add_argument("run", type=RunFolder)
    verdict = questions.add_parser("verdict")
    verdict.add_argument("program", choices=("preflight.py", "train.py"))
    verdict.add_argument("code", type=int)
    verdict.add_argument("run", type=RunFolder)
    verdict.add_argument("attempt_before", type=int)
    verdict.add_argument("--warned", action="store_true", help="the job is about to be stopped")
    verdict.add_argument("--uncounted", action="store_true", help="another node counts this end")
    args, words = parser.parse_known_args(argv)
    if args.question == "run-dir":
        print(run_dir(parse_command(words)))
    elif args.question == "port":
        print(free_port(slurm_port()))
    elif args.question == "attempt":
        print(read_status(args.run).get("attempt", 0))
    else:
        return _verdict(args)
    return 0


def run_dir(command: Command) -> str:
    """Return the absolute run.dir of a train.py command line; empty if none is set.

    Other problems of the run config are reported by the programs that read all of it.
    """
    tree: dict[str, Any] = {}
    if command.config_path is not None:
        with suppress(ConfigError):
            tree = read_toml(command.config_path)
    assign_all(tree, (text for text in command.assignments if not text.startswith(DS_PREFIX)))
    section = tree.get("run")
    text = section.get("dir") if isinstance(section, dict) else None
    if text is None:
        return ""
    try:
        return str(user_path("run.dir", str(text)).absolute())
    except ConfigError:
        return str(text)


def read_status(run: RunFolder) -> dict[str, Any]:
    """Return status.json; empty if it is missing or unreadable."""
    try:
        return run.read_status() or {}
    except (OSError, ValueError):
        return {}


def _verdict(args: argparse.Namespace) -> int:
    """Print "requeue" if the job is to continue later; return the job's exit code."""
    code = final_code(args.program, args.code, args.run, args.attempt_before, args.warned)
    newest = max((path.name for path in args.run.checkpoints_dir.glob("step-*")), default="none")
    ended = f"{args.program} ended with {code}"
    if args.program == "preflight.py":
        ended += ": not started"
    say(f"{datetime.now():%Y-%m-%dT%H:%M:%S} {ended}; newest checkpoint: {newest}")
    # A warning long before the time limit (pre-emption, scancel) says nothing about the run. If the
    # limit is unknown, it counts: a run that never saves in time must end.
    left_s = slurm_seconds_left() if args.warned else None
    counts = not args.uncounted and (left_s is None or left_s <= LATE_S)
    is_pruned = (args.run.path / PRUNED).exists()
    again = code not in FINAL and not is_pruned and not (counts and is_stuck(args.run.path, newest))
    print("requeue" if again else "")
    return code


def final_code(program: str, code: int, run: RunFolder, attempt_before: int, warned: bool) -> int:
    """Return the job's exit code. `code` is the highest of all ranks, in which a killed rank hides
    the others. `warned`: the ranks were told to stop, possibly before they handled signals.
    """
    if program == "preflight.py":
        if warned:
            return ExitCode.STOPPED  # no step was done: requeue the job
        return ExitCode.BAD_CONFIG if code > _KILLED else code  # the killed rank has been reported
    if code in FINAL:
        return code
    if warned:
        code = ExitCode.STOPPED
    status = read_status(run)
    attempt = status.get("attempt", 0)
    if attempt == attempt_before:
        return code  # this attempt did not reach the run folder: its files are older
    if run.hang_path(attempt).exists():
        code = ExitCode.HANG
    recorded = status.get("code")
    return recorded if recorded in {*ExitCode} - {ExitCode.DONE} else code


def is_stuck(folder: Path, newest: str) -> bool:
    """Count an end of this job after its `newest` checkpoint; return True after more than
    MOST_REQUEUES of them. The count restarts with a newer checkpoint and in another job.
    """
    job = os.environ.get("SLURM_JOB_ID", os.environ.get("JOB_UID"))
    ending = f"job {job} after {newest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "endings").open("a+", encoding="utf-8") as file:
            file.write(f"{ending}\n")
            file.seek(0)
            count = file.read().splitlines().count(ending)
    except OSError as error:  # without a count, requeueing would never end
        say(f"{folder}: {error}: not requeued")
        return True
    if count > MOST_REQUEUES:
        say(f"ended {count} times without progress: not requeued")
    return count > MOST_REQUEUES


def say(text: str) -> None:
    """Write a line to the job's log; standard output is for the answer."""
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
