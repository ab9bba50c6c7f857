"""Environment: what the preflight finds on every rank. Joining: ranks meet under each launcher."""

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from harness.launch.ranks import ON_CPU, REPOSITORY, free_port, started
from harness.layout.world import visible_gpus
from tools.acceptance.bench import Bench, Skipped, expect, on_rank, tail
from tools.acceptance.report import Check, readable

AS_SLURM = "--as-slurm"
_OPTIONAL = ("triton", "flash_attn", "liger_kernel", "bitsandbytes")
_LIMIT_S = {"cuda": 80, "cpu": 600}
_SHOWN = ("matmul rate", "all-reduce")


def look_at(bench: Bench) -> str:
    """Run the preflight; its failures are checks, the figure lists its warnings."""
    warnings: list[str] = []
    bench.check("preflight", _flown, bench, warnings)
    bench.check("optional packages", _packages)
    bench.skip_on_cpu("driver, toolkit, GPUs and the links between them")
    rows = bench.values.get("preflight", {})
    parts = [rows[name] for name in _SHOWN if name in rows]
    return "; ".join([*parts, *([f"warnings: {', '.join(warnings)}"] if warnings else [])])


def _flown(bench: Bench, warnings: list[str]) -> str:
    json_path = REPOSITORY / "ds_configs" / "zero1.json"
    limit_s = _LIMIT_S[bench.accelerator] * bench.sharing
    arguments = ["--json", f"--limit-s={limit_s}", f"--deepspeed={json_path}"]
    arguments += [*bench.settings, f"run.dir={bench.folder / 'run'}"]
    ended = bench.run("tools.preflight", arguments, "preflight")
    start = ended.outputs[0].find("{")
    expect(start >= 0, f"ranks ended with {ended.codes}: {tail(ended)}")
    report, _ = json.JSONDecoder().raw_decode(ended.outputs[0][start:])
    rows = report["checks"]
    bench.values["preflight"] = {row["check"]: row["found"] for row in rows}
    for row in rows:
        if row["verdict"] == "FAIL":
            bench.checks.append(Check(row["check"], "failed", f"{row['found']}; {row['todo']}"))
    warnings += [row["check"] for row in rows if row["verdict"] == "warn"]
    return f"{len(rows)} rows"


def _packages() -> str:
    versions = []
    for name in _OPTIONAL:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    return ", ".join(versions)


def join_ranks(bench: Bench) -> str:
    """Start the same ranks by torchrun, by deepspeed, and as srun does."""
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={bench.ranks}", "-m")
    bench.check("torchrun", _launched, bench, "torchrun", *torchrun)
    bench.check("deepspeed", _by_deepspeed, bench)
    bench.check("as srun, each rank seeing only its GPU", _as_srun, bench)
    joined = sum(check.verdict == "held" for check in bench.checks)
    backend = "nccl and gloo" if bench.on_cuda else "gloo"
    return f"{joined} launchers, {bench.ranks} rank{'s' * (bench.ranks > 1)}, {backend}"


def _by_deepspeed(bench: Bench) -> str:
    places = ["--num_accelerators", str(bench.ranks)]
    bench.require_own_gpus()  # which its launcher requires, too
    if bench.on_cuda:  # with the number alone, it ignores CUDA_VISIBLE_DEVICES
        gpus = visible_gpus()[: bench.ranks]
        if not all(map(str.isdecimal, gpus)):
            raise Skipped(f"deepspeed takes GPUs by number, not as {gpus[0]}")
        places = ["--include", f"localhost:{','.join(gpus)}"]
    port = ("--master_port", str(free_port()), "--no_local_rank", "--module")
    return _launched(bench, "deepspeed", "deepspeed.launcher.runner", *places, *port)


def _launched(bench: Bench, name: str, *launcher: str) -> str:
    folder = bench.folder / name
    command = [sys.executable, "-m", *launcher, __name__, str(folder)]
    env = {} if bench.on_cuda else ON_CPU
    with started(command, None, REPOSITORY, folder, env) as group:
        ended = group.wait()
    last = readable(ended.last_line)
    expect(ended.codes == [0], f"it ended with code {ended.codes[0]}: {last}")
    return _met(bench, folder, name)


def _as_srun(bench: Bench) -> str:
    folder = bench.folder / "srun"
    folder.mkdir()
    ended = bench.run(__name__, [str(folder), AS_SLURM], "srun")
    expect(set(ended.codes) == {0}, f"ranks ended with {ended.codes}: {ended.output[-300:]}")
    return _met(bench, folder, "slurm" if bench.ranks > 1 else None)


def _met(bench: Bench, folder: Path, launcher: str | None) -> str:
    """Check what every rank wrote."""
    ranks = bench.ranks
    paths = [folder / f"{rank}.json" for rank in range(ranks)]
    missing = [rank for rank, path in enumerate(paths) if not path.exists()]
    expect(not missing, f"ranks {missing} wrote nothing")
    seen = [json.loads(path.read_text()) for path in paths]
    total = float(sum(range(ranks)))
    expected = {
        "ones": ranks,
        "sums": [total, total],
        "gathered": [*range(ranks)],
        "broadcast": [bench.accelerator],
        **({"launcher": launcher} if launcher else {}),
    }
    for rank, value in enumerate(seen):
        for key, right in expected.items():
            expect(value[key] == right, f"rank {rank}: {key}: {value[key]}, not {right}")
    own = {value["uuid"] for value in seen if value["uuid"]}
    gpus = -(-ranks // bench.sharing)
    expect(not bench.on_cuda or len(own) >= gpus, f"{ranks} ranks have {len(own)} GPUs")
    return f"{seen[0]['backend']}, {', '.join(value['device'] for value in seen)}"


# --- one rank of a launcher's job: FOLDER [--as-slurm] ---


def main(argv: list[str]) -> int:
    """Join the others, use both backends, and write the results to FOLDER/RANK.json."""
    folder, *more = argv
    if AS_SLURM in more:
        _become_srun()
    return on_rank(f"{folder}/{{rank}}.json", _met_by)


def _met_by(world: Any, device: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from harness.checkpoint.collectives import broadcast_object, gather_objects

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
    assert broadcast_object(gather_objects(world.rank)) == [*range(world.world_size)]
    on_cuda = device.type == "cuda"
    return {
        "launcher": world.launcher,
        "device": str(device),
        "backend": dist.get_backend(),
        "uuid": str(torch.cuda.get_device_properties(device).uuid) if on_cuda else None,
        "ones": float(one),
        "sums": [float(on_host), float(on_device)],
        "gathered": ranks,
        "broadcast": first,
    }


def _become_srun() -> None:
    """Set the environment of `srun --gpus-per-task=1`: Slurm's variables and one visible GPU."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    rank, ranks, local_rank, *_ = (os.environ.pop(name, "") for name in names)
    os.environ |= {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local_rank,
        "SLURM_NTASKS": ranks,
        "SLURM_STEP_NUM_TASKS": ranks,
        "SLURM_STEP_TASKS_PER_NODE": ranks,
    }
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        gpus = visible_gpus()
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(local_rank) % len(gpus)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
