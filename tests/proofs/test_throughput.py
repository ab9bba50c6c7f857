"""Estimated times are near published ones, and the page is what the tool writes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.run_tools import run_tool
from tools.proofs.check_throughput import MEDIAN, NINETY
from tools.proofs.ranking import kendall_tau
from tools.proofs.throughput.products import fitted_share, products
from tools.proofs.throughput.report import compared, markdown, quantile, rankings
from tools.proofs.throughput.rows import SOURCES, published

PAGE = Path(__file__).parents[2] / "docs" / "time_accuracy.md"


def test_rows_that_nothing_was_fitted_to_are_near() -> None:
    judged = [each.error for each in compared(published()) if each.row.part == "judged"]
    assert len(judged) > 150
    assert quantile(judged, 0.5) <= MEDIAN
    assert quantile(judged, 0.9) <= NINETY


def test_products_of_every_shape_follow_tables_that_others_measured() -> None:
    measured = [product for product in products() if product.gpu == "h100-sxm"]
    errors = [product.error(fitted_share(measured)) for product in measured]
    assert len(errors) >= 60
    assert quantile(errors, 0.5) < 0.06
    assert quantile(errors, 0.9) < 0.15


def test_what_more_gpus_cost_is_near_what_was_published() -> None:
    runs = [each for each in compared(published()) if each.row.source == "nvidia-15b"]
    few, *_, many = sorted(runs, key=lambda each: each.row.inputs.grid.world_size)
    lost = 1 - many.row.tokens_per_s_per_gpu / few.row.tokens_per_s_per_gpu
    assert 1 - many.estimated / few.estimated == pytest.approx(lost, abs=0.02)


def test_five_jobs_that_ran_in_many_layouts_are_ranked_as_published() -> None:
    taus = [tau for _, tau in rankings(compared(published()))]
    assert sum(tau >= 0.8 for tau in taus) >= 5, taus


def test_kendalls_tau_counts_pairs_in_the_same_order() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)


def test_every_row_names_its_source() -> None:
    assert {*Counter(row.source for row in published())} == {*SOURCES}


def test_a_row_is_expressed_as_it_was_run() -> None:
    row = next(row for row in published() if row.source == "bloom-176b")
    assert abs(row.inputs.shape.parameters / 176.2e9 - 1) < 0.01
    grid = row.inputs.grid
    assert (grid.pipeline, grid.tensor, grid.data) == (12, 4, 8)
    assert row.inputs.micro_batch * row.inputs.grad_accum * grid.data == 2048


def test_the_page_is_what_the_tool_writes() -> None:
    assert PAGE.read_text() == markdown(compared(published()))


def test_the_tool_prints_both_parts() -> None:
    done = run_tool("proofs/check_throughput")
    assert "fitted: " in done.stdout
    assert "judged: " in done.stdout
