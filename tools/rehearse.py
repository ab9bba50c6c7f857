"""Rehearse a job on this machine before paying for it: the same files, small, on CPU ranks.

    python tools/rehearse.py --deepspeed ds_configs/zero3.json --gpus 8 model.name=llama-3-8b
    python tools/rehearse.py --deepspeed ds_configs/pipeline4.json --gpus 64 --gpu h100-80 \\
        --config run.toml data.path=corpus.jsonl train.global_batch=256
    python tools/rehearse.py --all --gpus 8 model.name=llama-3-8b

Takes the arguments of harness/train.py, and how many GPUs the job has. First the real job is
planned: whatever train.py would refuse shows here (code 2). Then a model of the same architecture,
the same JSON, optimizer, guards and data, all of them small, go through what a long run meets:

    train       ten steps, uninterrupted: the reference
    interrupt   the same again; one rank gets SIGUSR1, and all save and end with code 75
    resume      to the end; every step equal to the reference's, bit for bit, none taken twice
    export      opens in transformers, with the loss that it had in training
    elsewhere   what was saved goes on in another layout, within rounding

Exit code 0 only if all held, 1 if a stage did not or the disk is full, 2 for a job that cannot be
planned. Pipeline stages all stay, and two tensor or sequence ranks of a job that has more; data
ranks go, to four ranks or to two for each stage: 64 GPUs are 4 ranks, in 4 stages 8. --all takes
mixtral-8x7b for a JSON that divides experts, where the job's model has none.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode, is_full_disk
from harness.estimate.fit import shortages
from harness.launch.ranks import REPOSITORY
from harness.layout.world import World
from harness.plan.changes import takes
from harness.plan.command import Command, parse_command, plan_from
from harness.plan.plan import Plan
from harness.plan.text import describe
from harness.terminal import say
from tools.plan_args import add_machine_arguments, world_of
from tools.rehearsal import stages
from tools.rehearsal.job import Job, rehearsed
from tools.rehearsal.report import (
    Result,
    markdown,
    planned,
    rehearsed_as,
    stage_line,
    verdict,
)
from tools.rehearsal.shrink import with_experts
from tools.rehearsal.stages import Done, Rehearsal, StageFailed, train_command

INTERRUPTED = 130
_OF_TABLES = {"--all": (0,), "--only": (0, 1), "--markdown": (0, 1)}


def main(argv: list[str], command: stages.Command = train_command) -> int:
    """argv -> a rehearsal -> exit code. `command` starts the ranks of a stage."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    asked = parse_command(rest)
    if args.markdown and not args.all:
        parser.error(f"--markdown {args.markdown}: the table is of --all")
    if args.only and not args.all:
        parser.error(f"--only {' '.join(args.only)}: it chooses of --all; or give --deepspeed")
    if args.all and any(word.startswith("--deepspeed") for word in rest):
        parser.error("--all rehearses every shipped JSON: leave --deepspeed out")
    jsons = [asked.deepspeed_path]
    if args.all:
        jsons = sorted((REPOSITORY / "ds_configs").glob("*.json"))
        if unknown := {*args.only} - {path.name for path in jsons}:
            parser.error(f"--only {' '.join(sorted(unknown))}: ds_configs/ has no such file")
        jsons = [path for path in jsons if not args.only or path.name in args.only]
    results, codes = [], []
    try:
        for path in jsons:
            result, code = _one(replace(asked, deepspeed_path=path), args, command)
            results.append(result)
            codes.append(code)
    except KeyboardInterrupt:
        print("interrupted; nothing is left of it", file=sys.stderr)
        return INTERRUPTED
    if args.all:
        total = sum(result.seconds for result in results)
        passed = codes.count(0)
        print(f"{passed} of {len(results)} rehearsals held, {total:.0f} s together")
    if args.markdown:
        kept = args.markdown.read_text("utf-8") if args.only and args.markdown.exists() else ""
        table = markdown(results, " ".join(_shown(argv)), kept)
        args.markdown.write_text(table, encoding="utf-8")
    return max(codes)


