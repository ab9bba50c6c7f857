"""Rates of a site, fitted to steps measured there.

The machine's numbers are multiplied by factors that bring estimates as close as possible. The fit
follows the median run, so disturbed runs have little weight. A factor stays near 1 unless several
runs require otherwise, so that few runs change few numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from harness.estimate.hardware import GPUS, Precision
from harness.estimate.inputs import Inputs
from harness.estimate.step_time.machine import (
    FITTED,
    Machine,
    cpu_machine,
    machine_of,
    other_machine,
    refined,
)
from harness.estimate.step_time.step import estimate_time

_NEAR = 0.002
"""Cost of scaling a number by e, relative to a run whose estimate is wrong by a factor of e."""
_STEPS = (0.8, 0.4, 0.2, 0.1, 0.05, 0.02)
"""Changes of a factor's logarithm to try, until none improves the estimates."""


@dataclass(frozen=True)
class Measured:
    """A run, with the measured seconds per step."""

    inputs: Inputs
    seconds: float


@dataclass(frozen=True)
class Site:
    """A machine's numbers, with factors fitted to a site's runs."""

    gpu: str | None
    """Its key in gpus.toml; None if ranks compute on the CPU."""
    precision: Precision
    cores: int
    """Cores per node, if ranks compute on the CPU."""
    factors: dict[str, float]
    runs: int
    median_error: float
    """Median error of the runs it was fitted to."""

    def problem(self, gpu: str | None, precision: Precision) -> str | None:
        """Return why its rates do not apply to such ranks; None if they do."""
        return other_machine((self.gpu, self.precision), (gpu, precision))

    def machine(self, like: Machine | None, ranks_per_node: int) -> Machine:
        """Return the site's machine, for runs for which `problem` is None. `like`: its GPUs as in
        the tables; None for ranks on the CPU.
        """
        return refined(like or cpu_machine(ranks_per_node, self.cores), self.factors)

    def write(self, path: Path) -> None:
        """Write a file for plan.rates."""
        path.write_text(json.dumps({"site": asdict(self)}, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def of(cls, content: Any) -> Site:
        """Return the site in the JSON value that `write` wrote. Raises ValueError for any other."""
        try:
            site = cls(**content["site"])
            factors = {name: float(factor) for name, factor in site.factors.items()}
            refined(cpu_machine(1, 1), factors)
            if site.gpu not in GPUS and (site.gpu is not None or site.cores < 1):
                raise ValueError(f"no such machine: GPU {site.gpu}, {site.cores} cores")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None
        return site


def calibrated(runs: Sequence[Measured], cores: int) -> Site:
    """Return the site fitted to measured runs, which all use the same GPUs (or CPUs, `cores` per
    node) and precision as the first.
    """
    run = runs[0].inputs
    listed = {  # by ranks per node
        ranks: machine_of(run.gpu, ranks, run.precision) if run.gpu else cpu_machine(ranks, cores)
        for ranks in dict.fromkeys(each.inputs.gpus_per_node for each in runs)
    }
    first = listed[run.gpus_per_node]
    logs = {name: 0.0 for name in FITTED if getattr(first, name)}  # 0 cannot be scaled

    def errors(logs: Mapping[str, float]) -> list[float]:
        factors = {name: exp(value) for name, value in logs.items() if value}
        machines = {ranks: refined(machine, factors) for ranks, machine in listed.items()}
        return [
            log(estimate_time(run.inputs, machines[run.inputs.gpus_per_node]).seconds / run.seconds)
            for run in runs
        ]

    def cost(logs: Mapping[str, float]) -> float:
        # Not squared: like a median, the fit ignores a few outliers.
        far = sum(map(abs, errors(logs)))
        return far + _NEAR * sum(value * value for value in logs.values())

    least = cost(logs)
    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for name in logs:
                for change in (step, -step):
                    tried = {**logs, name: logs[name] + change}
                    if (there := cost(tried)) < least - 1e-6:
                        logs, least, improved = tried, there, True
                        break
    factors = {name: round(exp(value), 6) for name, value in logs.items() if value}
    error = median(abs(exp(each) - 1) for each in errors(logs))
    return Site(run.gpu, run.precision, cores, factors, len(runs), round(error, 4))
