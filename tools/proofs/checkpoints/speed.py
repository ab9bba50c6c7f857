"""One rank of the benchmark: saves and loads in turn, so that all of them meet the same disk."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.checkpoint.find import verified
from harness.checkpoint.manifest import Manifest, TrainState
from harness.checkpoint.save import Saver
from harness.checkpoint.store import Retention, Store
from harness.config.run_config import RunConfig
from harness.data.batch import Batch
from harness.engine.processes import ending_together, join
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.run.probe import SAMPLES, loss_of
from harness.run.resumption import load_into

SEQ_LEN, VOCAB_SIZE = 32, 16_000  # tokens
MODEL = {  # 61 million parameters
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_READ_BYTES = 2**24
Seconds = dict[str, list[float]]


class Bench:
    """An engine, and a folder for each of those who save."""

    def __init__(self, world: World, stage: int, folder: Path) -> None:
        from harness.engine.build import build_engine

        device = join(world)
        config = folder / f"config-{world.rank}.json"
        config.write_text(json.dumps(MODEL))
        run = RunConfig.model_validate(
            {
                "model": {"name": str(config)},
                "data": {"seq_len": SEQ_LEN},
                "train": {"global_batch": 2, "micro_batch": 1, "steps": 1000},
            }
        )
        json_file = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        json_file |= {"data_types": {"grad_accum_dtype": "fp32"}}  # as all files of ds_configs/
        self.world, self.stage, self.folder, self.step = world, stage, folder, 0
        self.engine = build_engine(make_plan(run, json_file, world), device)
        self.saver = Saver(Store(folder / "ours"), world.rank, Retention(last=1))
        self.seconds: Seconds = defaultdict(list)
        self.processor: Seconds = defaultdict(list)
        self.bytes: dict[str, int] = {}
        self.theirs = folder / "deepspeeds"

    def train(self) -> None:
        """One step, so that there is something new to save."""
        self.step += 1
        ids = torch.randint(0, VOCAB_SIZE, (1, SEQ_LEN + 1))
        batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].clone(), None)
        self.engine.train_batch([batch], 2 * SEQ_LEN, 1e-4)

    def timed(self, name: str, act: Callable[[], Any]) -> Any:
        """Return the result of `act`; keep its seconds, from the moment all ranks begin until all
        are done, and the processor's seconds of all ranks: others on the machine add nothing.
        """
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        result = act()
        worked = torch.tensor(time.process_time() - busy, dtype=torch.float64)
        dist.barrier()
        self.seconds[name].append(time.perf_counter() - began)
        dist.all_reduce(worked)
        self.processor[name].append(float(worked))
        return result

    def save(self, background: bool) -> Any:
        """Save as a run does, but for the probe's forward pass."""
        plan = self.engine.plan
        manifest = Manifest(
            state=TrainState(self.step),
            precision=plan.precision,
            model_config=plan.model_config,
            data_fingerprint=None,
            engine=self.engine.scalars(),
            probe_loss=None,
            held_out_loss=None,
            about={"deepspeed": plan.deepspeed},
        )
        probe = {"input_ids": torch.zeros(SAMPLES, SEQ_LEN, dtype=torch.int64)}
        self.saver.start(manifest, self.engine.fragments(), probe, background)
        return None if background else self.saver.finish()

    def round(self, number: int) -> None:
        """Everything once; who saves first changes from round to round."""
        self.train()
        for save in (self._ours, self._deepspeeds)[:: 1 if number % 2 else -1]:
            # Both begin with an empty folder, on a disk with nothing left to do.
            for folder in (self.saver.store.folder, self.theirs):
                self._only_rank_0(lambda folder=folder: shutil.rmtree(folder, ignore_errors=True))
            self._only_rank_0(os.sync)
            save()
        self._only_rank_0(os.sync)
        self._in_background()
        path = self.saver.store.at(self.step)
        for name, cold in (("cached", False), ("cold", True)):
            if cold:
                self._each_file(path, _forget)
            self.timed(f"read_{name}", lambda: self._each_file(path, _read))
            if cold:
                self._each_file(path, _forget)
            self.timed(f"resume_{name}", lambda: load_into(self.engine, verified(path)))
        self.timed("verify_cached", lambda: verified(path))
        self.timed("refresh", self.engine.refresh_weights)
        ids = torch.zeros(SAMPLES, SEQ_LEN, dtype=torch.int64)
        self.timed("probe", lambda: loss_of(self.engine, Batch(ids, ids.clone(), None)))

    def _ours(self) -> None:
        saved = self.timed("blocking", lambda: self.save(background=False))
        self.bytes["ours"] = _bytes_in(saved.path)

    def _deepspeeds(self) -> None:
        self.timed("plain", lambda: self.engine.engine.save_checkpoint(self.theirs, tag="only"))
        self.timed("plain_fsync", lambda: self._each_file(self.theirs, _fsync))
        self.bytes["plain"] = _bytes_in(self.theirs)

    def _in_background(self) -> None:
        """Save while training goes on, until all ranks have written."""
        self.train()
        before = time.perf_counter()
        self.train()
        self.seconds["step"].append(time.perf_counter() - before)
        self.save(background=True)
        step, beside = self.step, []
        while not _all(self.saver.written):
            before = time.perf_counter()
            self.train()
            beside.append(time.perf_counter() - before)
        saved = self.saver.finish()
        self.step = step
        self.seconds["stall"].append(saved.stall_s)
        self.seconds["background"].append(saved.seconds)
        self.seconds["step_meanwhile"].append(sum(beside) / max(1, len(beside)))

    def _each_file(self, folder: Path, act: Callable[[Path], None]) -> None:
        """`act` on this rank's share of a folder's files."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files[self.world.rank :: self.world.world_size]:
            act(path)

    def _only_rank_0(self, act: Callable[[], Any]) -> None:
        dist.barrier()
        if self.world.rank == 0:
            act()
        dist.barrier()


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _forget(path: Path) -> None:
    """Drop a file that is on disk from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> None:
    buffer = bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _all(value: bool) -> bool:
    agreed = torch.tensor(int(value))
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed)


def main() -> None:
    """Run the rounds and write what they took to OUT/speed.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    world = World.from_environ()
    with ending_together():
        try:
            results = _measured(world, args.stage, args.rounds, args.out)
            if world.rank == 0:
                (args.out / "speed.json").write_text(json.dumps(results))
        except Exception:
            (args.out / f"{world.rank}.error").write_text(traceback.format_exc())
            raise


def _measured(world: World, stage: int, rounds: int, folder: Path) -> dict[str, Any]:
    bench = Bench(world, stage, folder)
    for number in range(rounds + 1):
        bench.round(number)
        if number == 0:  # warms up
            bench.seconds.clear()
            bench.processor.clear()
        elif world.rank == 0:
            print(f"  stage {stage}: round {number} of {rounds}", flush=True)
    parameters = bench.engine.module.parameters()
    return {
        "seconds": bench.seconds,
        "processor": bench.processor,
        "bytes": bench.bytes,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
    }


if __name__ == "__main__":
    main()
