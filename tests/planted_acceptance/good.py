from __future__ import annotations

from tools.acceptance.bench import Bench


def look(bench: Bench) -> str:
    bench.check("one thing", lambda: "as it should be")
    bench.check("another", lambda: cuda(bench))
    bench.values["number"] = 1
    return "one figure"


def cuda(bench: Bench) -> str:
    bench.cuda_only()
    return ""
