"""How much memory a run will need, before a GPU is booked.

    python tools/estimate_memory.py --model llama-3-8b --deepspeed ds_configs/zero3.json \\
        --gpus 64 --gpus-per-node 8 --gpu h100-80 --seq-len 4096
    python tools/estimate_memory.py --model gpt2-124m --gpus 1 --gpu a100-40 --json
    python tools/estimate_memory.py --model qwen3-8b --gpus 8 --gpu a100-80 \\
        --sweep micro_batch=1..8 seq_len=2048..32768 --plot memory.svg

The numbers are those of the plan that train.py would make from the same arguments. Exit code 0,
or 2 for arguments that cannot be planned. Needs neither a GPU nor (but for --trace) torch.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.config.batch import MAX_DEFAULT_MICRO_BATCH
from harness.errors import ConfigError, ExitCode
from harness.estimate.activations import saved_for_backward
from harness.estimate.inputs import GIB
from harness.estimate.timeline import Estimate
from harness.plan.memory import estimate
from harness.plan.plan import NOT_TRAINED, Plan
from tools.figure import write_plot
from tools.memory.sweep import read_sweep, sweep, sweep_text
from tools.memory.text import describe, paper_text
from tools.plan_args import add_plan_arguments, assumed_batch, plan_of


def main(argv: list[str]) -> int:
    """argv -> text or JSON on standard output -> exit code."""
    args = _parser().parse_intermixed_args(argv)
    try:
        plan = plan_of(args, estimating=True)
        memory = _estimate(plan, args.trace)
        points = sweep(memory, read_sweep(args.sweep))
    except ValueError as error:
        print(f"cannot estimate: {error}", file=sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    traced = _traced(plan, memory) if args.trace else {}
    if args.accounting == "paper":
        print(paper_text(memory))
    elif args.json:
        swept = {"sweep": [point.to_json() for point in points]} if args.sweep else {}
        memory_json = {**memory.to_json(), "not_trained": _not_trained(plan)}
        print(json.dumps({**memory_json, **swept, **traced}, indent=2))
    else:
        print(describe(memory))
    if not args.json:
        _add_notes(args, plan, traced)
        if args.sweep:
            print(f"\n{sweep_text(points)}")
    if args.plot:
        from tools.memory.plot import drawn

        write_plot(args.plot, drawn(memory))
    return int(ExitCode.DONE)


def _add_notes(args: argparse.Namespace, plan: Plan, traced: dict[str, float]) -> None:
    """Print notes on the estimate."""
    if "train.micro_batch" in assumed_batch(args):
        print(
            "One sample at a time was assumed (--micro-batch): train.py takes up to "
            f"{MAX_DEFAULT_MICRO_BATCH} at once,\nunless train.micro_batch says otherwise."
        )
    for message in _not_trained(plan):
        print(f"train.py would refuse this: {message}")
    for name, size in traced.items():
        print(f"{name}: {size:.3f}")


def _not_trained(plan: Plan) -> list[str]:
    return [event["message"] for event in plan.events if event["kind"] == NOT_TRAINED]


def _estimate(plan: Plan, trace: bool) -> Estimate:
    memory = estimate(plan)
    if memory is not None:
        return memory
    if not trace:
        raise ConfigError(
            f"{plan.model_source}: its tensors are not known here; --trace builds its class empty "
            "and counts them (needs torch)"
        )
    from tools.memory.unknown import traced_estimate

    return traced_estimate(plan)


def _traced(plan: Plan, memory: Estimate) -> dict[str, float]:
    """Return the bytes that the model's own class saves for backward, and the counted ones.

    Both are of the whole model. Needs torch.
    """
    from tools.memory.trace import traced_saved

    whole = replace(memory.inputs, grid=replace(memory.inputs.grid, tensor=1, sequence=1))
    saved = traced_saved(plan.model_config, whole, plan.model_source)
    return {
        "traced_saved_gib": round(saved / GIB, 4),
        "counted_saved_gib": round(saved_for_backward(whole) / GIB, 4),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_plan_arguments(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable, sizes in GiB")
    parser.add_argument(
        "--accounting",
        choices=("deepspeed", "paper"),
        default="deepspeed",
        help="what DeepSpeed really allocates, or the ZeRO paper's formula",
    )
    parser.add_argument(
        "--sweep", nargs="+", default=[], metavar="NAME=FROM..TO", help="micro_batch, seq_len, gpus"
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="run the model's own class on fake tensors, too; takes any architecture",
    )
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as any command before `| head`
    sys.exit(main(sys.argv[1:]))
