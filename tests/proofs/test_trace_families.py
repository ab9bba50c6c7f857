"""docs/memory_families.md: what families keep, beside traces of whole models."""

from __future__ import annotations

import re

from tests.two_ranks import REPOSITORY
from tools.proofs.trace_families import FAMILIES, TOLERANCE, error_of, traced_row


def test_every_family_is_on_the_page_and_within_the_tolerance() -> None:
    page = (REPOSITORY / "docs/memory_families.md").read_text(encoding="utf-8")
    row = r"^\| (\w+) \| [\d,]+ \|.*\| ([+-][\d.]+)% \| +[\d.]* ?\|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert [name for name, _ in rows] == FAMILIES
    assert not {name for name, error in rows if abs(float(error)) > 100 * TOLERANCE}


def test_a_family_is_traced_as_the_page_says() -> None:
    row = traced_row("opt")
    assert abs(error_of(row)) < 0.001
    assert row["way"] == "counted"
