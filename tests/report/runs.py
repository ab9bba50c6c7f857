"""Run folders as a run leaves them, written without a run."""

import json
import math
from pathlib import Path
from typing import Any

from tests.tables import beside

BEGIN_S = 1_790_000_000


def line_at(step: int, attempt: int = 1, **changes: Any) -> dict[str, Any]:
    """Return a metrics line, with keys in the order in which a run writes them."""
    line: dict[str, Any] = {
        "attempt": attempt,
        "unix_time_s": BEGIN_S + 0.5 * step,
        "step": step,
        "samples": 8 * step,
        "tokens": 1024 * step,
        "loss_scale": 1.0,
        "skipped_steps": 0,
        "learning_rate": 3e-4,
        "peak_allocated_gib": None,
        "loss": 2 + 7 * math.exp(-step / 40) + 0.01 * math.sin(step),
        "grad_norm": 0.5 + 0.1 * math.cos(step),
        "step_time_s": 0.5,
        "tokens_per_s": 2048.0,
        "mfu": 0.4,
    }
    return line | changes


def plan(**optim: Any) -> dict[str, Any]:
    """Return the part of plan.json that a page shows."""
    content = beside(__file__, "runs.toml")["plan"]
    content["run"]["optim"] |= optim
    return content


def write_run(
    folder: Path,
    lines: list[dict[str, Any]] | None = None,
    events: list[dict[str, Any]] | None = None,
    the_plan: dict[str, Any] | None = None,
    **status: Any,
) -> Path:
    """Write a run of 200 steps that is done, except for the given changes."""
    folder.mkdir(parents=True)
    if lines is None:
        lines = [line_at(step) for step in range(1, 201)]
        for line in lines[49::50]:
            line["eval_loss"] = line["loss"] + 0.1
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "plan.json").write_text(json.dumps(plan() if the_plan is None else the_plan))
    end = {"outcome": "done", "code": 0, "step": 200, "attempt": 1, "message": None}
    end |= {"time": "2026-09-21T14:15:00.000+00:00", **status}
    (folder / "status.json").write_text(json.dumps(end))
    (folder / "events.jsonl").write_text(
        "".join(json.dumps({"time": end["time"], "attempt": 1, **e}) + "\n" for e in events or [])
    )
    return folder
