"""Agreement on a stop between real gloo ranks: `python -m tools.proofs.own_cost.agreement RANKS`.

Prints JSON: for one group of all, and for rows and columns, a rank's further connections and the
milliseconds of an answer that is waited for. Ranks are forked from one process, on this machine.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from harness.guard import signals

_ANSWERS = 20


def main() -> int:
    """Fork the ranks; rank 0 prints."""
    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            children.append(os.fork())
            if not children[-1]:
                _agree(rank, ranks, f"file://{folder}/store")
        return int(any(os.waitpid(child, 0)[1] for child in children))


def _agree(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks)
    results = {}
    for name, together in (("one group", ranks), ("rows and columns", 1)):
        signals._TOGETHER = together
        before = _sockets()
        guard = signals.StopGuard(ranks)
        seconds = []
        for _ in range(_ANSWERS):
            began = time.perf_counter()
            guard.stop_if_asked()
            seconds.append(time.perf_counter() - began)
        guard.close()
        results[name] = _sockets() - before, 1000 * statistics.median(seconds)
    if rank == 0:
        os.write(1, f"{json.dumps(results)}\n".encode())
    dist.destroy_process_group()
    os._exit(0)


def _sockets() -> int:
    open_now = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(path.is_socket() for path in open_now)


if __name__ == "__main__":
    sys.exit(main())
