from __future__ import annotations

import os

from tools.acceptance.bench import Bench


def look(bench: Bench) -> str:
    """Write what is no text wherever something is read, and end as if all were well."""
    os.write(1, b"\xff\x00\x1b[2J" * 1000)
    (bench.folder / "now").write_bytes(b"\xff\xfe\x1b[2J")
    (bench.folder / "result.json").write_text('{"figure": [], "checks": [{"name": 3}]}')
    os._exit(0)
