"""What DeepSpeed can say of a step: the log of its communication, the profile of its FLOPs."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from torch import nn

from harness.data.batches import Batch
from harness.engine import quirks


@contextlib.contextmanager
def communication_log(path: Path | None) -> Iterator[None]:
    """Within this, DeepSpeed logs every collective of this rank; the table goes to `path` then.

    The host waits for the device after each, which is why not every step is logged. Nothing is done
    without a path.
    """
    if path is None:
        yield
        return
    log = comm.comm.comms_logger
    given = {**vars(log)}  # by the JSON's comms_logger
    log.comms_dict = {}
    comm.configure(enabled=True, prof_all=False, prof_ops=quirks.LOGGED_COLLECTIVES, verbose=False)
    try:
        with quirks.latencies_by_call():
            yield
        with contextlib.redirect_stdout(io.StringIO()) as text:
            log.log_all()
        path.write_text(text.getvalue(), encoding="utf-8")
    finally:
        vars(log).update(given)


def uncompiled(compiled: bool) -> contextlib.AbstractContextManager[Any]:
    """Within this, compiled layers run as they are written."""
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def flops_profile(engine: Any, held: nn.Module, batch: Batch, path: Path | None) -> int:
    """Forward one micro-batch, which changes nothing; write DeepSpeed's profile of it to `path`.

    Returns the floating-point operations of the modules `held` on this rank as DeepSpeed counts
    them, 0 without a path. Collective. The JSON's `flops_profiler` counts the same, but waits for
    the device several times in every step of the run.
    """
    if path is None:
        engine.eval_batch([batch])
        return 0
    profiler = FlopsProfiler(held, engine.engine)
    # Compiled layers do not call what the profiler counts.
    with uncompiled(engine.plan.run.model.compile), quirks.linear_counted_once():
        profiler.start_profile()
        try:
            engine.eval_batch([batch])
            flops = int(profiler.get_total_flops())
            step = engine.engine.global_steps
            profiler.print_model_profile(profile_step=step, output_file=str(path))
        finally:
            profiler.end_profile()
    return flops
