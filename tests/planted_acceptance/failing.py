from __future__ import annotations

from tools.acceptance.bench import Bench, expect


def look(bench: Bench) -> str:
    bench.check("what holds", lambda: "")
    bench.check("what does not", lambda: unequal())
    bench.check("what raises", lambda: str(1 // 0))
    return "one figure"


def unequal() -> str:
    expect(False, "1 is not 2")
    return ""
