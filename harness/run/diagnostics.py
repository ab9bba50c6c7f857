"""Records diagnostics of a run: the classes in use, memory, step time, and out-of-memory errors."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import torch

from harness.checkpoint.collectives import gather_objects
from harness.estimate.fit import changes_that_help, memory_line
from harness.plan.make import takes
from harness.run.run import Run


def record_engine(run: Run) -> None:
    """Record the classes used on each rank and its number of parameter elements. Collective."""
    ranks = gather_objects(run.engine.describe())
    run.event("engine", step=run.state.step, ranks=ranks)


def record_memory(run: Run) -> None:
    """Record predicted and measured memory of each rank once compared; show the rank that is
    furthest off.

    Collective.
    """
    compared, run.memory.compared = run.memory.compared, []
    if not compared:
        return
    ranks = gather_objects(compared)
    if ranks:  # on rank 0, which writes
        rows = [{"rank": n, **asdict(row)} for n, rows in enumerate(ranks) for row in rows]
        run.event("memory", step=run.state.step, unit="bytes", rows=rows)
        worst = max(ranks, key=lambda rows: max(abs(row.predicted - row.measured) for row in rows))
        run.progress.say(f"memory         {'; '.join(map(str, worst))}")
    run.meter.restart()


def record_time(run: Run, line: dict[str, Any]) -> None:
    """Record predicted and measured step time, at the second metrics line of this process."""
    run.clock.count_line()
    if run.clock.compares and run.clock.predicted is not None:
        measured, predicted = line["step_time_s"], run.clock.predicted
        data_s = line["data_wait_share"] * measured
        text = run.clock.text(measured, data_s)
        run.event(
            "time",
            step=run.state.step,
            measured_s=measured,
            data_s=data_s,
            predicted=predicted.to_json(),
            message=text,
        )
        run.progress.say(f"time           {text}")


def explain_out_of_memory(run: Run) -> None:
    """Report the estimate, the memory in use and changes that help, on the rank that ran out."""
    estimate, device = run.plan.estimate, run.engine.device
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
    rank = run.plan.world.rank
    place = run.plan.grid.described(rank)
    lines = [f"rank {rank}{place} ran out of memory after step {run.state.step}"]
    if estimate is not None:
        lines += [
            f"expected: {memory_line(estimate)}",
            changes_that_help(estimate, total, takes(run.plan)),
        ]
    run.folder.append_failure(
        run.plan.world.rank, "out_of_memory", step=run.state.step, message="; ".join(lines)
    )
    if total is not None:  # kilobytes, too long for an event
        lines.insert(1, torch.cuda.memory_summary(device, abbreviated=True))
    print(*lines, sep="\n", file=sys.stderr, flush=True)
