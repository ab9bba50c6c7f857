"""Speed: a ladder of a Llama of four layers; the loss is the same on every rung."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from harness.launch.ranks import REPOSITORY
from tools.acceptance.bench import Bench, Failed, Skipped, expect
from tools.benchmark_gpu import losses_apart
from tools.speed.cases import Case, measured

_ON_GPUS = {
    "model.name": "llama-1b",
    "model.overrides.num_hidden_layers": "4",
    "data.seq_len": "4096",
    "train.micro_batch": "1",
}
_RUNGS = {
    "cuda": ("sdpa", "flash", "fused optimizer", "liger", "compile"),
    "cpu": ("eager", "sdpa"),
}


@dataclass(frozen=True)
class Beside:
    """A change that is measured on top of the highest rung, and not kept."""

    settings: dict[str, str] = field(default_factory=dict)
    json: str = "zero1"
    env: dict[str, str] = field(default_factory=dict)


BESIDE = {
    "with DeepSpeed's timers": Beside({"ds.timers.throughput.enabled": "true"}),
    "without expandable segments": Beside(env={"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
    "ZeRO 3": Beside(json="zero3"),
}
_STEPS = {"cuda": (3, 12), "cpu": (1, 2)}


def look(bench: Bench) -> str:
    """Climb as far as this machine goes; a rung that does not hold is left out of the next."""
    warmup, steps = _STEPS[bench.accelerator]
    settings = {"train.micro_batch": "1"}
    settings |= dict(text.split("=", 1) for text in bench.settings)
    settings.pop("train.global_batch")
    settings |= _ON_GPUS if bench.on_cuda else {}
    case = Case("base", settings)
    lines: list[dict[str, Any]] = []
    spent: list[float] = []

    def taken(name: str, tried: Case, beside: Beside) -> str:
        """Measure a case, and compare its losses with the lowest rung's."""
        began = time.monotonic()
        bench.time_for(max(spent, default=0.0))
        how = REPOSITORY / "ds_configs" / f"{beside.json}.json"
        line = measured(tried, how, bench.ranks, warmup, steps, env=beside.env)
        spent.append(time.monotonic() - began)
        bench.values[name] = line
        if refusal := line.get("refused"):
            raise Skipped(refusal)
        if "step_time_s" not in line:
            raise Failed(line.get("error", "nothing was measured"))
        apart = losses_apart(line, lines[0] if lines else {})
        expect(apart is None, str(apart))
        lines.append(line)
        return _rates(line)

    def climbed(rung: str) -> str:
        nonlocal case
        rates = taken(rung, case.on_top(rung), Beside())
        case = case.on_top(rung)
        return rates

    for rung in _RUNGS[bench.accelerator]:
        bench.check(rung, lambda rung=rung: climbed(rung))
    for name, beside in BESIDE.items():
        if bench.on_cuda:
            tried = Case(name, {**case.settings, **beside.settings})
            bench.check(name, lambda name=name, tried=tried, b=beside: taken(name, tried, b))
        bench.not_on_cpu(name)
    for rung in _RUNGS["cuda"]:
        if rung not in _RUNGS[bench.accelerator]:
            bench.not_on_cpu(rung)
    bench.not_on_cpu("MFU and host waits")
    best = max(lines, key=lambda line: float(line["tokens_per_s_per_gpu"]), default=None)
    return _rates(best) if best else ""


def _rates(line: dict[str, Any]) -> str:
    links, mfu = line.get("all_reduce_gb_per_s"), line.get("mfu")
    parts = [f"{line['tokens_per_s_per_gpu']:,.0f} tokens/s a rank"]
    parts += [f"MFU {mfu:.1%}"] if mfu and math.isfinite(mfu) else []
    parts += [f"all-reduce {links:.2f} GB/s"] if links else []
    return ", ".join(parts)
