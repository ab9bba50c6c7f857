"""One rank of a launcher's job: joins, talks over both backends, and writes what it saw.

`python -m tools.acceptance.meeting FOLDER [--as-slurm]`
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

AS_SLURM = "--as-slurm"


def main(argv: list[str]) -> int:
    """Join the others; every rank writes what it saw to FOLDER/RANK.json."""
    folder, *more = argv
    if AS_SLURM in more:
        _as_srun()
    from harness.checkpoint.meeting import gathered, told
    from harness.engine.processes import ending_together, join
    from harness.layout.world import World

    world = World.from_environ()
    with ending_together():
        device = join(world)
        import torch
        import torch.distributed as dist

        one = torch.ones(1, device=device)
        dist.all_reduce(one)
        on_host = torch.full((1,), float(world.rank))
        dist.all_reduce(on_host, group=dist.new_group(backend="gloo"))
        on_device = torch.full((1,), float(world.rank), device=device)
        dist.all_reduce(on_device, group=dist.new_group())
        ranks: list[int | None] = [None] * world.world_size
        dist.all_gather_object(ranks, world.rank)
        first = [device.type if world.rank == 0 else None]
        dist.broadcast_object_list(first)
        assert told(gathered(world.rank)) == [*range(world.world_size)]
        seen = {
            "launcher": world.launcher,
            "device": str(device),
            "backend": dist.get_backend(),
            "uuid": None,
            "ones": float(one),
            "sums": [float(on_host), float(on_device)],
            "gathered": ranks,
            "broadcast": first,
        }
        if device.type == "cuda":
            seen["uuid"] = str(torch.cuda.get_device_properties(device).uuid)
        Path(folder, f"{world.rank}.json").write_text(json.dumps(seen))
    return 0


def _as_srun() -> None:
    """Change this rank's environment to that of `srun --gpus-per-task=1`: Slurm's names, and no
    GPU visible but its own.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    rank, ranks, local_rank, *_ = (os.environ.pop(name, "") for name in names)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = visible.split(",")[int(local_rank)] if visible else local_rank
    os.environ |= {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local_rank,
        "SLURM_NTASKS": ranks,
        "SLURM_STEP_NUM_TASKS": ranks,
        "SLURM_STEP_TASKS_PER_NODE": ranks,
    }
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = own


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
