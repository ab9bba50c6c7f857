"""Speed: a ladder of a Llama of four layers; the loss is the same on every rung."""

from __future__ import annotations

import math
from typing import Any

from tools.acceptance.bench import Bench, Failed, Skipped, expect
from tools.benchmark_gpu import losses_apart
from tools.proofs.ranks import REPOSITORY
from tools.speed.cases import Case
from tools.speed.launch import measured

_ON_GPUS = {
    "model.name": "llama-1b",
    "model.overrides.num_hidden_layers": "4",
    "data.seq_len": "4096",
    "train.micro_batch": "1",
}
_RUNGS = {"cuda": ("sdpa", "flash", "fused optimizer", "compile"), "cpu": ("eager", "sdpa")}
_STEPS = {"cuda": (3, 12), "cpu": (1, 2)}


def look(bench: Bench) -> str:
    """Climb as far as this machine goes; a rung that does not hold is left out of the next."""
    warmup, steps = _STEPS[bench.accelerator]
    settings = {"train.micro_batch": "1"}
    settings |= dict(text.split("=", 1) for text in bench.settings)
    settings.pop("train.global_batch")
    settings |= _ON_GPUS if bench.on_cuda else {}
    case = Case("base", settings)
    json_path = REPOSITORY / "ds_configs" / "zero1.json"
    lines: list[dict[str, Any]] = []

    def climbed(rung: str) -> str:
        nonlocal case
        tried = case.on_top(rung)
        line = measured(tried, json_path, bench.ranks, warmup, steps)
        bench.values[rung] = line
        if refusal := line.get("refused"):
            raise Skipped(refusal)
        if "step_time_s" not in line:
            raise Failed(line.get("error", "nothing was measured"))
        apart = losses_apart(line, lines[0] if lines else {})
        expect(apart is None, str(apart))
        case = Case(case.name, tried.settings)
        lines.append(line)
        return _rates(line)

    for rung in _RUNGS[bench.accelerator]:
        bench.check(rung, lambda rung=rung: climbed(rung))
    bench.not_on_cpu("the rungs above, MFU and host waits")
    best = max(lines, key=lambda line: float(line["tokens_per_s_per_gpu"]), default=None)
    return _rates(best) if best else ""


def _rates(line: dict[str, Any]) -> str:
    links, mfu = line.get("all_reduce_gb_per_s"), line.get("mfu")
    parts = [f"{line['tokens_per_s_per_gpu']:,.0f} tokens/s a rank"]
    parts += [f"MFU {mfu:.1%}"] if mfu and math.isfinite(mfu) else []
    parts += [f"all-reduce {links:.2f} GB/s"] if links else []
    return ", ".join(parts)
