"""Memory: runs hold what the estimate says."""

from __future__ import annotations

import math
from typing import Any

from tools.acceptance.bench import Bench, Failed, Skipped, expect

# Of measure_memory.py.
_CPU_CASES = ("zero2-bf16-4", "zero3-bf16_fp32_sums-1")
_JSONS = ("zero1", "zero3", "zero2_offload")
_LAYERS = "model.overrides.num_hidden_layers=4"
_EXACT, _PEAK = 0.01, 0.1
"""Relative errors allowed: of counted tensors, and of the peak of a whole run on a GPU."""


def look(bench: Bench) -> str:
    """Count live tensors on CPU ranks; measure the peaks of whole runs on GPUs."""
    return _on_gpus(bench) if bench.on_cuda else _on_cpu(bench)


def _on_cpu(bench: Bench) -> str:
    errors: dict[str, dict[str, float]] = {name: {} for name in _CPU_CASES}

    def counted() -> str:
        from tests.gates.measure_memory import PEAKS, measure
        from tests.gates.memory.cases import all_cases

        cases = [case for case in all_cases() if case.name in _CPU_CASES]
        if bench.ranks < max(case.ranks for case in cases):
            bench.two_ranks()
        try:
            rows = measure(cases, bench.folder / "memory")
        except SystemExit as ended:
            raise Failed(str(ended).strip().rpartition("\n")[2]) from ended
        for row in rows:
            if row.point not in PEAKS:
                errors[row.case.name][f"{row.point} of rank {row.rank}"] = row.error
        return f"{len(rows)} points"

    def compared(name: str) -> str:
        point = max(errors[name], key=lambda key: abs(errors[name][key]))
        off = abs(errors[name][point])
        expect(off <= _EXACT, f"{point}: predicted {errors[name][point]:+.1%}")
        return f"{len(errors[name])} counts, at most {off:.2%} off"

    bench.check("live tensors", counted)
    for name in filter(errors.get, errors):
        bench.check(name, lambda name=name: compared(name))
    bench.not_on_cpu("allocated, reserved and pinned memory")
    bench.values["errors"] = errors
    worst = max((abs(e) for of_case in errors.values() for e in of_case.values()), default=None)
    return "" if worst is None else f"estimate at most {worst:.2%} off"


def _on_gpus(bench: Bench) -> str:
    from tests.gates.memory.gpu import GpuCase, error_of, measure_gpu

    worst, reserved = [0.0], [0.0]

    def measured(case: GpuCase) -> str:
        row: dict[str, Any]
        (row,) = measure_gpu([case], bench.folder / "memory", bench.ranks)
        bench.values[case.name] = row
        if refusal := row.get("refused"):
            raise Skipped(refusal)
        error = error_of(row)
        if error is None:
            raise Failed(row.get("error", "nothing was measured"))
        worst[0] = max(worst[0], abs(error))
        ratio = row["peak_reserved_gib"] / row["peak_allocated_gib"]
        reserved[0] = max(reserved[0], ratio)
        text = (
            f"allocated {row['peak_allocated_gib']:.2f} GiB, predicted {error:+.1%}; reserved "
            f"{row['peak_reserved_gib']:.2f}, process {row['peak_process_gib']:.2f}"
        )
        expect(math.isfinite(error) and abs(error) <= _PEAK, text)
        return text

    cases = {name: GpuCase("llama-1b", name, 2048, 1, (_LAYERS,)) for name in _JSONS}
    recomputed = (_LAYERS, "model.checkpointing=full")
    cases["zero1, 8,192 tokens"] = GpuCase("llama-1b", "zero1", 8192, 1, recomputed)
    for name, case in cases.items():
        bench.check(name, lambda case=case: measured(case))
    return f"estimate at most {worst[0]:.1%} off; reserved up to {reserved[0]:.2f} x allocated"
