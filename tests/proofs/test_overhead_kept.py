"""Rounds that are kept as files are not measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tools.proofs import benchmark_overhead
from tools.proofs.overhead.kept import kept
from tools.proofs.overhead.prepare import Bench
from tools.proofs.overhead.turns import Length


def test_a_round_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure(bench: Bench, cell: dict[str, Any], number: int, length: Length) -> Any:
        measured.append(number)
        return {"harness": [{"step_s": [1.0]}]}

    monkeypatch.setattr(benchmark_overhead, "_measure_round", measure)
    cell = {"stage": 3, "ranks": 2, "layers": 10}
    for number in (0, 0, 1):
        for steps in (2, 3):
            benchmark_overhead._round(
                cast(Bench, None), cell, number, Length(4, 3, steps), tmp_path / "out"
            )
    assert measured == [0, 0, 1, 1]
    assert len(list((tmp_path / "out").iterdir())) == 4  # and nothing half-written
    assert kept(tmp_path / "none.json") is None
