"""Compares the estimate with the peaks of real runs on this machine's GPUs."""

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.launch.ranks import REPOSITORY
from harness.layout.world import find_accelerator
from tests.tables import beside
from tools.speed.cases import Case, measured

STEPS = 3  # Adam allocates its moments in the first, ZeRO 3 knows its parameter order after it
MEDIAN, WORST = 0.01, 0.03
"""Target errors; the best published estimator has 1.6 % on one GPU and 3.0 % on several."""


@dataclass(frozen=True)
class GpuCase:
    """A run with one micro-batch per step and rank, unless it says otherwise."""

    model: str
    json: str
    seq_len: int
    micro_batch: int
    more: tuple[str, ...] = ()
    """key=value assignments."""

    @property
    def name(self) -> str:
        """Name of the case in tables."""
        words = (self.model, self.json, f"{self.seq_len}x{self.micro_batch}", *self.more)
        return " ".join(words)

    @property
    def settings(self) -> dict[str, str]:
        """Keys of the run config that the case sets."""
        return {
            "model.name": self.model,
            "data.seq_len": str(self.seq_len),
            "train.micro_batch": str(self.micro_batch),
            **dict(text.split("=", 1) for text in self.more),
        }

    @property
    def accumulation(self) -> int:
        """Micro-batches per rank and step."""
        return int(self.settings.get("ds.gradient_accumulation_steps", 1))

    @property
    def deepspeed(self) -> Path:
        """Path of the DeepSpeed JSON."""
        return REPOSITORY / "ds_configs" / f"{self.json}.json"


GPU_CASES = [
    GpuCase(model, json_name, seq_len, micro_batch, tuple(more))
    for model, json_name, seq_len, micro_batch, *more in beside(__file__, "gpu_memory.toml")["runs"]
]


def measure_gpu(cases: Iterable[GpuCase], out: Path, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each case when it is done; cases kept in `out` are not run again."""
    out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        kept = out / f"{case.name.replace(' ', '-')}-{ranks}.json"
        if kept.exists():
            row = json.loads(kept.read_text())
        else:
            batch = case.micro_batch * ranks * case.accumulation
            settings = {"train.global_batch": str(batch), **case.settings}
            row = measured(Case(case.name, settings), case.deepspeed, ranks, 0, STEPS)
            kept.write_text(json.dumps(row))
        yield {"case": case.name, **row}


def error_of(row: dict[str, Any]) -> float | None:
    """Return the relative error, above 0 if too much was estimated; None without a measurement."""
    if not row.get("peak_allocated_gib") or not row.get("estimated_gib"):
        return None
    return float(row["estimated_gib"] / row["peak_allocated_gib"] - 1)


def verdict_of(rows: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return a one-line summary of the rows, and True if it meets the goal."""
    errors = [abs(error) for row in rows if (error := error_of(row)) is not None]
    if not errors:
        return "nothing was measured", False
    broken = [row["case"] for row in rows if is_broken_promise(row)]
    median, worst = statistics.median(errors), max(errors)
    text = (
        f"{len(errors)} of {len(rows)} cases measured: median error {median:.1%} "
        f"(aim {MEDIAN:.0%}), worst {worst:.1%} (aim {WORST:.0%}); judged to fit, but out of "
        f"memory: {', '.join(broken) or 'none'}"
    )
    return text, median <= MEDIAN and worst <= WORST and not broken


def is_broken_promise(row: dict[str, Any]) -> bool:
    """Return True if a run was judged to fit but ran out of memory."""
    return row.get("verdict") == "fits" and "out of memory" in row.get("error", "")


def no_gpu() -> str | None:
    """Return the reason why nothing can be measured here; None if there is a GPU."""
    if find_accelerator() == "cuda":
        return None
    return "--gpu: there is no GPU on this machine; without it CPU ranks are measured"
