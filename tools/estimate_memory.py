"""Estimate the memory that a run needs before you book a GPU.

    python tools/estimate_memory.py --model llama-3-8b --deepspeed ds_configs/zero3.json \\
        --gpus 64 --gpus-per-node 8 --gpu h100-80 --seq-len 4096
    python tools/estimate_memory.py --model gpt2-124m --gpus 1 --gpu a100-40 --json
    python tools/estimate_memory.py --model qwen3-8b --gpus 8 --gpu a100-80 \\
        --sweep micro_batch=1..8 seq_len=2048..32768 --plot memory.svg

The numbers come from the plan that train.py would make from the same arguments. Exit code 0, 3 if
it does not fit, 2 for arguments that cannot be planned. Needs no GPU; needs torch only for --trace
and for architectures that have to be traced.
"""

import argparse
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode
from harness.estimate.activations import saved_for_backward
from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import GIB
from harness.estimate.timeline import Estimate
from harness.plan.duration import step_line, step_time
from harness.plan.make import takes
from harness.plan.memory import Untraceable, traced_inputs
from harness.plan.plan import NOT_TRAINED, Plan
from harness.terminal import columns, command_parser, say
from tools.figure import plot_problems, titles, write_plot
from tools.memory.sweep import read_sweep, sweep, sweep_text
from tools.memory.text import describe
from tools.plan_args import add_plan_arguments, assumed_batch, plan_of


def main(argv: list[str]) -> int:
    """Run the command: argv -> text or JSON on standard output -> exit code."""
    args = make_parser().parse_intermixed_args(argv)
    try:
        plan = plan_of(args, estimating=True, problems=plot_problems(args.plot))
        memory = _estimate(plan)
        points = sweep(memory, read_sweep(args.sweep))
    except ValueError as error:
        say(f"cannot estimate: {error}", sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    traced = _traced(plan, memory) if args.trace else {}
    on_host, step = _on_host(memory, args.host_memory), step_time(plan)
    rejections = [event["message"] for event in plan.events if event["kind"] == NOT_TRAINED]
    if args.json:
        whole = {**memory.to_json(), "not_trained": rejections, **on_host}
        whole["time"] = step and step.to_json()
        swept = {"sweep": [point.to_json() for point in points]} if args.sweep else {}
        print(json.dumps({**whole, **swept, **traced}, indent=2))
    else:
        say(describe(memory, columns(sys.stdout), takes(plan)))
        if on_host:
            sizes = f"{memory.host_bytes_per_node / GIB:,.2f} of {args.host_memory:,.2f} GiB"
            say(f"Host memory per node: {on_host['host_verdict']}: {sizes}")
        if "train.micro_batch" in assumed_batch(args):
            say(
                "One sample at a time was assumed (--micro-batch): train.py takes as many as fit, "
                "unless train.micro_batch says otherwise."
            )
        for message in rejections:
            say(f"train.py would reject this: {message}")
        for name, size in traced.items():
            print(f"{name}: {size:.3f}")
        if step:
            say(f"Time: {step_line(step)}: docs/planner.md")
        if args.sweep:
            say(f"\n{sweep_text(points)}")
    if args.plot:
        from tools.memory import plot

        if points:
            figure = plot.sweep_drawn(points, *titles(plan, batch=False))
        else:
            figure = plot.estimate_drawn(memory, *titles(plan))
        write_plot(args.plot, figure)
    verdicts = memory.verdict, on_host.get("host_verdict")
    return int(ExitCode.DOES_NOT_FIT if "does not fit" in verdicts else ExitCode.DONE)


def _on_host(memory: Estimate, host_gib: float | None) -> dict[str, Any]:
    """Return a node's host memory and the verdict on it; empty if its size was not given."""
    if host_gib is None:
        return {}
    fits = memory.host_bytes_per_node <= host_gib * GIB
    return {"host_memory_gib": host_gib, "host_verdict": "fits" if fits else "does not fit"}


def _estimate(plan: Plan) -> Estimate:
    if plan.estimate is not None:
        return plan.estimate
    try:
        traced_inputs(plan)
    except Untraceable as error:
        raise ConfigError(f"{plan.model_source}: its tensors are unknown: {error}") from None
    raise AssertionError("it was traced this time")


def _traced(plan: Plan, memory: Estimate) -> dict[str, float]:
    """Return the bytes saved for backward, in GiB: as traced in the model's own class, and as
    counted.

    Both are for the whole model. Needs torch.
    """
    whole = replace(memory.inputs, grid=replace(memory.inputs.grid, tensor=1, sequence=1))
    saved = traced_saved(plan.model_config, whole, plan.model_source)
    return {
        "traced_saved_gib": round(saved / GIB, 4),
        "counted_saved_gib": round(saved_for_backward(whole) / GIB, 4),
    }


def traced_saved(config: dict[str, Any], inputs: Inputs, source: str | None = None) -> int:
    """Return the bytes that the model saves for backward, tracing each kind of layer; needs
    torch.
    """
    from harness.models.chunked_loss import ChunkedLoss, operations_on_logits
    from harness.models.layer_changes import tile_mlps
    from harness.models.loss import PLAIN, LossSetup
    from harness.models.recompute import checkpoint_layers
    from harness.models.tracing import Request, trace

    def as_the_run_does(model: Any) -> LossSetup:
        checkpoint_layers(model, inputs.checkpointing, inputs.activation_offload)
        if inputs.mlp_tiles > 1:
            tile_mlps(model, inputs.mlp_tiles)
        if not inputs.chunk:
            return PLAIN
        return LossSetup(None, ChunkedLoss(model, inputs.chunk, operations_on_logits(model)))

    batch = inputs.micro_batch, inputs.seq_len
    request = Request(config, source, inputs.precision, inputs.attention, *batch)
    return trace(request, as_the_run_does).bytes


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser, add = command_parser(__doc__)
    add_plan_arguments(parser)
    host = "Host memory per node in GiB, for a verdict on it."
    add("--host-memory", type=float, metavar="GIB", help=host)
    add("--json", action="store_true", help="Print machine-readable JSON, sizes in GiB.")
    add("--plot", type=Path, metavar="FILE.svg|.png", help="Also draw the result.")
    ranges = "Estimate a range of micro_batch, seq_len or gpus, or of several."
    add("--sweep", nargs="+", default=[], metavar="NAME=FROM..TO", help=ranges)
    traced = "Also run the model's own class on fake tensors and print what it saves."
    add("--trace", action="store_true", help=traced)
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other commands do before `| head`
    sys.exit(main(sys.argv[1:]))
