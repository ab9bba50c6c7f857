"""Rehearse a job on this machine before it costs money: the same files, small, on CPUs or GPUs.

    python tools/rehearse.py --deepspeed ds_configs/zero3.json --gpus 8 model.name=llama-3-8b
    python tools/rehearse.py --deepspeed ds_configs/pipeline4.json --gpus 64 --gpu h100-80 \\
        --config run.toml data.path=corpus.jsonl train.global_batch=256
    python tools/rehearse.py --all --gpus 8 model.name=llama-3-8b
    python tools/rehearse.py --device cuda --deepspeed ds_configs/3d.json --gpus 8

Takes the arguments of harness/train.py and the number of GPUs of the job. First it plans the real
job and reports whatever train.py would refuse (code 2). Then a small model of the same
architecture, with the same JSON, optimizer, guards and data, passes the stages of a long run:

    train       ten uninterrupted steps: the reference
    interrupt   the same run; one rank gets SIGUSR1, and all save and end with code 75
    resume      to the end; every step equals the reference's, bit for bit (on GPUs at least
                within rounding), and none is repeated
    export      opens in transformers, with the loss that it had in training
    elsewhere   the checkpoint resumes on one rank (on two, if it was one), within rounding

Exit code 0 if all stages passed; 1 if a stage failed, the small model has no plan or the disk is
full; 2 for a job that cannot be planned. Adapters (model.lora) stay, on random weights. All
pipeline stages stay, and up to two tensor and two sequence ranks. Data ranks shrink to four ranks
in all, or to two per stage: 64 GPUs become 4 ranks, or 8 with 4 stages. With --device cuda, up to
8 ranks share this machine's GPUs, if need be a single one, under real NCCL. For a JSON that divides
experts, --all uses mixtral-8x7b if the job's model has none.
"""

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode, is_full_disk
from harness.estimate.fit import free_on_gpu, shortages
from harness.estimate.hardware import known_gpu
from harness.estimate.host import driver_bytes
from harness.estimate.memory_item import GIB
from harness.launch.ranks import REPOSITORY
from harness.layout.grid import Grid
from harness.layout.shape import Shape, num_parameters
from harness.layout.world import World, find_gpu_name, visible_gpus
from harness.plan.command import Command, parse_command, plan_from
from harness.plan.make import takes
from harness.plan.plan import Plan
from harness.report.formatting import duration
from harness.run.dry_run import dry_run
from harness.terminal import command_parser, say
from tools.made_with import machine, versions
from tools.plan_args import add_machine_arguments, world_of
from tools.rehearsal import stages
from tools.rehearsal.job import MOST_RANKS, STEPS, Job, rehearsed, shown
from tools.rehearsal.shrink import with_experts
from tools.rehearsal.stages import Done, Rehearsal, StageFailed, train_command
from tools.workers import INTERRUPTED, as_ctrl_c

MOST_ON_GPUS = 8
"""Most ranks on this machine's GPUs, unless --ranks asks for more."""
STAGES = ("plan", "train", "interrupt", "resume", "export", "elsewhere")


@dataclass
class Result:
    """One rehearsal, as far as it got."""

    name: str  # file name of the JSON
    job: Job | None = None
    done: list[Done] = field(default_factory=list)
    problem: str | None = None
    model: str | None = None  # the preset that replaces a model without experts

    @property
    def seconds(self) -> float:
        """Seconds of all stages together."""
        return sum(stage.seconds for stage in self.done)

    def add(self, done: Done) -> None:
        """Add a stage that passed, and print its line."""
        self.done.append(done)
        say(f"{done.stage:<10}{done.seconds:7.1f} s  {done.seen}")


