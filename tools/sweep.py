"""Runs a sweep: many runs that differ in a few keys, compared by their held-out loss.

    python tools/sweep.py docs/sweep.toml --dry-run
    python tools/sweep.py docs/sweep.toml

The file is a run config with two more tables: [sweep] sets the method (grid, random, or tpe), early
stopping and a budget; [search] lists the keys that vary:

    [sweep]
    method = "random"
    trials = 12
    prune = {after = 0.15, factor = 3}
    budget = {steps = 600}

    [search]
    optim.lr = {from = 1e-4, to = 1e-1, log = true}
    optim.name = ["adamw", "lion"]

    [train]
    steps = 60

Every trial is a run in runs/NAME/trial-000 and so on. All plans are checked before the first trial
starts. If the sweep is killed or stopped by Ctrl-C, the same command continues the same trials. At
the end it prints a ranked table and the command of the best trial, and writes runs/NAME/sweep.html.
Exit code 0; 1 if no trial has a result; 2 for a file with problems; 75 if the sweep was stopped, or
ended by its budget; 130 after a second Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode
from harness.files.folder_lock import release, take_lock
from harness.files.paths import script
from harness.terminal import command_parser, say
from tools.slurm_queue import slurm_problems
from tools.sweeps.cost import Cost, Record, costs, lane_problems
from tools.sweeps.page import write_sweep_page
from tools.sweeps.ranking import best_of, write_tables
from tools.sweeps.slurm import follow, slurm_world, submit
from tools.sweeps.spec import Sweep, keep_file, read_sweep
from tools.sweeps.text import Screen, best_command, ending, listing, ranking
from tools.workers import INTERRUPTED, on_stop

if TYPE_CHECKING:  # Optuna, which a dry run does without
    from tools.sweeps.study import Study


def main(argv: list[str]) -> int:
    """Run the command: argv -> trials -> exit code."""
    parser, add = command_parser(__doc__)
    add("file", type=Path, metavar="SWEEP.toml", help="A file, or the name of one of docs/.")
    add("--slurm", action="store_true", help="Submit the trials as one Slurm job array.")
    add("--dry-run", action="store_true", help="List the trials and their cost, then exit.")
    add("--retry", action="store_true", help="Run failed trials again.")
    add("--report", action="store_true", help="Only rewrite the table and the page.")
    add("--trial", type=int, help=argparse.SUPPRESS)  # of slurm/sweep.sbatch
    args = parser.parse_args(argv)
    try:
        sweep, planned = _checked(args)
        if args.dry_run:
            say(listing(sweep, planned))
            return int(ExitCode.DONE)
        if args.trial is not None:
            from tools.sweeps.running import run_task
            from tools.sweeps.study import Study

            return run_task(sweep, Study(sweep), args.trial, Screen().say)
        keep_file(sweep)
        lock, _ = take_lock(sweep.folder / "lock")
        try:
            return _conduct(sweep, args)
        finally:
            release(lock)
    except KeyboardInterrupt:  # the second one
        say("interrupted: unsaved work is lost; the same command resumes", sys.stderr)
        return INTERRUPTED
    except ConfigError as error:
        say(f"cannot sweep: {error}", sys.stderr)
        return int(error.code)


def _checked(args: argparse.Namespace) -> tuple[Sweep, list[Cost]]:
    """Return the sweep and its trials' costs. Raises ConfigError with every problem."""
    problems: list[str] = []
    sweep = read_sweep(args.file, problems)
    is_array = args.slurm or args.trial is not None
    planned = costs(sweep, slurm_world(sweep) if is_array else None, problems)
    if not args.dry_run:
        problems += slurm_problems() if is_array else lane_problems(sweep)
        if importlib.util.find_spec("optuna") is None:
            problems.append("sweeps need the package optuna: pip install optuna")
    if problems:
        raise ConfigError(problems)
    return sweep, planned


def _conduct(sweep: Sweep, args: argparse.Namespace) -> int:
    """Run what is left of the sweep; show the result."""
    from tools.sweeps.study import Study, cut_torn_line

    if not args.slurm:  # whose tasks may be writing
        cut_torn_line(sweep.folder)
    study, screen = Study(sweep), Screen()
    if args.retry:
        screen.say(f"{len(study.retry())} failed trials will run again")
    if not args.report:
        (_run_array if args.slurm else _run_here)(sweep, study, screen)
    records = study.records()
    page, tables = write_sweep_page(sweep, records), write_tables(sweep, records)
    screen.say(ranking(sweep, records))
    if (best := best_of(sweep, records)) is not None:
        print(best_command(sweep, best))  # unbroken, to be copied
    screen.say(f"report: {page}; as a table: {' '.join(map(str, tables))}")
    if any(not record.has_ended for record in records):
        again = f"python {script('tools/sweep.py')} {sweep.path}{' --slurm' * args.slurm}"
        screen.say(f"not all trials have ended; the same command resumes: {again}")
        return int(ExitCode.STOPPED)
    return int(ExitCode.DONE) if any(record.state == "done" for record in records) else 1


def _run_here(sweep: Sweep, study: Study, screen: Screen) -> None:
    """Run trials on this machine until all have ended or the sweep is stopped."""
    from tools.sweeps.running import queue_here

    queue = queue_here(sweep, study, screen.say)

    def stop(name: str) -> None:  # by Ctrl-C or SIGTERM
        if queue.is_stopped:
            raise KeyboardInterrupt
        queue.is_stopped = True
        screen.say(f"{name}: trials will save and end; repeat it to end them now")

    with on_stop(stop):
        queue.run(screen.show, lambda record: _ended(sweep, study, screen, record))


def _run_array(sweep: Sweep, study: Study, screen: Screen) -> None:
    """Submit trials to Slurm and wait for them; Ctrl-C ends only the waiting."""
    job = submit(sweep, study, screen.say)
    try:
        if job is not None:
            follow(job, study, lambda record: _ended(sweep, study, screen, record))
    except KeyboardInterrupt:
        screen.say(f"job {job} continues; `scancel {job}` ends it")


def _ended(sweep: Sweep, study: Study, screen: Screen, record: Record) -> None:
    screen.say(ending(sweep, record))
    write_sweep_page(sweep, study.records())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
