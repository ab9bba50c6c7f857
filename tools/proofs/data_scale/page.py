"""The measurements of a large corpus as a page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tools.proofs.data_scale.corpus import Made
from tools.proofs.data_scale.readers import BATCH, MICRO_BATCH, RANKS, RESUMED_STEP, SEQ_LEN

_STATES = ("build", "cold", "warm")
_IN_BLOCKS = (Path(__file__).parent / "in_blocks.md").read_text()
"""Measured once, beside the way before."""


def _megatron(results: list[dict[str, Any]]) -> str:
    """Return the version that was measured."""
    versions = {of["version"] for of in results if of.get("version")}
    return " ".join(["megatron-core", *sorted(versions)])


def page(made: Made, results: list[dict[str, Any]]) -> str:
    """Return all measurements as a page."""
    lines = [
        "| reader | index | open, s | first batch, s | at step 100,000, s | CPU, s | peak, MiB |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for of in results:
        seconds = [f"{of[key]:.3f}" for key in ("open_s", "first_batch_s", "resume_s", "cpu_s")]
        row = [of["case"], of["state"], *seconds, f"{of['peak_mib']:,.0f}"]
        lines.append(f"| {' | '.join(row)} |")
    table = "\n".join(lines)
    return f"""# Data at scale, measured

{made.documents:,} documents of {made.tokens:,} tokens ({made.bin_bytes / 1e9:.1f} GB, an index of
{made.idx_bytes / 1e6:.0f} MB) in Megatron's format, made by a formula, with a Pareto-like tail of
lengths. A rank of {RANKS} opens them, reads the micro-batches of its first step ({BATCH} samples of
{SEQ_LEN} tokens, {MICRO_BATCH} of them its own), and those that a resumed run begins with at step
{RESUMED_STEP:,}. Every row is a process of its own.

{table}

- `build`: the first opening ever, which writes the index; `cold`: its files are not in the page
  cache; `warm`: they are. The machine has {os.cpu_count()} cores, which other work shares, so the
  wall-clock times of builds and of cold files are upper bounds; CPU seconds are of the process
  after its imports.
- With a size: documents that are so many times as long, whose ids are a hole in the file. Sizes and
  places are those of a full one, but no id is read from a disk.
- Peak: resident memory above what torch and transformers take, pages of mapped files included,
  which ranks of a node share and the kernel may drop.
- Order, mixture and resume are computed from the sample's number
  ([data](data.md#what-a-step-reads)): no index of samples is built, loaded or shuffled.
  `token_budget` reads the index of `length_grouped`, `mixture` that of `packed`.
- Megatron-LM is `GPTDataset` of {_megatron(results)} with its cached index, for as many samples as
  are needed to reach that step; datatrove is its `DatatroveFolderDataset`, which reads files in
  their own order: no shuffling, no documents.

{_IN_BLOCKS}Written by `tools/proofs/measure_data_scale.py`.
"""
