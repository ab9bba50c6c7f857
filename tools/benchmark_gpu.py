"""Time training steps of the real loop on real data, for each setting.

    python tools/benchmark_gpu.py model.name=llama-1b data.seq_len=4096
    python tools/benchmark_gpu.py --deepspeed ds_configs/zero3.json --sweep micro_batch=1,2,4 \\
        --sweep model.checkpointing=none,full model.name=llama-1b data.seq_len=4096
    python tools/benchmark_gpu.py --ladder model.name=llama-1b data.seq_len=4096 train.micro_batch=2

Prints a line of JSON for each case. Each case runs in its own processes: if it runs out of memory
or exceeds --limit seconds, the others continue, and its line shows the memory estimate. Numbers are
medians over four windows of --steps optimizer steps after --warmup, on the corpus of data.path or
the default one. The host waits for the device only between windows; on a GPU, one more step counts
the host's own waits. A step is one micro-batch unless train.global_batch is set.
--ladder starts with eager attention and an unfused optimizer. It adds sdpa, flash attention, the
fused optimizer, Liger's kernels, compiled layers and activation checkpointing, one at a time. It
skips what this machine lacks, with the reason. If the first losses of a rung differ from those of
the lowest rung by more than rounding, `differs` lists them and the exit code is 1.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

from harness.files.paths import option_path
from harness.plan.command import DEFAULT_DS_JSON
from harness.terminal import command_parser
from tools.made_with import machine, versions
from tools.plan_args import JSON_HELP
from tools.speed.cases import LADDER, LIMIT_S, Case, measured, swept
from tools.workers import INTERRUPTED

_COMPARED = 2  # number of first losses to compare: rounding differences grow with every step
FORMULA = (
    "TFLOP/s per GPU = tokens/s per GPU x (6 x active parameters + 12 x sum over layers of q_size "
    "x context); MFU = that / the GPU's dense peak in this precision (arXiv 2204.02311, appendix "
    "B: no halving for the causal mask, nothing recomputed is counted)"
)


def main() -> int:
    """Run the command; return its exit code."""
    args = _arguments()
    base = {"train.micro_batch": "1"}
    if words := [text for text in args.assignments if "=" not in text]:
        print(f"{', '.join(words)}: not of the form key=value, as model.name=tiny", file=sys.stderr)
        return 2
    base |= dict(text.split("=", 1) for text in args.assignments)
    print(f"{FORMULA}\n{versions()}; {machine()}", file=sys.stderr)
    try:
        cases = [*swept(base, args.sweep)]
        lines = [*(_climbed(cases, args) if args.ladder else _each(cases, args))]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the lines above are complete", file=sys.stderr)
        return INTERRUPTED
    whole = any("step_time_s" in line for line in lines)
    return 0 if whole and not any("differs" in line for line in lines) else 1


def _each(cases: list[Case], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case.name}", file=sys.stderr, flush=True)
        yield _shown(case.name, _measured(case, args))


def _climbed(cases: list[Case], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the report of each case with each rung; a rung that fails is left out of later
    rungs.
    """
    for case in cases:
        lowest: dict[str, Any] = {}
        for rung in LADDER:
            tried = case.on_top(rung)
            print(f"{case.name}: {rung}", file=sys.stderr, flush=True)
            line = _measured(tried, args)
            why = line.pop("refused", None)
            if why:
                line = {"skipped": why}
            if difference := losses_apart(line, lowest):
                line["differs"] = difference
            lowest = lowest or (line if "losses" in line else {})
            yield _shown(f"{case.name}: {rung}", line)
            if "step_time_s" in line or "out of memory" in line.get("error", ""):
                case = Case(case.name, tried.settings)


def _measured(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    return measured(case, args.deepspeed, args.ranks, args.warmup, args.steps, args.limit)


def losses_apart(line: dict[str, Any], lowest: dict[str, Any]) -> str | None:
    """Return the difference between the first losses of two rungs, which use the same samples and
    weights; None if it is rounding or one of them has no losses.
    """
    from harness.run.verify import TOLERANCES  # imports torch

    pairs = [*zip(line.get("losses", ()), lowest.get("losses", ()), strict=False)][:_COMPARED]
    allowed = TOLERANCES[lowest["precision"]][0] if pairs else 0.0
    if all(math.isclose(ours, theirs, rel_tol=allowed) for ours, theirs in pairs):
        return None
    texts = [f"{ours:.6g}, not {theirs:.6g}" for ours, theirs in pairs]
    return f"losses of the first steps: {'; '.join(texts)} (relative tolerance {allowed:g})"


def _shown(name: str, line: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps({"case": name, **line}), flush=True)
    return line


def _arguments() -> argparse.Namespace:
    parser, add = command_parser(__doc__)
    add("--deepspeed", type=option_path, default=DEFAULT_DS_JSON, metavar="JSON", help=JSON_HELP)
    each = "Values to try for a key; several sweeps give every combination."
    add("--sweep", action="append", default=[], metavar="KEY=V,V", help=each)
    add("--ladder", action="store_true", help="Add one improvement after another.")
    add("--ranks", type=int, default=1, help="Number of GPUs (default: 1).")
    limit = "Time limit per case in seconds (default: %(default)g)."
    add("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help=limit)
    add("--warmup", type=int, default=5, help="Steps before the timed ones (default: 5).")
    add("--steps", type=int, default=20, help="Timed steps (default: 20).")
    add("assignments", nargs="*", metavar="key=value", help="Settings, as for train.py.")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(main())