def _one(asked: Command, args: argparse.Namespace, command: stages.Command) -> tuple[Result, int]:
    """Plan and rehearse one JSON; says everything."""
    result, began = Result(asked.deepspeed_path.name), time.monotonic()
    if args.all:
        asked, result.model = with_experts(asked)
    if result.model:
        _say(f"{result.name} divides experts, of which the model has none: {result.model} has them")
    try:
        world = world_of(args)
        real = _planned(asked, world)
        if asked.dry_run:
            say(describe(real))
        ranks = args.ranks
        if args.all and ranks:  # one number for all: what is divided over more needs a rank each
            grid = real.grid
            one = replace(grid, world_size=grid.world_size // grid.data, expert=1)
            ranks = max(ranks, rehearsed(one).ranks)
        job = result.job = Job.of(real, ranks, asked.trust_remote_code)
    except ValueError as error:
        aim = "plan" if isinstance(error, ConfigError) else "shrink the model of"
        say(f"cannot {aim} {asked.deepspeed_path}: {error}", sys.stderr)
        result.problem = f"plan: {error}"
        return result, int(ExitCode.BAD_CONFIG) if isinstance(error, ConfigError) else 1
    _say(f"rehearsing {asked.deepspeed_path.name} as {rehearsed_as(job)}")
    _stage(result, Done("plan", time.monotonic() - began, planned(real)))
    if asked.dry_run:
        return result, 0
    return result, _rehearse(result, args, command)


def _rehearse(result: Result, args: argparse.Namespace, command: stages.Command) -> int:
    """All stages, in a folder that is gone when they held; the exit code."""
    assert result.job
    folder, keep, code = None, True, 0
    try:
        folder = Path(tempfile.mkdtemp(prefix="rehearsal-", dir=args.folder))
        for done in Rehearsal(result.job, folder, _say_aside, command).stages():
            _stage(result, done)
        keep = args.keep
    except StageFailed as failed:
        result.problem, code = f"{failed.stage}: {failed}", failed.code
        print(*filter(None, [failed.output]), sep="\n", file=sys.stderr)
    except (ConfigError, OSError) as error:  # its data, or the disk
        result.problem = f"plan: {error}"
        # The rehearsal's own folder has no room: no mistake of the job.
        code = 1 if is_full_disk(error) else int(ExitCode.BAD_CONFIG)
        keep = args.keep
    except KeyboardInterrupt:
        keep = False
        raise
    finally:
        if folder and not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if folder and keep:
        _say(f"kept: {folder}")
    _say(verdict(result))
    return code


def _planned(asked: Command, world: World) -> Plan:
    """The real job's plan. Raises ConfigError also where a GPU that is named cannot hold it."""
    real = plan_from(asked, world=world)
    if real.estimate and real.estimate.device_bytes and not real.config.plan.force:
        short = shortages(real.estimate, real.estimate.device_bytes, None, takes(real))
        if short:
            raise ConfigError(short)
    return real


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Everything else is as for harness/train.py: --deepspeed, --config, key=value.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_machine_arguments(parser)
    parser.add_argument("--ranks", type=int, help="CPU ranks to rehearse on (default: see above)")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where its temporary folder is made"
    )
    parser.add_argument("--keep", action="store_true", help="keep that folder; a failure does, too")
    parser.add_argument("--all", action="store_true", help="every shipped ds_configs/*.json")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME.json",
        help="of --all; with --markdown the other rows of FILE stay",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="with --all: write a table")
    return parser


def _shown(argv: list[str]) -> list[str]:
    """The arguments of a table, without those that every table has."""
    own = {at + n for at, word in enumerate(argv) for n in _OF_TABLES.get(word, ())}
    return [word for at, word in enumerate(argv) if at not in own]


def _stage(result: Result, done: Done) -> None:
    result.done.append(done)
    _say(stage_line(done))


def _say(text: str) -> None:
    say(text)


def _say_aside(text: str) -> None:
    say(text, sys.stderr)


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    sys.exit(main(sys.argv[1:]))
