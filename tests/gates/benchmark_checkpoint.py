"""Compare the cost of the harness's checkpoints with DeepSpeed's, on one disk.

    python -m tests.gates.benchmark_checkpoint
    python -m tests.gates.benchmark_checkpoint --stages 3 --rounds 9 --folder /scratch

Two CPU ranks, 61 million parameters, ZeRO 1 and 3. Every round times a save of the harness (hashed
and synced to disk) and DeepSpeed's save_checkpoint with a sync of its files, in alternating order;
a background save of the harness during training; and a resume of the harness next to plain reads
of the same files, both from disk. Results are medians over the rounds after a warm-up round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.launch.ranks import run_module
from harness.terminal import HelpFormatter

SEQ_LEN, VOCAB_SIZE = 32, 16_000  # tokens
MODEL: dict[str, Any] = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 640}
MODEL |= {"intermediate_size": 1792, "num_hidden_layers": 8, "num_attention_heads": 10}
MODEL |= {"num_key_value_heads": 10, "max_position_embeddings": SEQ_LEN, "bos_token_id": 0}
MODEL |= {"eos_token_id": 0, "tie_word_embeddings": False}
RATIOS = {
    "save / DeepSpeed's, both synced": ("save", "deepspeed"),
    "stall of a background save / save": ("stall", "save"),
    "resume / reading the files once": ("resume", "read"),
}


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3], metavar="STAGE")
    parser.add_argument("--rounds", type=int, default=6, help="even: both are first as often")
    parser.add_argument("--folder", type=Path, help="on the disk in question")
    args = parser.parse_args()
    for stage in args.stages:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            words = ["rank", str(stage), str(args.rounds), folder]
            run_module("tests.gates.benchmark_checkpoint", words, 2, errors=Path(folder))
            seconds = json.loads((Path(folder) / "seconds.json").read_text())
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        print(f"ZeRO {stage}: " + ", ".join(f"{name} {s:.2f} s" for name, s in medians.items()))
        for text, (over, under) in RATIOS.items():
            print(f"  {medians[over] / medians[under]:.2f}  {text}")
    return 0


class Bench:
    """An engine that saves and loads, on one rank."""

    def __init__(self, stage: int, folder: Path) -> None:
        """Join the ranks and build the engine."""
        from harness.checkpoint.save import Saver
        from harness.checkpoint.store import Retention, Store
        from harness.config.run_config import RunConfig
        from harness.engine.build import build_engine
        from harness.engine.processes import join
        from harness.layout.world import World
        from harness.plan.make import make_plan

        self.world = World.from_environ()
        device = join(self.world)
        config = folder / f"config-{self.world.rank}.json"
        config.write_text(json.dumps(MODEL))
        train = {"global_batch": 2, "micro_batch": 1, "steps": 1000}
        keys = {"model": {"name": str(config)}, "data": {"seq_len": SEQ_LEN}, "train": train}
        ds = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        ds |= {"data_types": {"grad_accum_dtype": "fp32"}}  # as in all files of ds_configs/
        plan = make_plan(RunConfig.model_validate(keys), ds, self.world)
        self.engine, self.step = build_engine(plan, device), 0
        self.saver = Saver(Store(folder / "ours"), self.world.rank, Retention(last=1))
        self.theirs = folder / "deepspeeds"
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def train(self) -> None:
        """Take a step, so that there is something new to save."""
        import torch

        from harness.data.batch import Batch

        self.step += 1
        ids = torch.randint(0, VOCAB_SIZE, (1, SEQ_LEN + 1))
        batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].clone(), None)
        self.engine.train_batch([batch], 2 * SEQ_LEN, 1e-4)

    def round(self, number: int) -> None:
        """Measure everything once; the first to save alternates from round to round."""
        self.train()
        for name in ("save", "deepspeed")[:: 1 if number % 2 else -1]:
            # Both start with an empty folder and an idle disk.
            for folder in (self.saver.store.folder, self.theirs):
                self._only_rank_0(lambda folder=folder: shutil.rmtree(folder, ignore_errors=True))
            self._only_rank_0(os.sync)
            self._timed(name, self._save if name == "save" else self._deepspeeds)
        self._only_rank_0(os.sync)
        self.train()
        self._save(background=True)
        path = self.saver.store.at(self.step)
        while not self._all_written():
            self.train()
        self.seconds["stall"].append(self.saver.finish().stall_s)
        from harness.checkpoint.store import verified
        from harness.run.resumption import load_into

        for name, act in (
            ("read", lambda: self._each_file(path, _read)),
            ("resume", lambda: load_into(self.engine, verified(path))),
        ):
            self._each_file(path, _forget)
            self._timed(name, act)

    def _save(self, background: bool = False) -> None:
        import torch

        from harness.checkpoint.manifest import Manifest, TrainState
        from harness.run.saving import PROBE_SAMPLES

        plan, scalars = self.engine.plan, self.engine.scalars()
        model = TrainState(self.step), plan.precision, plan.model_config
        manifest = Manifest(*model, None, scalars, None, None, {"deepspeed": plan.deepspeed})
        ids = torch.zeros(PROBE_SAMPLES, SEQ_LEN, dtype=torch.int64)
        probe = {"input_ids": ids, "labels": ids.clone()}
        self.saver.start(manifest, self.engine.fragments(), probe, background)
        if not background:
            self.saver.finish()

    def _deepspeeds(self) -> None:
        self.engine.engine.save_checkpoint(self.theirs, tag="only")
        self._each_file(self.theirs, _fsync)

    def _timed(self, name: str, act: Callable[[], Any]) -> None:
        """Record the seconds from the moment that all ranks begin until all are done."""
        import torch.distributed as dist

        dist.barrier()
        began = time.perf_counter()
        act()
        dist.barrier()
        self.seconds[name].append(time.perf_counter() - began)

    def _all_written(self) -> bool:
        import torch

        written = torch.tensor(int(self.saver.written))
        torch.distributed.all_reduce(written, op=torch.distributed.ReduceOp.MIN)
        return bool(written)

    def _each_file(self, folder: Path, act: Callable[[Path], None]) -> None:
        """Call `act` on this rank's share of a folder's files."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files[self.world.rank :: self.world.world_size]:
            act(path)

    def _only_rank_0(self, act: Callable[[], Any]) -> None:
        import torch.distributed as dist

        dist.barrier()
        if self.world.rank == 0:
            act()
        dist.barrier()


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> None:
    buffer = bytearray(2**24)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def rank(stage: int, rounds: int, folder: Path) -> None:
    """Measure on this rank; rank 0 writes the seconds to FOLDER/seconds.json."""
    from harness.engine.processes import ending_together

    with ending_together():
        try:
            bench = Bench(stage, folder)
            for number in range(rounds + 1):
                if number == 1:  # the first round is a warm-up
                    bench.seconds.clear()
                bench.round(number)
            if bench.world.rank == 0:
                (folder / "seconds.json").write_text(json.dumps(bench.seconds))
        except Exception:
            (folder / f"{os.environ['RANK']}.error").write_text(traceback.format_exc())
            raise


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        sys.exit(main())
