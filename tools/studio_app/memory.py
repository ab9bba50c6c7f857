"""The uses of memory, in the six colours of the palette."""

from __future__ import annotations

from collections.abc import Mapping

from harness.estimate.held import GIB
from harness.report.charts import grouped
from tools.studio_app.page import Verdict


def grouped_gib(sizes: Mapping[str, int]) -> dict[str, float]:
    """Return GiB of each of the six groups, in stacking order, from bytes of components."""
    return {group: size / GIB for group, size in grouped(sizes).items()}


VERDICTS: dict[str, Verdict] = {"fits": "good", "tight": "warning", "does not fit": "bad"}
"""Colours of an estimate's verdict."""


def gib(size: float) -> str:
    """Return bytes as text."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
