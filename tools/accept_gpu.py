"""Checks whether everything works on this machine's GPUs. Ten steps, one table; run it first.

    python tools/accept_gpu.py
    python tools/accept_gpu.py --ranks 2 --only joining parity --json accepted.json
    python tools/accept_gpu.py --share --ranks 4   # several ranks on each GPU, with real NCCL

Each step runs in its own process with a time limit, and ends every process it started. On a GPU a
step takes one to four minutes, depending on the host. On a machine without GPUs (or with
DS_ACCELERATOR=cpu) the same steps run on two CPU ranks at smaller sizes; checks that need CUDA are
listed. Exit code 0 if nothing failed, 1 if a step failed, 2 for wrong arguments.

steps:
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

from harness.launch.ranks import python_path, started
from harness.layout.world import SHARES_GPU, find_accelerator, visible_gpus
from harness.terminal import command_parser, say
from tools.acceptance import report
from tools.acceptance.report import Result, Step, readable
from tools.made_with import machine, versions
from tools.workers import INTERRUPTED, as_ctrl_c

MOST_RANKS = 8
CPU_RANKS = 2
LIMIT_S = 900.0  # per step: ends only what hangs, however busy the cores are
_SAY_EVERY_S = 10.0
STEPS = tuple(
    Step(name, question, f"tools.acceptance.{where}")
    for name, question, where in (
        ("environment", "are the driver, packages, limits and links in place?", "machine:look_at"),
        (
            "optimizer",
            "does every AdamW match torch's? is a killed build harmless?",
            "optimizer:look",
        ),
        ("joining", "do ranks find each other under every launcher?", "machine:join_ranks"),
        ("parity", "does every layout train like a plain loop?", "parity:look"),
        ("attention", "do all implementations give the same loss and gradient?", "attention:look"),
        ("waits", "does the host wait for the device only where necessary?", "measured:wait"),
        ("saving", "is nothing lost in saves, resumes and new layouts?", "runs:save"),
        ("faults", "do all ranks end with the right exit code?", "runs:fail"),
        ("memory", "does a run use as much memory as estimated?", "measured:hold"),
        ("speed", "how fast is a step, and why?", "measured:climb"),
    )
)


def main(argv: list[str], steps: Sequence[Step] = STEPS) -> int:
    """Run the command: argv -> progress and a table -> exit code."""
    parser = _parser(steps)
    args = parser.parse_args(argv)
    by_name = {step.name: step for step in steps}
    if unknown := [name for name in args.only or () if name not in by_name]:
        parser.error(f"--only {' '.join(unknown)}: the steps are {', '.join(by_name)}")
    accelerator = find_accelerator()
    gpus = min(MOST_RANKS, len(visible_gpus())) if accelerator == "cuda" else MOST_RANKS
    if not gpus:
        parser.error("there is a driver, but no GPU: check nvidia-smi, or set DS_ACCELERATOR=cpu")
    most = MOST_RANKS if args.share else gpus
    usual = CPU_RANKS if accelerator == "cpu" else max(gpus, 2) if args.share else gpus
    ranks = usual if args.ranks is None else args.ranks
    if not 1 <= ranks <= most:
        hint = "" if most == MOST_RANKS else f", and up to {MOST_RANKS} with --share"
        parser.error(f"--ranks {ranks}: it must be 1 to {most} here{hint}")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    if ranks > gpus:
        os.environ[SHARES_GPU] = "1"  # for the ranks of every step
    folder = Path(tempfile.mkdtemp(prefix="accept-gpu-"))
    about = {"accelerator": accelerator, "ranks": ranks, "versions": versions()}
    about["machine"] = machine()
    kind = "GPU" if accelerator == "cuda" else "CPU rank"
    shown = f"{ranks} {kind}{'s' * (ranks > 1)}"
    if accelerator == "cuda" and ranks > gpus:
        shown = f"{ranks} ranks share {gpus} GPU{'s' * (gpus > 1)}, speed is not measured"
        about["gpus"] = gpus
    _say(f"{shown}, {about['versions']}; logs in {folder}")
    results: list[Result] = []
    chosen = [step for step in steps if not args.only or step.name in args.only]
    try:
        for number, step in enumerate(chosen, 1):
            _say(f"{number}/{len(chosen)} {step.name}: {step.question}")
            results.append(_done(step, folder, ranks, accelerator, args.limit))
    except KeyboardInterrupt:
        _say("interrupted; all of its processes have ended")
        if results:
            say(report.table(results))
        return INTERRUPTED
    say(report.table(results))
    if args.json:
        args.json.write_text(json.dumps(report.as_json(results, about), indent=2), encoding="utf-8")
    return report.code(results)


def _done(step: Step, folder: Path, ranks: int, accelerator: str, limit_s: float) -> Result:
    """Run a step in its own process, then end all processes that it started."""
    own = folder / step.name
    own.mkdir()
    now = own / "now"
    call = "import sys; from tools.acceptance.bench import do_step; do_step(*sys.argv[1:])"
    command = [sys.executable, "-c", call, step.where, str(own)]
    command += [str(ranks), accelerator, str(limit_s)]
    began = said_at = time.monotonic()

    def progress() -> None:
        nonlocal said_at
        if time.monotonic() > said_at + _SAY_EVERY_S:
            said_at = time.monotonic()
            what = readable(now.read_text(errors="replace")) if now.exists() else "starting"
            _say(f"    {said_at - began:3.0f} of at most {limit_s:.0f} s: {what}")

    env = {"DS_ACCELERATOR": accelerator}
    env["PYTHONPATH"] = python_path(os.environ.get("PYTHONPATH"))
    before_s = _cpu_s()
    with started(command, None, REPOSITORY, own, env) as group:
        ended = group.wait(limit_s, progress)
    (code,), (seconds,), (log,) = ended.codes, ended.seconds, group.logs
    cpu_s = _cpu_s() - before_s
    if code == 0:
        return report.read_result(own / "result.json", step.name, seconds, cpu_s, log)
    at = readable(now.read_text(errors="replace")) if now.exists() else "its start"
    why = f"it took longer than {limit_s:.0f} s and was stopped, at: {at}"
    if code is not None:
        why = f"it ended with code {code}, at: {at}: {ended.last_line}"
    return Result(step.name, seconds, problem=why, cpu_s=cpu_s, log=str(log))


def _cpu_s() -> float:
    """Return the processor seconds of the processes that have been waited for."""
    times = os.times()
    return times.children_user + times.children_system


def _parser(steps: Sequence[Step]) -> argparse.ArgumentParser:
    listed = "\n".join(f"  {step.name:13} {step.question}" for step in steps)
    parser, add = command_parser(f"{__doc__}{listed}")
    add("--only", nargs="+", metavar="STEP", help="Run only these steps.")
    add(
        "--ranks",
        type=int,
        help="Number of ranks (default: all GPUs of this node, 2 to 8 with --share).",
    )
    add("--share", action="store_true", help="Let ranks share a GPU: up to 8 ranks on one card.")
    add("--json", type=Path, metavar="FILE", help="Write the results to this file, as JSON.")
    limit = "Time limit per step (default: %(default).0f)."
    add("--limit", type=float, metavar="SECONDS", default=LIMIT_S, help=limit)
    return parser


def _say(text: str) -> None:
    say(text, sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, as_ctrl_c)
    sys.exit(main(sys.argv[1:]))
