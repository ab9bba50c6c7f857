"""Attention: every implementation gives one loss and gradient, with and without documents."""

from __future__ import annotations

import json
import math
from typing import Any

from harness.run.verify import TOLERANCES
from tools.acceptance.bench import Bench, Failed, Skipped, expect, tail

_NEEDED = ("needs a GPU", "package", "import")
_FUSED = ("flash", "fmha", "cudnn", "efficient")
"""Parts of the names of kernels that never hold all scores; torch's own backends of sdpa."""


def look(bench: Bench) -> str:
    """Compare all of them with eager attention, on one rank."""
    out = bench.folder / "attention.json"
    rows: list[dict[str, Any]] = []

    def computed() -> str:
        ended = bench.run("tools.acceptance.attending", [str(out)], "attending", ranks=1)
        expect(ended.codes == [0], f"it ended with {ended.codes}: {tail(ended)}")
        rows.extend(json.loads(out.read_text()))
        return f"{len(rows)} combinations"

    bench.check("loss and gradients", computed)
    bench.values["attention"] = rows
    for row in rows:
        name = f"{row['attention']}{' by documents' if row['documents'] else ''}"
        bench.check(name, lambda row=row: _equal(bench, row))
    bench.not_on_cpu("kernels and the peak at 8,192 tokens")
    computed_here = sum("loss" in row for row in rows)
    peaks = [row["peak_gib"] for row in rows if "peak_gib" in row]
    peak = f"; {min(peaks):.2f} to {max(peaks):.2f} GiB at 8k tokens" if peaks else ""
    return f"{computed_here} of {len(rows)} run here{peak}" if rows else ""


def _equal(bench: Bench, row: dict[str, Any]) -> str:
    if refusal := row.get("refused"):
        if "GPU" in refusal and not bench.on_cuda:
            bench.cuda_only()
        if any(word in refusal for word in _NEEDED):
            raise Skipped(refusal)
        raise Failed(refusal)
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
