"""Tokenize a corpus without GPUs, in many processes, into the cache that training reads.

    python tools/tokenize_data.py data.path=corpus.jsonl data.tokenizer=my-tokenizer
    python tools/tokenize_data.py --config run.toml --workers 8
    python tools/tokenize_data.py data.path=corpus.jsonl data.tokenizer=my-tokenizer --out tokens
    sbatch --array=0-15 --cpus-per-task=8 slurm/tokenize.sbatch --config run.toml

Takes the run config and the key=value of train.py. For every source of data.path, data.mix and
data.eval_path it writes the files that the run would write at its start, so that the run only opens
them. --out writes PREFIX.bin and PREFIX.idx instead, which data.path=PREFIX reads on any machine.

If interrupted, rerun the command: it processes only the missing shards, and the files have the same
bytes. Exit code 0; 2 for input with problems; 74 if the disk is full; 75 if it was stopped.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.config.ds_json import PREFIX as DS_PREFIX
from harness.config.run_file import load_run_config
from harness.errors import ConfigError, ExitCode, is_full_disk
from harness.files.paths import option_path
from harness.terminal import command_parser, say
from tools.workers import Stopped, WorkerFailed, cores, stopping


def main(argv: list[str]) -> int:
    """Run the command: argv -> tokens on disk -> exit code."""
    args = _parser().parse_intermixed_args(argv)
    try:
        with stopping():
            return _tokenize(args)
    except Stopped as stop:
        say(f"stopped by {stop}; finished work is kept: the same command resumes", sys.stderr)
        return int(ExitCode.STOPPED)
    except ConfigError as error:
        say(f"cannot tokenise: {error}", sys.stderr)
        return int(error.code)
    except (OSError, WorkerFailed) as error:
        say(
            f"cannot tokenise: {error}\nfinished work is kept: the same command resumes", sys.stderr
        )
        return int(ExitCode.CANNOT_SAVE) if is_full_disk(error) else 1


def _parser() -> argparse.ArgumentParser:
    parser, add = command_parser(__doc__)
    add("--config", type=option_path, metavar="TOML", help="Run config.")
    add("--workers", type=int, default=cores(), help="Number of processes (default: %(default)s).")
    add("--out", type=option_path, metavar="PREFIX", help="Write PREFIX.bin and PREFIX.idx.")
    add("--task", type=int, default=0, help="Index of this share of the work, from 0.")
    add("--tasks", type=int, default=1, help="Number of shares, such as the size of a Slurm array.")
    add("--trust-remote-code", action="store_true", help="Run code that comes with the tokenizer.")
    add("assignments", nargs="*", metavar="key=value", help="Settings, as for train.py.")
    return parser


def _tokenize(args: argparse.Namespace) -> int:
    problems = []
    if args.workers < 1:
        problems.append(f"--workers is {args.workers}: it must be at least 1")
    if not 0 <= args.task < args.tasks:
        problems.append(f"--task is {args.task} of --tasks {args.tasks}: tasks count from 0")
    if args.out and not args.out.absolute().parent.is_dir():
        problems.append(f"--out {args.out}: there is no folder {args.out.parent}")
    try:
        assignments = [text for text in args.assignments if not text.startswith(DS_PREFIX)]
        run = load_run_config(args.config, assignments)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    others = [key for key in ("mix", "balance", "eval_path", "rehearse") if getattr(run.data, key)]
    if args.out and others:
        names = ", ".join(f"data.{key}" for key in others)
        problems.append(f"--out writes only the corpus of data.path: remove {names}")
    if problems:
        raise ConfigError(problems)
    from tools.tokenizing.work import Share, tokenized  # imports torch

    share = Share(args.workers, args.task, args.tasks)
    trust = args.trust_remote_code
    report = partial(print, file=sys.stderr)
    for line in tokenized(run, args.out, share, report, trust_remote_code=trust):
        say(line)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
