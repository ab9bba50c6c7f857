from __future__ import annotations

from tests.planted_acceptance.good import cuda
from tools.acceptance.bench import Bench


def look(bench: Bench) -> str:
    bench.check("all of it", lambda: cuda(bench))
    return ""
