"""Time what looks at attention and norms of weights add to a step.

    python tools/proofs/benchmark_probes.py
    python tools/proofs/benchmark_probes.py --steps 400 --rounds 5

A Llama of 25 million parameters trains on one CPU rank, 8 samples of 128 tokens a step. Every
second step looks at attention, or measures weights; the others do not: the difference of their
medians is the cost of one look. Divided by the default interval it is the share of a step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[0] = str(REPOSITORY)

from harness.config.conduct_sections import LogConfig
from harness.runfolder import RunFolder
from tools.proofs.overhead.job import LAYERS
from tools.proofs.overhead.prepare import prepare

WARM_UP = 10
PROBES = ("attention_every", "weights_every")


def main() -> int:
    """Command line -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="runs for each probe")
    args = parser.parse_args()
    print("log.            zero   step (ms)   one look (ms)   every   share of a step")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        arguments = prepare(folder, LAYERS).arguments
        for stage in (1, 3):
            for probe in PROBES:
                plain, looked = list[float](), list[float]()
                for number in range(args.rounds):
                    run = folder / f"{probe}-{stage}-{number}"
                    seconds = _seconds_of_steps(run, stage, probe, args.steps, arguments)
                    looked += seconds[WARM_UP + 1 :: 2]
                    plain += seconds[WARM_UP::2]
                step_s = statistics.median(plain)
                look_s = statistics.median(looked) - step_s
                interval = getattr(LogConfig(), probe)
                print(
                    f"{probe:15} {stage:4} {1000 * step_s:11.1f} {1000 * look_s:15.1f} "
                    f"{interval:7} {look_s / interval / step_s:16.2%}",
                    flush=True,
                )
    return 0


def _seconds_of_steps(
    run: Path, stage: int, probe: str, steps: int, arguments: tuple[str, ...]
) -> list[float]:
    """Train with a look in every second step; return the seconds of each step from the second."""
    looks = [f"log.{name}={2 if name == probe else 0}" for name in PROBES]
    command = [sys.executable, "harness/train.py", f"--deepspeed=ds_configs/zero{stage}.json"]
    command += [*arguments, *looks, f"run.dir={run}", f"train.steps={steps}", "log.report=false"]
    command += [
        "train.global_batch=8",
        "train.micro_batch=8",
        "sample.tokens=0",
        "save.export=false",
    ]
    subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    times = [line["unix_time_s"] for line in RunFolder(run).read_metrics() if "loss" in line]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


if __name__ == "__main__":
    sys.exit(main())
