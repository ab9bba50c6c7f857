"""Measured steps. Waits: the host waits for the device only where DeepSpeed makes it. Memory: runs
use what the estimate says. Speed: a ladder of settings for a Llama of four layers, whose loss must
stay the same.
"""

import math
import re
import time
from typing import Any

from harness.launch.ranks import REPOSITORY
from tools.acceptance.bench import Bench, Failed, Skipped, expect
from tools.benchmark_gpu import losses_apart
from tools.speed.cases import Case, measured

DS_CONFIGS = REPOSITORY / "ds_configs"
_FOUR_LAYERS = {
    "model.name": "llama-1b",
    "model.overrides.num_hidden_layers": "4",
    "train.micro_batch": "1",
}
"""The model on GPUs."""

# --- waits ---

_JSONS = ("zero1", "zero2", "zero3")
_SIMULATED = ("zero1", "zero3")
_OWN = "harness/"
MOST = {"zero1": 2, "zero2": 5, "zero3": 6}
"""Maximum waits of a step with one micro-batch, without RUN_AHEAD, as simulated
(docs/host_waits.md)."""
RUN_AHEAD = (
    "deepspeed/runtime/zero/partition_parameters.py:84",  # this and the next: only on a single rank
    "deepspeed/runtime/zero/partition_parameters.py:114",
    "deepspeed/runtime/zero/partitioned_param_coordinator.py",
    "deepspeed/runtime/zero/stage3.py:1667",
)
"""Waits for finished work by which ZeRO 3 bounds its look-ahead: one for each weight of a model, or
two on a single rank."""


def wait(bench: Bench) -> str:
    """Count the waits of one step for each JSON: on GPUs as torch reports them, else simulated."""
    counts: dict[str, int] = {}
    for name in _JSONS:
        bench.check(name, _counted, bench, name, counts)
    if not bench.on_cuda:
        bench.check("a simulated device", _simulated, bench)
        return str(bench.values.get("simulated", [""])[-1])
    return ", ".join(f"{name} {count} waits per step" for name, count in counts.items())


def _counted(bench: Bench, name: str, counts: dict[str, int]) -> str:
    bench.require_cuda()
    # A log line is the only place where the host should wait.
    case = Case(name, bench.timed_settings("log.every"))
    line = measured(case, DS_CONFIGS / f"{name}.json", bench.ranks, 3, 4)
    if "host_waits" not in line:
        raise Failed(line.get("refused") or line.get("error") or "nothing was measured")
    places = bench.values[name] = line["host_waits"]
    own = [place for place in places if place.startswith(_OWN)]
    expect(not own, f"the harness waits in {', '.join(own)}")
    counts[name] = line["host_waits_per_step"]
    text = f"{counts[name]} waits per step: {', '.join(places)}"
    drains = sum(count for place, count in places.items() if not place.startswith(RUN_AHEAD))
    expect(drains <= MOST[name], f"{drains} of them drain the device, not {MOST[name]}: {text}")
    return text


def _simulated(bench: Bench) -> str:
    """Run CPU ranks on a simulated device with streams: races and needless waits fail the check."""
    bench.require_two_ranks()
    code, lines, _ = bench.gate("check_streams", "--cells", *_SIMULATED)
    bench.values["simulated"] = lines
    expect(code == 0, f"it ended with code {code}: {'; '.join(lines)}")
    return "; ".join(lines)


# --- memory ---

_CPU_CASES = ("zero2-bf16-4", "zero3-bf16_fp32_sums-1")  # of measure_memory.py, on two ranks
_COUNT = re.compile(r"(\S+) .* rank (\d+) (\S+) .* predicted ([+-]\S+)%")  # a line of its output
_PEAKS = ("accumulate", "apply")  # less exact than counts
_EXACT, _PEAK = 0.01, 0.1
"""Relative errors allowed: of counted tensors, and of the peak of a whole run on a GPU."""
_GPU_CASES = {  # DeepSpeed JSON, tokens, further settings; of a Llama of four layers
    "zero1": ("zero1", 2048, {}),
    "zero3": ("zero3", 2048, {}),
    "zero2_offload": ("zero2_offload", 2048, {}),
    "zero1, 8,192 tokens": ("zero1", 8192, {"model.checkpointing": "full"}),
}
_STEPS_TO_PEAK = 3  # Adam makes its moments in the first; ZeRO 3 knows its order after it


def hold(bench: Bench) -> str:
    """Count live tensors on CPU ranks; measure the peaks of whole runs on GPUs."""
    return _on_gpus(bench) if bench.on_cuda else _on_cpu(bench)


