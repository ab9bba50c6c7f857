"""Process groups of CPU ranks on this machine, for the tools that drive the real engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def run_module(module: str, arguments: list[str], ranks: int, errors: Path) -> None:
    """Run `python -m module` once per rank and wait for all; Ctrl-C ends them.

    Raises SystemExit with what the ranks wrote to `errors`/*.error when one of them fails.
    """
    for stale in errors.glob("*.error"):
        stale.unlink()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=REPOSITORY,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        texts = [path.read_text() for path in sorted(errors.glob("*.error"))]
        raise SystemExit("\n".join(texts) or f"the process group ended with {codes}")
