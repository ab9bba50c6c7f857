"""Find a layout for a job on a cluster, with its time and its cost.

    python tools/plan_cluster.py --model llama-3-8b --gpus 64 --gpu h100-80 --seq-len 8192 \\
        --global-batch 512 --data-tokens 1e12 --price 2.5
    python tools/plan_cluster.py --model llama-3.1-70b --gpus 64 --gpu h100-80 --seq-len 32768 \\
        --global-batch 64 --write plan
    python tools/plan_cluster.py --calibrate runs/first runs/second --rates site.json

The planner counts most layouts that train.py accepts (exceptions: docs/planner.md): ZeRO, offload,
pipeline stages, tensor, sequence and expert parallelism, micro-batch and checkpointing. It
recommends the least risky layout among those that no other beats beyond the error of the estimated
time. --write saves its DeepSpeed JSON, run config and scripts. Needs neither a GPU nor torch. Exit
code 0; 3 if nothing fits, or nothing within --budget; 2 for a job that cannot be planned.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ExitCode
from harness.terminal import command_parser, say
from tools.cluster.ask import question_of
from tools.cluster.calibrate import calibrate
from tools.cluster.choose import Answer, seconds_within, why_not
from tools.cluster.count import Question
from tools.cluster.job import write_job
from tools.cluster.search import answer as answer_to
from tools.cluster.text import describe
from tools.cluster.what_if import what_if
from tools.plan_args import add_kernels


def main(argv: list[str]) -> int:
    """Run the command: argv -> text or JSON on standard output -> exit code."""
    args = make_parser(calibrates="--calibrate" in argv).parse_intermixed_args(argv)
    if args.calibrate:
        return _calibrate(args)
    try:
        question = question_of(args)
        answer = answer_to(args, question)
        best = answer.best
        written = write_job(args.write, args, best) if args.write and best else []
        others = what_if(args, answer) if args.what_if else []
    except ValueError as error:
        say(f"cannot plan: {error}", sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    if args.json:
        print(json.dumps(_json(question, answer, others), indent=2))
    else:
        say(describe(args, question, answer))
        print(*others, *written, sep="\n", end="\n" if others or written else "")
    return int(ExitCode.DONE if best else ExitCode.DOES_NOT_FIT)


def _calibrate(args: argparse.Namespace) -> int:
    try:
        say(calibrate(args.calibrate, args.rates))
    except ValueError as error:
        say(f"cannot calibrate: {error}", sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    return 0


def _json(question: Question, answer: Answer, others: list[str]) -> dict[str, object]:
    rows = []
    for each in answer.counted:
        row = each.to_json(question.job(each), question.price)
        row["step_time_s_within"] = [round(seconds, 4) for seconds in seconds_within(each)]
        rows.append({**row, "why_not": "" if each is answer.best else why_not(each, answer.best)})
    place = {id(each): number for number, each in enumerate(answer.counted)}
    return {
        "layouts": rows,
        "quickest_on_paper": answer.quickest and place[id(answer.quickest)],
        "ways": {way: place[id(each)] for way, each in answer.ways.items()},
        "counted": len(rows),
        "fit": sum(bool(each.fits) for each in answer.counted),
        "undecided": sum(each.fits is None for each in answer.counted),
        "data_tokens": question.data_tokens,
        "evidence": {
            "memory": answer.counted[0].memory.evidence,
            "time": answer.counted[0].time.evidence,
            "evaluation, saves and failures": "guessed",
        },
        **({"what_if": others} if others else {}),
    }


def _tokens(text: str) -> float:
    """Return the number in text such as 15T, 300B or 1e12."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    tokens = float(text[:-1] if scale > 1 else text) * scale
    if not 0 < tokens < 1e18:
        raise ValueError
    return tokens


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e9:
        raise ValueError
    return number


def _count_of(text: str) -> int:
    number = int(text)
    if not 0 < number <= 1 << 20:
        raise ValueError
    return number


_VALUES: dict[str, tuple[Callable[[str], object], str, str]] = {
    "--network": (_positive, "GB/S", "network bandwidth of a node, per GPU"),
    "--host-memory": (_positive, "GIB", "host memory per node (default: 256 per GPU)"),
    "--disk": (_positive, "GB/S", "write bandwidth of checkpoint storage, per node (default: 2)"),
    "--measured": (Path, "JSON", "rates that preflight.py --json measured on nodes of this kind"),
    "--data-tokens": (_tokens, "N", "tokens to train on, as in 15T (default: 20 per parameter)"),
    "--deadline-days": (_positive, "DAYS", "report whether the job meets this deadline"),
    "--price": (_positive, "PRICE", "price per GPU-hour"),
    "--budget": (_positive, "COST", "recommend only what costs no more, failures included"),
    "--lora": (_count_of, "RANK", "train only adapters of this rank"),
    "--write": (Path, "FOLDER", "write the recommended layout to FOLDER, ready to run"),
}
"""Optional arguments with a value: type, its name, and help."""


def make_parser(*, calibrates: bool = False) -> argparse.ArgumentParser:
    """Return the parser of the command line; `calibrates`: with --calibrate, it needs no job."""
    parser, add = command_parser(__doc__)
    job = {"required": not calibrates}
    add("--model", **job, help="preset, config.json, folder or hub id")
    weights = "continue from these weights, a folder or hub id (default: random weights)"
    add("--init-from", metavar="WEIGHTS", help=weights)
    add("--gpus", type=_count_of, **job, help="total number of GPUs")
    add("--gpu", **job, help="GPU type, such as h100-80")
    add_kernels(parser)
    add("--gpus-per-node", type=_count_of, help="GPUs per node (default: up to 8)")
    add("--seq-len", type=_count_of, **job, help="tokens per sample")
    add("--global-batch", type=_count_of, **job, help="samples per step")
    made = "rates that --calibrate RUN... --rates JSON wrote for nodes of this kind"
    add("--rates", type=Path, metavar="JSON", required=calibrates, help=made)
    refit = "instead of planning, refit rates to the metrics of these runs and write --rates"
    add("--calibrate", type=Path, nargs="+", metavar="RUN", help=refit)
    for flag, (kind, value, text) in _VALUES.items():
        add(flag, type=kind, metavar=value, help=text)
    add("--quantize", choices=("nf4", "fp4"), help="4-bit type of the frozen weights, with --lora")
    others = "also plan for other GPU types, sequence lengths and numbers of GPUs"
    add("--what-if", action="store_true", help=others)
    add("--json", action="store_true", help="print every layout as JSON, the recommended one first")
    keys = "settings, also ds.KEY, as for train.py"
    add("assignments", nargs="*", metavar="key=value", help=keys)
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other commands do before `| head`
    sys.exit(main(sys.argv[1:]))