def _on_cpu(bench: Bench) -> str:
    errors: dict[str, dict[str, float]] = {name: {} for name in _CPU_CASES}

    def counted() -> str:
        bench.require_two_ranks()
        words = ("--cases", *_CPU_CASES, "--out", str(bench.folder / "memory"))
        _, lines, error = bench.gate("measure_memory", *words)
        for name, rank, point, off in (m.groups() for m in map(_COUNT.match, lines) if m):
            if point not in _PEAKS:
                errors[name][f"{point} of rank {rank}"] = float(off) / 100
        expect(all(errors.values()), error)
        return f"{sum(map(len, errors.values()))} points"

    def compared(name: str) -> str:
        point = max(errors[name], key=lambda key: abs(errors[name][key]))
        off = abs(errors[name][point])
        expect(off <= _EXACT, f"{point}: predicted {errors[name][point]:+.1%}")
        return f"{len(errors[name])} counts, at most {off:.2%} off"

    bench.check("live tensors", counted)
    for name in filter(errors.get, errors):
        bench.check(name, compared, name)
    bench.skip_on_cpu("allocated, reserved and pinned memory")
    bench.values["errors"] = errors
    worst = max((abs(e) for of_case in errors.values() for e in of_case.values()), default=None)
    return "" if worst is None else f"estimate at most {worst:.2%} off"


def _on_gpus(bench: Bench) -> str:
    worst, reserved = [0.0], [0.0]

    def peaks(name: str, json: str, seq_len: int, more: dict[str, str]) -> str:
        settings = {**_FOUR_LAYERS, "data.seq_len": str(seq_len), **more}
        path = DS_CONFIGS / f"{json}.json"
        row = measured(Case(name, settings), path, bench.ranks, 0, _STEPS_TO_PEAK)
        bench.values[name] = row
        if refusal := row.get("refused"):
            raise Skipped(refusal)
        if not row.get("peak_allocated_gib") or not row.get("estimated_gib"):
            raise Failed(row.get("error", "nothing was measured"))
        error = row["estimated_gib"] / row["peak_allocated_gib"] - 1
        worst[0] = max(worst[0], abs(error))
        reserved[0] = max(reserved[0], row["peak_reserved_gib"] / row["peak_allocated_gib"])
        text = (
            f"allocated {row['peak_allocated_gib']:.2f} GiB, predicted {error:+.1%}; reserved "
            f"{row['peak_reserved_gib']:.2f}, process {row['peak_process_gib']:.2f}"
        )
        expect(math.isfinite(error) and abs(error) <= _PEAK, text)
        return text

    for name, case in _GPU_CASES.items():
        bench.check(name, peaks, name, *case)
    return f"estimate at most {worst[0]:.1%} off; reserved up to {reserved[0]:.2f} x allocated"


# --- speed ---

_RUNGS = {
    "cuda": ("sdpa", "flash", "fused optimizer", "liger", "compile"),
    "cpu": ("eager", "sdpa"),
}


BESIDE: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "with DeepSpeed's timers": ("zero1", {"ds.timers.throughput.enabled": "true"}, {}),
    "without expandable segments": (
        *("zero1", {}),
        {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
    ),
    "ZeRO 3": ("zero3", {}, {}),
}
"""Changes that are measured on top of the highest rung, and not kept: DeepSpeed JSON, settings,
environment."""
_STEPS = {"cuda": (3, 12), "cpu": (1, 2)}


def climb(bench: Bench) -> str:
    """Climb as far as this machine goes; a rung that fails is left out of later ones."""
    warmup, steps = _STEPS[bench.accelerator]
    own = {**_FOUR_LAYERS, "data.seq_len": "4096"} if bench.on_cuda else {}
    case = Case("base", {**bench.timed_settings(), **own})
    lines: list[dict[str, Any]] = []
    longest_s = 0.0

    def taken(name: str, tried: Case, json: str, env: dict[str, str]) -> str:
        """Measure a case, and compare its losses with the lowest rung's."""
        nonlocal longest_s
        bench.require_own_gpus()
        began = time.monotonic()
        bench.require_time(longest_s)
        line = measured(tried, DS_CONFIGS / f"{json}.json", bench.ranks, warmup, steps, env=env)
        longest_s = max(longest_s, time.monotonic() - began)
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
        rates = taken(rung, case.on_top(rung), "zero1", {})
        case = case.on_top(rung)
        return rates

    rungs = _RUNGS[bench.accelerator]
    for rung in rungs:
        bench.check(rung, climbed, rung)
    for name, (json, settings, env) in BESIDE.items() if bench.on_cuda else ():
        bench.check(name, taken, name, Case(name, {**case.settings, **settings}), json, env)
    left_out = [rung for rung in _RUNGS["cuda"] if rung not in rungs]
    bench.skip_on_cpu(*BESIDE, *left_out, "MFU and host waits")
    best = max(lines, key=lambda line: float(line["tokens_per_s_per_gpu"]), default=None)
    return _rates(best) if best else ""


def _rates(line: dict[str, Any]) -> str:
    links, mfu = line.get("all_reduce_gb_per_s"), line.get("mfu")
    parts = [f"{line['tokens_per_s_per_gpu']:,.0f} tokens/s per rank"]
    parts += [f"MFU {mfu:.1%}"] if mfu and math.isfinite(mfu) else []
    parts += [f"all-reduce {links:.2f} GB/s"] if links else []
    return ", ".join(parts)
