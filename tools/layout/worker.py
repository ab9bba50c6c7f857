"""One rank of a pipelined model whose layers all cost the same: how much of a step it computes."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.config.run_config import RunConfig
from harness.data.batch import Batch
from harness.engine.processes import ending_together, join
from harness.layout.world import World
from harness.plan.make import make_plan

LAYERS_PER_STAGE, SEQ_LEN, VOCAB_SIZE = 4, 256, 64
STEPS, WARM_UP = 8, 2
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,  # next to no embedding and head: the stages are alike
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": False,
}


def idle_shares(stages: int, micro_batches: int, folder: Path) -> list[float]:
    """The share of each step, but for the optimizer, in which this rank did not compute."""
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

    from harness.engine.build import build_engine

    world = World.from_environ()
    device = join(world)
    config = folder / f"{world.rank}.config"
    config.mkdir()
    model = {**MODEL, "num_hidden_layers": LAYERS_PER_STAGE * stages}
    (config / "config.json").write_text(json.dumps(model))
    run = RunConfig.model_validate(
        {
            "model": {"name": str(config)},
            "data": {"seq_len": SEQ_LEN},
            "train": {"global_batch": micro_batches, "micro_batch": 1},
        }
    )
    json_file = {"pipeline": {"stages": stages}, "zero_optimization": {"stage": 1}}
    engine = build_engine(make_plan(run, json_file, world), device)
    busy = [0.0]

    def timed(function: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            function(*args, **kwargs)
            busy[0] += time.perf_counter() - began

        return run

    run_by_kind = dict(engine.engine._INSTRUCTION_MAP)
    for kind in (ForwardPass, BackwardPass):
        run_by_kind[kind] = timed(run_by_kind[kind])
    engine.engine._INSTRUCTION_MAP = run_by_kind
    ids = torch.randint(0, VOCAB_SIZE, (1, SEQ_LEN))
    shares = []
    for _ in range(STEPS):
        dist.barrier()
        before, began = busy[0], time.perf_counter()
        engine.accumulate([Batch(ids, ids, None)] * micro_batches, micro_batches * SEQ_LEN)
        seconds = time.perf_counter() - began
        shares.append(1 - (busy[0] - before) / seconds)
        engine.apply(0.0)
    return shares[WARM_UP:]


def main() -> None:
    """Write this rank's idle share of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rank = World.from_environ().rank
    with ending_together():
        try:
            shares = idle_shares(args.stages, args.micro_batches, args.out)
            (args.out / f"{rank}.json").write_text(json.dumps(shares))
        except Exception:
            (args.out / f"{rank}.error").write_text(traceback.format_exc())
            raise


if __name__ == "__main__":
    main()
