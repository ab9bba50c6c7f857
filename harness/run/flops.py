"""Floating-point operations, counted by torch as they are dispatched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

DEPTH = 6  # of the modules in the table: down to the parts of a decoder layer


def flop_counter() -> FlopCounterMode:
    """Return a context that counts the FLOPs of matrix products, convolutions and attention.

    ZeRO gathers weights before they are used: counts are those of the unsharded model. Kernels that
    torch does not dispatch as operators (Triton's, an extension's) are missing.
    """
    aten: Any = torch.ops.aten
    # Attention on CPUs: torch has no formula for it. The arguments are shapes.
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
        )
    }
    return FlopCounterMode(display=False, custom_mapping=attention)


def flop_table(counter: FlopCounterMode, title: str) -> str:
    """Return the counts as text: the total, each operation, each module as deep as DEPTH."""
    total, by_module = counter.get_total_flops(), counter.get_flop_counts()
    operations = [(str(name), count) for name, count in by_module.get("Global", {}).items()]
    modules = [
        (name, sum(counts.values()))
        for name, counts in by_module.items()
        if name != "Global" and name.count(".") < DEPTH
    ]
    return "\n".join(
        [
            f"{title}: {total:,} FLOPs",
            *("", "by operation", *_lines(sorted(operations, key=lambda row: -row[1]), total)),
            *("", "by module", *_lines(modules, total)),
            "",
        ]
    )


def _lines(rows: Iterable[tuple[str, int]], total: int) -> Iterable[str]:
    return (f"{count:24,} {count / (total or 1):6.1%} {name}" for name, count in rows)
