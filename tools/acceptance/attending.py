"""One rank that computes loss and gradients of one batch by every exact attention implementation.

`python -m tools.acceptance.attending OUT`
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from harness.config.run_config import RunConfig
from harness.data.batch import Batch
from harness.engine.processes import ending_together, join
from harness.errors import ConfigError
from harness.layout.attention_table import ATTENTIONS
from harness.layout.world import World
from harness.plan.make import make_plan
from tests.gates.parity.measure import worst_relative

_SEQ_LEN, _LONG = 256, 8192
_DOCUMENT_TOKENS = 90
_KERNELS = ("flash", "fmha", "attention", "cudnn", "efficient", "varlen", "softmax")


def main(argv: list[str]) -> int:
    """Write a list with an entry for each implementation and mask to OUT."""
    (out,) = argv
    world = World.from_environ()
    with ending_together():
        device = join(world)
        truth: dict[bool, Any] = {}
        rows = []
        exact = [name for name, row in ATTENTIONS.items() if row.is_exact and name != "eager"]
        for attention in ("eager", *exact):
            for documents in (False, True):
                row = {"attention": attention, "documents": documents}
                try:
                    loss, gradients, more = _computed(attention, documents, world, device)
                except (ConfigError, ImportError) as error:
                    rows.append({**row, "refused": str(error)})
                    continue
                except Exception as error:  # of a kernel: the other implementations go on
                    traceback.print_exc()
                    rows.append({**row, "failed": f"{type(error).__name__}: {error}"})
                    continue
                expected = truth.setdefault(documents, (loss, gradients))
                apart = worst_relative(gradients, expected[1])
                row |= {"loss": loss, "expected": expected[0], "gradients_apart": apart, **more}
                rows.append(row)
        Path(out).write_text(json.dumps(rows))
    return 0


def _computed(
    attention: str, documents: bool, world: World, device: torch.device
) -> tuple[float, dict[str, torch.Tensor], dict[str, Any]]:
    """Return the loss, every gradient on the CPU, and on CUDA the kernels and the peak at 8k."""
    engine = _engine(attention, documents, world, device, _SEQ_LEN)
    batch = _batch(_SEQ_LEN, documents)
    loss = float(engine.accumulate([batch], batch.labels.numel()))
    gradients = {name: gradient.cpu() for name, gradient in engine.gradients()}
    engine.apply(0.0)
    more: dict[str, Any] = {"precision": engine.plan.precision}  # of the processor: it is "auto"
    if device.type == "cuda":
        more["kernels"] = _kernels(engine, batch)
        engine.apply(0.0)
    engine.close()
    del engine
    if device.type == "cuda":
        more["peak_gib"] = _peak_gib(attention, documents, world, device)
    return loss, gradients, more


def _engine(
    attention: str, documents: bool, world: World, device: torch.device, seq_len: int
) -> Any:
    from tests.gates.engines import build_engine

    model = {"name": "tiny", "attention": attention}
    longest = {"overrides": {"max_position_embeddings": seq_len}}
    run = RunConfig.model_validate(
        {
            "model": model | longest,
            "data": {"seq_len": seq_len, "document_mask": documents},
            "train": {"global_batch": 1, "micro_batch": 1, "steps": 2},
            "optim": {"warmup_steps": 0},
        }
    )
    stage = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}
    return build_engine(make_plan(run, stage, world), device, document_mask=documents)


def _batch(seq_len: int, documents: bool) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 8192, (1, seq_len + 1), generator=generator)
    positions = torch.arange(seq_len)[None] % _DOCUMENT_TOKENS if documents else None
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions)


def _kernels(engine: Any, batch: Batch) -> list[str]:
    """Return the names of the attention kernels that ran on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.accumulate([batch], batch.labels.numel())
        torch.cuda.synchronize()
    names = {event.key for event in profiler.key_averages()}
    return sorted(n[:120] for n in names if any(word in n.lower() for word in _KERNELS))


def _peak_gib(attention: str, documents: bool, world: World, device: torch.device) -> float:
    """Return the peak of a micro-batch of 8,192 tokens above what lay there before, GiB."""
    engine = _engine(attention, documents, world, device, _LONG)
    batch = _batch(_LONG, documents)
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    engine.accumulate([batch], batch.labels.numel())
    peak = torch.cuda.max_memory_allocated(device) - before
    engine.apply(0.0)
    engine.close()
    return float(peak / 2**30)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
