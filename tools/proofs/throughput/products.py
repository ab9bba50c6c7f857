"""Rates of matrix products that others measured, beside the estimate's for the same shapes."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from harness.estimate.step_time.machine import Machine, machine_of
from harness.estimate.step_time.products import product_seconds

_TABLE = Path(__file__).with_name("products.csv")
_SHARES = [hundredths / 100 for hundredths in range(40, 100)]
_BF16_BYTES = 2
_SOURCES = (
    "OpenXLA, xla/service/gpu/model/matmul_interpolator_data.h: one product, bf16 (H100)",
    "Azure, AI-benchmarking-guide, Azure_Results/ND_A100_v4_results.md: fp16 (A100)",
    "Bekman, ml-engineering, compute/accelerator/README.md: the largest of a search, bf16",
)


_SIDES = ("rows", "columns", "depth")


@dataclass(frozen=True)
class Product:
    """A product of (rows x depth) @ (depth x columns) that somebody timed."""

    gpu: str
    rows: int
    columns: int
    depth: int
    tflops: float

    def error(self, machine: Machine) -> float:
        """Return the relative error of the estimate; positive where it is too slow."""
        seconds = product_seconds(self.rows, self.columns, self.depth, _BF16_BYTES, machine)
        return seconds * self.tflops * 1e12 / (2 * self.rows * self.columns * self.depth) - 1


def products() -> list[Product]:
    """Return every row of products.csv."""
    with _TABLE.open(newline="", encoding="utf-8") as file:
        return [
            Product(row["gpu"], **{k: int(row[k]) for k in _SIDES}, tflops=float(row["tflops"]))
            for row in csv.DictReader(file)
        ]


def fitted_share(measured: list[Product]) -> Machine:
    """Return the machine with the share of its peak that follows these products best: benchmarks
    reach more of it than steps do.
    """
    machine = machine_of(measured[0].gpu, 8, "bf16")
    machines = [replace(machine, products=share) for share in _SHARES]
    return min(machines, key=lambda each: median(abs(product.error(each)) for product in measured))


def product_lines() -> Iterator[str]:
    """Yield the section of the page."""
    yield "## Matrix products of every shape"
    yield ""
    yield "Products of other sizes reach other shares of the peak: tiles do not fill the last wave,"
    yield "and no kernel takes less than some microseconds. The share of the peak, the cost of the"
    yield "empty part of a wave and those microseconds follow each GPU's table; in a step the share"
    yield "is lower, and is fitted to published runs. The rates were published by"
    yield ""
    yield from (f"- {source}" for source in _SOURCES)
    yield ""
    yield (
        "| GPU | shapes | published TFLOP/s | share of the peak | of a step | median error | "
        "90th percentile |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|"
    table = products()
    for gpu in dict.fromkeys(product.gpu for product in table):
        yield _line([product for product in table if product.gpu == gpu])


def _line(measured: list[Product]) -> str:
    machine = fitted_share(measured)
    errors = sorted(abs(product.error(machine)) for product in measured)
    rates = [product.tflops for product in measured]
    judged = f"{median(errors):.1%} | {errors[int(0.9 * len(errors))]:.1%}"
    of_step = machine_of(measured[0].gpu, 8, "bf16").products
    return (
        f"| {measured[0].gpu} | {len(measured)} | {min(rates):,.0f} to {max(rates):,.0f} | "
        f"{machine.products:.2f} | {of_step:.2f} | {judged if len(errors) > 1 else '- | -'} |"
    )
