from __future__ import annotations

from tools.acceptance.bench import Bench


def look(bench: Bench) -> str:
    bench.say("about to raise")
    raise OSError("no such thing")
