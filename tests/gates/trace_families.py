"""Compare the estimated bytes that a family's layers keep with a trace of the whole model.

    python -m tests.gates.trace_families --out build/families --markdown PAGE

Every family has the default size of its transformers class, with one sample of 256 tokens in bf16,
on fake tensors. Rows kept in --out are not traced again; for families that are not requested, the
page keeps its rows. Exit code 0, or 1 if an estimate is more than 3 % off or a family cannot be
estimated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from harness.estimate.activations import saved_for_backward
from harness.estimate.inputs import BY_REFERENCE, WITH_KERNELS, Inputs
from harness.estimate.memory_item import GIB
from harness.layout.shape import num_parameters
from harness.layout.world import STATE_KERNELS, World
from harness.plan.command import Command, plan_from
from harness.plan.plan import Plan
from harness.terminal import HelpFormatter

# fmt: off
FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2",
    "olmo3", "phi", "phi3", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "stablelm", "granite",
    "starcoder2", "cohere", "cohere2", "glm", "glm4", "smollm3", "seed_oss", "ernie4_5",
    "exaone4", "nemotron", "hunyuan_v1_dense", "apertus", "arcee", "gptj", "mixtral",
    "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "deepseek_v2", "deepseek_v3",
    "gpt_oss", "ernie4_5_moe", "minimax", "qwen3_next", "jamba", "mamba", "mamba2", "falcon_h1",
    "bamba", "lfm2"
]
# fmt: on
COMPLETED = {
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "deepseek_v2": {"moe_intermediate_size": 1408, "num_experts_per_tok": 6},
}
"""Keys without which a class cannot be built or run with its own defaults."""
TOLERANCE = 0.03
_TOKENS = 256
_HEAD = """\
# Families: what is kept for the backward pass, beside a trace of the whole model

Every family in the size that its transformers class has by default, one sample of {tokens} tokens
in bf16 with the attention that "auto" chooses, on fake tensors. *Counted* families are those that
the planner knows tensor by tensor; of the others each kind of layer is *traced* once. Those
*through reference code* have kernels of another package on a GPU (`--kernels`), which keep less:
*fused* GiB, what the sources of mamba-ssm, causal-conv1d and flash-linear-attention save. Falcon's
one key head has no fused kernel in torch's attention, on CPUs and GPUs: all scores are kept, in
fp32. Written by
`python -m tests.gates.trace_families --out build/families --markdown PAGE`.

| family | parameters | layers | kinds | way | estimate GiB | whole trace GiB | error | fused |
|---|---:|---:|---:|---|---:|---:|---:|---:|
"""


def main(argv: list[str]) -> int:
    """Run the command: argv -> a line per family, optional table -> exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("families", nargs="*", default=FAMILIES)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [kept_row(name, args.out) for name in args.families]
    if args.markdown:
        args.markdown.write_text(_page(args.markdown, rows), encoding="utf-8")
    off = [row["family"] for row in rows if "error" in row or abs(error_of(row)) > TOLERANCE]
    print(
        f"{len(rows)} families, {len(off)} not within {TOLERANCE:.0%}: {', '.join(off) or 'none'}"
    )
    return 1 if off else 0


def error_of(row: dict[str, Any]) -> float:
    """Return the relative error of the estimate, above 0 if it is too large."""
    return float(row["estimate"] / row["whole"] - 1)


def kept_row(family: str, folder: Path) -> dict[str, Any]:
    """Return the row kept in the folder, or trace the family and keep its row there."""
    path = folder / f"{family}.json"
    if path.exists():
        row: dict[str, Any] = json.loads(path.read_text())
    else:
        began = time.monotonic()
        try:
            row = traced_row(family)
        except Exception as error:  # unknown classes may raise anything
            row = {"family": family, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        row["seconds"] = round(time.monotonic() - began, 1)
        path.write_text(json.dumps(row))
    print(json.dumps(row), flush=True)
    return row


def traced_row(family: str) -> dict[str, Any]:
    """Return a family's estimate and the trace of its whole model, in bytes."""
    from harness.models.tracing import Request, trace_whole

    plan = _plan(family)
    inputs = _inputs(plan)
    attention = plan.config.model.attention  # the resolved value of "auto"
    request = Request(plan.model_config, None, "bf16", attention, 1, _TOKENS)
    row = {
        "family": family,
        "parameters": num_parameters(inputs.shape),
        "layers": inputs.shape.num_layers,
        "kinds": len({*inputs.trace.layers}) if inputs.trace else None,
        "way": inputs.layers_by,
        "estimate": saved_for_backward(inputs),
        "whole": trace_whole(request),
    }
    if inputs.layers_by == BY_REFERENCE:
        fused = _inputs(_plan(family, STATE_KERNELS))
        assert fused.layers_by == WITH_KERNELS
        row["kernels"] = saved_for_backward(fused)
    return row


def _plan(family: str, kernels: tuple[str, ...] = ()) -> Plan:
    """Return the plan of one sample on a GPU node with these packages."""
    from transformers import AutoConfig

    warnings.filterwarnings("ignore")
    world = World(accelerator="cuda", gpu="h100-80", kernels=kernels)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        AutoConfig.for_model(family, **COMPLETED.get(family, {})).save_pretrained(folder)
        (folder / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}}))
        words = (
            *(f"model.name={folder}", f"data.seq_len={_TOKENS}", "train.micro_batch=1"),
            *("train.global_batch=1", "model.loss_chunk=0"),
            "model.dropout=0",
        )
        command = Command(folder / "ds.json", assignments=words)
        plan = plan_from(command, world=world, estimating=True)
        _inputs(plan)  # while its folder exists
        return plan


def _inputs(plan: Plan) -> Inputs:
    """Return the inputs of a plan's estimate, which is computed on first use."""
    assert plan.estimate is not None, "it is not estimated"
    return plan.estimate.inputs


def _page(path: Path, rows: list[dict[str, Any]]) -> str:
    """Return the page with its rows of these families replaced."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = {line.split()[1]: f"{line}\n" for line in before.splitlines() if line[:2] == "| "}
    lines |= {row["family"]: _line(row) for row in rows}
    table = "".join(lines[name] for name in FAMILIES if name in lines)
    return _HEAD.format(tokens=_TOKENS) + table


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['family']} | | | | | | | | {row['error']} |\n"
    cells = (
        *(row["family"], f"{row['parameters']:,}", row["layers"], row["kinds"] or "", row["way"]),
        *(f"{row[key] / GIB:.3f}" for key in ("estimate", "whole")),
        f"{error_of(row):+.2%}",
        f"{row['kernels'] / GIB:.3f}" if "kernels" in row else "",
    )
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