def main(argv: list[str], command: stages.Command = train_command) -> int:
    """Run the command: argv -> rehearsals -> exit code. `command` starts the ranks of a stage."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    asked = parse_command(rest)
    if args.device == "cuda" and not visible_gpus():
        parser.error("--device cuda: there is no GPU here; check nvidia-smi, or use --device cpu")
    if args.markdown and not args.all:
        parser.error(f"--markdown {args.markdown}: the table needs --all")
    if args.only and not args.all:
        parser.error(
            f"--only {' '.join(args.only)}: it selects files of --all; add --all, or "
            "use --deepspeed"
        )
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
        print("interrupted; nothing was left behind", file=sys.stderr)
        return INTERRUPTED
    if args.all:
        total = sum(result.seconds for result in results)
        passed = codes.count(0)
        print(f"{passed} of {len(results)} rehearsals held, {total:.0f} s together")
    if args.markdown:
        args.markdown.write_text(markdown(results, argv), encoding="utf-8")
    return max(codes)


def _one(asked: Command, args: argparse.Namespace, command: stages.Command) -> tuple[Result, int]:
    """Plan and rehearse one JSON, and print everything."""
    result, began = Result(asked.deepspeed_path.name), time.monotonic()
    if args.all:
        asked, result.model = with_experts(asked)
    if result.model:
        say(f"{result.name} shards experts, which this model lacks: {result.model} was used")
    try:
        world = world_of(args)
        real = _planned(asked, world)
        if asked.dry_run:
            say(dry_run(real).text())
        ranks = args.ranks
        if args.all and ranks:  # one number for all; a JSON whose layout needs more ranks gets more
            grid = real.grid
            one = replace(grid, world_size=grid.world_size // grid.data, expert=1)
            ranks = max(ranks, rehearsed(one).world_size)
        fitting = ranks_that_fit() if args.device == "cuda" else sys.maxsize
        most = MOST_RANKS if args.device == "cpu" else min(MOST_ON_GPUS, fitting)
        job = Job.of(real, ranks, asked.trust_remote_code, args.device, most)
        result.job = job
        if job.layout.world_size > fitting:
            count = f"{shown(job.layout)} are needed, but {fitting} fit the free memory of the GPUs"
            raise ConfigError(f"--device cuda: {count}: use --device cpu")
    except ValueError as error:
        aim = "plan" if isinstance(error, ConfigError) else "shrink the model of"
        say(f"cannot {aim} {asked.deepspeed_path}: {error}", sys.stderr)
        result.problem = f"plan: {error}"
        return result, int(ExitCode.BAD_CONFIG) if isinstance(error, ConfigError) else 1
    say(f"rehearsing {asked.deepspeed_path.name} as {_rehearsed_as(job)}")
    result.add(Done("plan", time.monotonic() - began, _planned_as(real)))
    guess = duration(sum(stages.expected_s(job).values()))
    say(f"{'this takes' if not asked.dry_run else 'it would take'} about {guess} (guessed)")
    if asked.dry_run:
        return result, 0
    return result, _rehearse(result, args, command)


def _rehearse(result: Result, args: argparse.Namespace, command: stages.Command) -> int:
    """Run all stages in a folder that is removed if they pass; return the exit code."""
    assert result.job
    folder, keep, code = None, True, 0
    try:
        folder = Path(tempfile.mkdtemp(prefix="rehearsal-", dir=args.folder))
        for done in Rehearsal(
            result.job, folder, partial(say, stream=sys.stderr), command
        ).stages():
            result.add(done)
        keep = args.keep
    except StageFailed as failed:
        result.problem, code = f"{failed.stage}: {failed}", failed.code
        print(*filter(None, [failed.output]), sep="\n", file=sys.stderr)
    except (ConfigError, OSError) as error:  # the job's data or the disk
        result.problem = f"plan: {error}"
        # If the rehearsal's own folder has no room, the job is not at fault.
        code = 1 if is_full_disk(error) else int(ExitCode.BAD_CONFIG)
        keep = args.keep
    except KeyboardInterrupt:
        keep = False
        raise
    finally:
        if folder and not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if folder and keep:
        say(f"kept: {folder}")
    missing = ", ".join(result.job.not_rehearsed())
    held = f"all held in {result.seconds:.0f} s. Not rehearsed: {missing}"
    say(held if result.problem is None else f"FAILED at {result.problem}")
    return code


def ranks_that_fit() -> int:
    """Return the number of ranks for which this machine's GPUs have memory; they are dealt out
    evenly, so that the fullest GPU decides.
    """
    gpus = range(len(visible_gpus()))
    gpu = known_gpu(find_gpu_name())
    each = driver_bytes(Grid(MOST_ON_GPUS), gpu and gpu.key).high + GIB // 2  # a small model
    free = [free_on_gpu(World(local_rank=gpu)) for gpu in gpus]
    known = [size // each for size in free if size is not None]
    return len(gpus) * min(known) if known else MOST_ON_GPUS


def _planned(asked: Command, world: World) -> Plan:
    """Return the real job's plan. Raises ConfigError also if a named GPU cannot hold it."""
    real = plan_from(asked, world=world)
    if real.estimate and real.estimate.device_bytes and not real.config.plan.force:
        short = shortages(real.estimate, real.estimate.device_bytes, None, takes(real))
        if short:
            raise ConfigError(short)
    return real


