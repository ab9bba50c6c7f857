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
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.command import DEFAULT_DS_JSON, Command, plan_from
from harness.ds_config import literal, read_ds_json
from harness.errors import ConfigError, ExitCode
from harness.estimate import estimate
from harness.plan import Plan
from harness.planning.hardware import find_gpu
from harness.planning.memory.activations import saved_for_backward
from harness.planning.memory.inputs import GIB
from harness.planning.memory.timeline import Estimate
from harness.planning.world import World
from tools.memory.sweep import read_sweep, sweep, sweep_text
from tools.memory.text import describe, paper_text

# Flag -> the key that it is another name for.
ALIASES = {
    "model": "model.name",
    "micro-batch": "train.micro_batch",
    "seq-len": "data.seq_len",
    "accumulation": "ds.gradient_accumulation_steps",
    "checkpointing": "model.checkpointing",
}
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def main(argv: list[str]) -> int:
    """argv -> text or JSON on standard output -> exit code."""
    args = _parser().parse_intermixed_args(argv)
    try:
        plan = _plan(args)
        found = _estimate(plan)
        ranges = read_sweep(args.sweep)
    except ValueError as error:
        print(f"cannot estimate: {error}", file=sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    points = sweep(found, ranges)
    traced = _traced(plan, found) if args.trace else {}
    if args.accounting == "paper":
        print(paper_text(found))
    elif args.json:
        swept = {"sweep": [point.to_json() for point in points]} if args.sweep else {}
        print(json.dumps({**found.to_json(), **swept, **traced}, indent=2))
    else:
        print(describe(found))
        for name, size in traced.items():
            print(f"{name}: {size:.3f}")
        if args.sweep:
            print(f"\n{sweep_text(points)}")
    if args.plot:
        from tools.memory.plot import svg

        args.plot.write_text(svg(found), encoding="utf-8")
        print(f"wrote {args.plot}", file=sys.stderr)
    return int(ExitCode.DONE)


def _plan(args: argparse.Namespace) -> Plan:
    problems = []
    if args.gpu is not None:
        try:
            find_gpu(args.gpu)
        except ValueError as error:
            problems.append(f"--gpu: {error}")
    for name in ("gpus", "gpus_per_node"):
        size = getattr(args, name)
        if size is not None and size < 1:
            problems.append(f"--{name.replace('_', '-')} is {size}: it must be at least 1")
    if args.plot and args.plot.suffix != ".svg":
        problems.append(f"--plot {args.plot}: only .svg is written; convert it for other formats")
    if problems:
        raise ConfigError(problems)
    per_node = args.gpus_per_node or min(args.gpus, 8)
    world = World(
        world_size=args.gpus,
        local_world_size=min(per_node, args.gpus),
        accelerator="cuda",
        gpu=args.gpu,
    )
    command = Command(
        deepspeed_path=args.deepspeed, config_path=args.config, assignments=_assignments(args)
    )
    return plan_from(command, world=world)


def _estimate(plan: Plan) -> Estimate:
    found = estimate(plan)
    if found is None:
        raise ConfigError(
            f"{plan.model_source}: its tensors are not known here, so nothing can be counted"
        )
    return found


def _traced(plan: Plan, found: Estimate) -> dict[str, float]:
    """What the model's own class saves for backward, beside what was counted; needs torch."""
    from tools.memory.trace import traced_saved

    saved = traced_saved(plan.model_config, found.inputs, plan.model_source)
    return {
        "traced_saved_gib": round(saved / GIB, 4),
        "counted_saved_gib": round(saved_for_backward(found.inputs) / GIB, 4),
    }


def _assignments(args: argparse.Namespace) -> tuple[str, ...]:
    """key=value of the flags, then those given; one sample at a time where nothing is said."""
    given = [
        f"{key}={value}"
        for flag, key in ALIASES.items()
        if (value := getattr(args, flag.replace("-", "_"))) is not None
    ] + args.assignments
    keys = {text.partition("=")[0] for text in given}
    ds = read_ds_json(args.deepspeed)
    says_batch = args.config or "train.global_batch" in keys
    if not says_batch and not any(literal(ds, key) is not None for key in _BATCH_KEYS):
        for key in ("train.micro_batch", "ds.gradient_accumulation_steps"):
            if key not in keys:
                given.append(f"{key}=1")
    return tuple(given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="preset, config.json, folder or hub id")
    parser.add_argument("--deepspeed", type=Path, default=DEFAULT_DS_JSON, metavar="JSON")
    parser.add_argument("--config", type=Path, metavar="TOML", help="a run config")
    parser.add_argument("--gpus", type=int, default=1, help="of the whole job")
    parser.add_argument("--gpus-per-node", type=int, help="default: up to 8")
    parser.add_argument("--gpu", help="a name such as h100-80; without it there is no verdict")
    parser.add_argument("--micro-batch", help="samples a GPU takes at once (default: 1)")
    parser.add_argument("--seq-len", help="tokens of a sample")
    parser.add_argument("--accumulation", help="micro-batches per step (default: 1)")
    parser.add_argument("--checkpointing", choices=("none", "full"))
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
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the phases")
    parser.add_argument(
        "--trace", action="store_true", help="run the model's own class on fake tensors, too"
    )
    parser.add_argument("assignments", nargs="*", metavar="key=value", help="as for train.py")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
