"""Launchers: ranks meet under each of them, on devices of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness.launch.ranks import ON_CPU, REPOSITORY, environment, free_port
from tools.acceptance.bench import Bench, expect
from tools.acceptance.meeting import AS_SLURM
from tools.acceptance.report import readable

_MEETING = "tools.acceptance.meeting"


def look(bench: Bench) -> str:
    """Start the same ranks by torchrun, by deepspeed, and as srun does."""
    count, python = str(bench.ranks), sys.executable

    def launched(name: str, *launcher: str) -> str:
        folder = _folder(bench, name)
        log = folder / "log.txt"
        env = environment({} if bench.on_cuda else ON_CPU)
        with log.open("wb") as output:
            done = subprocess.run(
                [*launcher, _MEETING, str(folder)],
                cwd=REPOSITORY,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        last = readable(log.read_text(errors="replace").strip().rpartition("\n")[2])
        expect(done.returncode == 0, f"it ended with code {done.returncode}: {last}")
        return _met(bench, folder, "torch")

    def torchrun() -> str:
        module = (python, "-m", "torch.distributed.run", "--standalone")
        return launched("torchrun", *module, "--nproc-per-node", count, "-m")

    def deepspeed() -> str:
        runner = (python, "-m", "deepspeed.launcher.runner", "--num_accelerators", count)
        port = ("--master_port", str(free_port()))
        return launched("deepspeed", *runner, *port, "--no_local_rank", "--module")

    def srun() -> str:
        folder = _folder(bench, "srun")
        ended = bench.run(_MEETING, [str(folder), AS_SLURM], "srun")
        expect(set(ended.codes) == {0}, f"ranks ended with {ended.codes}: {ended.output[-300:]}")
        return _met(bench, folder, "slurm" if bench.ranks > 1 else None)

    bench.check("torchrun", torchrun)
    bench.check("deepspeed", deepspeed)
    bench.check("as srun, each rank with its own GPU alone", srun)
    joined = sum(check.verdict == "held" for check in bench.checks)
    backend = "nccl and gloo" if bench.on_cuda else "gloo"
    return f"{joined} launchers, {count} rank{'s' * (bench.ranks > 1)}, {backend}"


def _folder(bench: Bench, name: str) -> Path:
    folder = bench.folder / name
    folder.mkdir()
    return folder


def _met(bench: Bench, folder: Path, launcher: str | None) -> str:
    """Check what every rank wrote."""
    ranks = bench.ranks
    paths = [folder / f"{rank}.json" for rank in range(ranks)]
    missing = [rank for rank, path in enumerate(paths) if not path.exists()]
    expect(not missing, f"ranks {missing} wrote nothing")
    seen = [json.loads(path.read_text()) for path in paths]
    total = float(sum(range(ranks)))
    for rank, value in enumerate(seen):
        expect(value["ones"] == ranks, f"rank {rank}: the all-reduce of ones gave {value['ones']}")
        expect(value["sums"] == [total, total], f"rank {rank}: groups gave {value['sums']}")
        expect(value["gathered"] == [*range(ranks)], f"rank {rank}: gathered {value['gathered']}")
        expect(value["broadcast"] == [bench.accelerator], f"rank {rank}: {value['broadcast']}")
        if launcher is not None:
            expect(value["launcher"] == launcher, f"rank {rank}: started by {value['launcher']}")
    own = {value["uuid"] for value in seen if value["uuid"]}
    expect(not bench.on_cuda or len(own) == ranks, f"{ranks} ranks have {len(own)} GPUs")
    return f"{seen[0]['backend']}, {', '.join(value['device'] for value in seen)}"
