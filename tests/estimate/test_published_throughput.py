"""Estimated times are near published ones. `pytest -s` shows each source's errors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median

import pytest

from tests.estimate.published_throughput import SOURCES, Row, fitted_share, products, published


@pytest.fixture(scope="module")
def estimated() -> list[tuple[Row, float]]:
    """Each row, and its estimate in tokens a second and GPU."""
    return [(row, row.time().tokens_per_s_per_gpu) for row in published()]


def error(row: Row, rate: float) -> float:
    """Return the relative error; positive where the estimate is too quick."""
    return rate / row.tokens_per_s_per_gpu - 1


def quantile(errors: Sequence[float], share: float) -> float:
    """Return the absolute error that so large a share does not exceed."""
    ordered = sorted(map(abs, errors))
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def test_rows_that_nothing_was_fitted_to_are_near(estimated: list[tuple[Row, float]]) -> None:
    for source, text in SOURCES.items():
        errors = [error(row, rate) for row, rate in estimated if row.source == source]
        assert errors, source
        nine = quantile(errors, 0.9)
        print(f"{text}: {len(errors)} rows, median {median(errors):+.1%}, 90 % within {nine:.1%}")
    judged = [error(row, rate) for row, rate in estimated if row.part == "judged"]
    assert len(judged) > 150
    assert quantile(judged, 0.5) <= 0.06
    assert quantile(judged, 0.9) <= 0.21


@pytest.mark.parametrize(("gpu", "rows"), [("h100-sxm", 60), ("a100-80", 9)])
def test_products_of_every_shape_follow_tables_that_others_measured(gpu: str, rows: int) -> None:
    measured = [product for product in products() if product.gpu == gpu]
    errors = [product.error(fitted_share(measured)) for product in measured]
    assert len(errors) >= rows
    assert quantile(errors, 0.5) < 0.06
    assert quantile(errors, 0.9) < 0.18


def test_what_more_gpus_cost_is_near_what_was_published(
    estimated: list[tuple[Row, float]],
) -> None:
    runs = [(row, rate) for row, rate in estimated if row.source == "nvidia-15b"]
    few, *_, many = sorted(runs, key=lambda run: run[0].inputs.grid.world_size)
    lost = 1 - many[0].tokens_per_s_per_gpu / few[0].tokens_per_s_per_gpu
    assert 1 - many[1] / few[1] == pytest.approx(lost, abs=0.02)


def test_five_jobs_that_ran_in_many_layouts_are_ranked_as_published(
    estimated: list[tuple[Row, float]],
) -> None:
    jobs: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for row, rate in estimated:
        run = row.inputs
        samples = run.micro_batch * run.grad_accum * run.grid.data
        size = run.shape.parameters, run.shape.num_heads, run.seq_len, samples
        job = row.source, row.gpu, run.grid.world_size, *size
        jobs.setdefault(job, []).append((rate, row.tokens_per_s_per_gpu))
    taus = [kendall_tau(rates) for rates in jobs.values() if len(rates) >= 3]
    assert sum(tau >= 0.8 for tau in taus) >= 5, taus


def kendall_tau(scores: Sequence[tuple[float, float]]) -> float:
    """Return 1 where every pair is in the same order by both scores, -1 where none is."""
    pairs = [*combinations(scores, 2)]
    signs = ((a[0] > b[0]) - (a[0] < b[0]) if a[1] != b[1] else 0 for a, b in pairs)
    orders = ((a[1] > b[1]) - (a[1] < b[1]) for a, b in pairs)
    return sum(one * other for one, other in zip(signs, orders, strict=True)) / len(pairs)


def test_kendalls_tau_counts_pairs_in_the_same_order() -> None:
    assert kendall_tau([(1, 10), (2, 20), (3, 30)]) == 1
    assert kendall_tau([(1, 3), (2, 2), (3, 1)]) == -1
    assert kendall_tau([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)


def test_a_row_is_expressed_as_it_was_run() -> None:
    row = next(row for row in published() if row.source == "bloom-176b")
    assert abs(row.inputs.shape.parameters / 176.2e9 - 1) < 0.01
    grid = row.inputs.grid
    assert (grid.pipeline, grid.tensor, grid.data) == (12, 4, 8)
    assert row.inputs.micro_batch * row.inputs.grad_accum * grid.data == 2048
