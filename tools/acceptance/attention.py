"""Attention: all implementations give the same loss and gradient, with and without documents."""

import gc
import math
import sys
import traceback
from typing import Any

import torch

from harness.data.batch import Batch
from harness.errors import ConfigError
from harness.layout.attention_table import ATTENTIONS
from harness.layout.world import World
from harness.run.verify import TOLERANCES
from tools.acceptance.bench import Bench, Failed, Skipped, expect, on_rank, tiny_engine

_NEEDED = ("needs a GPU", "package", "import")
_FUSED = ("flash", "fmha", "cudnn", "efficient")
"""Parts of the names of fused kernels, which never hold all scores; torch's sdpa has several."""
_KERNELS = (*_FUSED, "attention", "varlen", "softmax")
_SEQ_LEN, _LONG = 256, 8192
_DOCUMENT_TOKENS = 90


def look(bench: Bench) -> str:
    """Compare all implementations with eager attention, on one rank."""
    rows: list[dict[str, Any]] = []

    def computed() -> str:
        rows.extend(bench.computed(__name__, "attention"))
        return f"{len(rows)} combinations"

    bench.check("loss and gradients", computed)
    bench.values["attention"] = rows
    for row in rows:
        name = f"{row['attention']}{' by documents' if row['documents'] else ''}"
        bench.check(name, _equal, bench, row)
    bench.skip_on_cpu("kernels and the peak at 8,192 tokens")
    computed_here = sum("loss" in row for row in rows)
    peaks = [row["peak_gib"] for row in rows if "peak_gib" in row]
    peak = f"; {min(peaks):.2f} to {max(peaks):.2f} GiB at 8k tokens" if peaks else ""
    return f"{computed_here} of {len(rows)} run here{peak}" if rows else ""


def _equal(bench: Bench, row: dict[str, Any]) -> str:
    if refusal := row.get("refused"):
        if "GPU" in refusal and not bench.on_cuda:
            bench.require_cuda()
        raise (Skipped if any(word in refusal for word in _NEEDED) else Failed)(refusal)
    if failure := row.get("failed"):
        raise Failed(failure)
    allowed_loss, allowed_gradient = TOLERANCES[row["precision"]]
    text = (
        f"{row['precision']}: loss {row['loss']:.6f}, eager {row['expected']:.6f}; gradients "
        f"{row['gradients_apart']:.0e} apart"
    )
    close = math.isclose(row["loss"], row["expected"], rel_tol=allowed_loss)
    expect(close and row["gradients_apart"] <= allowed_gradient, text)
    if (kernels := row.get("kernels")) is not None:
        shown = ", ".join(kernels[:3]) or "no kernel of attention"
        text += f"; {shown}; {row['peak_gib']:.2f} GiB at 8k"
        fused = any(word in kernel.lower() for kernel in kernels for word in _FUSED)
        expect(fused or row["attention"] != "sdpa", f"sdpa is not fused: {text}")
    return text


# --- one rank: OUT ---


def main(argv: list[str]) -> int:
    """Compute loss and gradients of one batch by every exact implementation; write rows to OUT."""
    (out,) = argv
    return on_rank(out, _rows)


def _rows(world: World, device: torch.device) -> list[dict[str, Any]]:
    truth: dict[bool, Any] = {}
    rows: list[dict[str, Any]] = []
    exact = [name for name, row in ATTENTIONS.items() if row.is_exact and name != "eager"]
    for attention in ("eager", *exact):
        for documents in (False, True):
            row: dict[str, Any] = {"attention": attention, "documents": documents}
            rows.append(row)
            try:
                loss, gradients, more = _computed(attention, documents, world, device)
            except (ConfigError, ImportError) as error:
                row["refused"] = str(error)
                continue
            except Exception as error:  # raised by a kernel: the other implementations continue
                traceback.print_exc()
                row["failed"] = f"{type(error).__name__}: {error}"
                continue
            expected = truth.setdefault(documents, (loss, gradients))
            apart = _apart(gradients, expected[1])
            row |= {"loss": loss, "expected": expected[0], "gradients_apart": apart, **more}
    return rows


def _apart(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of two gradients relative to that of the expected one, for
    the worst gradient.
    """
    pairs = [(ours[name].double(), true.double()) for name, true in expected.items()]
    apart = [(one - true).norm() / true.norm().clamp_min(1e-30) for one, true in pairs]
    return float(torch.stack(apart).max())  # NaN if one of them is


def _computed(
    attention: str, documents: bool, world: World, device: torch.device
) -> tuple[float, dict[str, torch.Tensor], dict[str, Any]]:
    """Return the loss, every gradient on the CPU, and on CUDA the kernels and the peak at 8k."""
    engine = _engine(attention, documents, world, device, _SEQ_LEN)
    batch = _batch(_SEQ_LEN, documents)
    loss = float(engine.accumulate([batch], batch.labels.numel()))
    gradients = {name: gradient.cpu() for name, gradient in engine.gradients()}
    engine.apply(0.0)
    more: dict[str, Any] = {"precision": engine.plan.precision}  # "auto", so the device decides
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
    longest = {"max_position_embeddings": seq_len}
    return tiny_engine(world, device, seq_len, documents, attention=attention, overrides=longest)


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
    """Return the peak in GiB of a micro-batch of 8,192 tokens, above what was allocated before."""
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