def _planned_as(real: Plan) -> str:
    verdict = real.estimate.verdict if real.estimate and real.world.gpu else None
    return (
        f"{shown(real.grid, 'GPU')}, ZeRO {real.zero_stage}, "
        f"{real.precision}, {real.global_batch} windows per step = {real.micro_batch} x "
        f"{real.grad_accum} accumulated x {real.grid.data} data ranks"
        + (f"; {verdict} {real.world.gpu}" if verdict else "")
    )


def _rehearsed_as(job: Job) -> str:
    try:
        size = f"{num_parameters(Shape.from_hf(job.model)) / 1e6:.2f}M parameters"
    except ValueError:  # an architecture unknown to the planner
        size = "an unknown size"
    return (
        f"{shown(job.layout)}, a {job.model['model_type']} of {size}, {job.global_batch} "
        "windows per "
        f"step = {job.micro_batch} x {job.grad_accum} accumulated x {job.layout.data} data ranks, "
        f"{STEPS} steps"
    )


def markdown(results: list[Result], argv: list[str]) -> str:
    """Return the rehearsals as a Markdown table."""
    lines = [
        "# Rehearsals of the shipped configs",
        "",
        "Generated by",
        "",
        f"    python tools/rehearse.py {shlex.join(argv)}",
        "",
        f"on {machine()}: {versions()}.",
        "",
        f"Each row plans the real job, then trains its small model for {STEPS} steps on CPU",
        "ranks; trains again and is stopped by a signal; resumes, equal bit for bit; exports, and",
        "opens in transformers; resumes the checkpoint in another layout. The numbers are seconds,",
        "most of them Python's imports: every rank of every stage is a new process.",
        "",
        f"| JSON | GPUs | rehearsed on | precision | {' | '.join(STAGES)} | total | verdict |",
        f"|---|---|---|---|{'---:|' * (len(STAGES) + 1)}---|",
        *(f"| {' | '.join(_cells(result))} |" for result in results),
        "",
        f"All together: {sum(result.seconds for result in results):.0f} s.",
    ]
    return "\n".join(lines) + "\n"


def _cells(result: Result) -> list[str]:
    took = {done.stage: f"{done.seconds:.1f}" for done in result.done}
    job = result.job
    failed = result.problem and f"FAILED at {result.problem.partition(':')[0]}"
    return [
        f"`{result.name}`" + (f" with {result.model}" if result.model else ""),
        *(
            [str(job.real.grid.world_size), shown(job.layout), job.real.precision]
            if job
            else [""] * 3
        ),
        *(took.get(stage, "") for stage in STAGES),
        f"{result.seconds:.0f}",
        failed or "held",
    ]


def _parser() -> argparse.ArgumentParser:
    others = "Other arguments are those of harness/train.py: --deepspeed, --config, key=value."
    parser, add = command_parser(__doc__, epilog=others, allow_abbrev=False)
    add_machine_arguments(parser)
    device = "Where the ranks run (default: %(default)s)."
    add("--device", choices=("cpu", "cuda"), default="cpu", help=device)
    add("--ranks", type=int, help="Number of ranks to rehearse on (default: see above).")
    add("--folder", type=Path, metavar="DIR", help="Parent of the temporary folder.")
    add("--keep", action="store_true", help="Keep the temporary folder even if all stages pass.")
    add("--all", action="store_true", help="Rehearse every shipped ds_configs/*.json.")
    only = "With --all: rehearse only this file; may be repeated."
    add("--only", action="append", default=[], metavar="NAME.json", help=only)
    add("--markdown", type=Path, metavar="FILE", help="With --all: write a table in Markdown.")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, as_ctrl_c)
    sys.exit(main(sys.argv[1:]))
