"""One process of one side: `python -m tools.proofs.overhead.side harness|bare|trainer JOB.json`.

The same training by three programs. Each says when a step has ended; nothing else is added.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tools.proofs.overhead.job import Job
from tools.proofs.overhead.recorder import Enough, Recorder


def harness(job: Job, recorder: Recorder) -> None:
    """Train as harness/train.py does."""
    from harness.plan.command import parse_command, plan_from

    command = parse_command(["--deepspeed", job.ds_given, *job.arguments])
    plan = plan_from(command)
    recorder.mark("planned")
    from harness import loop
    from harness.loop import build, train

    if job.unevaluated:
        loop.evaluate_at_start = lambda run: None
    recorder.mark("imported")
    run = build(plan)
    recorder.mark("built")
    take_step = run.engine.train_batch

    def train_batch(*arguments: Any) -> Any:
        if recorder.is_starting:
            recorder.mark("evaluated")
        began = time.monotonic()
        result = take_step(*arguments)
        recorder.engine_s = time.monotonic() - began
        recorder.step_done()
        return result

    run.engine.train_batch = train_batch
    try:
        train(run)
    except Enough:
        lines = run.folder.read_metrics() if run.is_writer else []
        recorder.losses = [line["loss"] for line in lines if "loss" in line]


def bare(job: Job, recorder: Recorder) -> None:
    """As DeepSpeed's tutorials have it. The batches wait in memory; no loss is read before the end,
    nothing is written.
    """
    import deepspeed
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    recorder.mark("imported")
    config = job.resolved()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    kept = HfDeepSpeedConfig(config)  # under ZeRO 3 from_pretrained asks for it
    model = AutoModelForCausalLM.from_pretrained(job.weights, dtype=getattr(torch, job.dtype))
    decay = config["optimizer"]["params"]["weight_decay"]
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": wd} for wd in (decay, 0.0)]
    for name, parameter in model.named_parameters():
        groups["norm" in name or "embed" in name]["params"].append(parameter)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    del kept
    recorder.mark("built")
    engine.train()
    losses = []
    try:
        for step in job.micro_batches(recorder.rank):
            total = 0.0
            for ids, labels in step:
                logits = engine(input_ids=ids, use_cache=False).logits
                loss = cross_entropy(logits.float().flatten(0, 1), labels.flatten())
                engine.backward(loss)
                engine.step()
                total += loss.detach() / len(step)
            losses.append(total)
            recorder.step_done()
    except Enough:
        means = torch.stack(losses)
        torch.distributed.all_reduce(means, op=torch.distributed.ReduceOp.AVG)
        recorder.losses = means.tolist()
    torch.distributed.destroy_process_group()


def trainer(job: Job, recorder: Recorder) -> None:
    """In a file of its own."""
    from tools.proofs.overhead.trainer import trainer as run

    run(job, recorder)


SIDES = {"harness": harness, "bare": bare, "trainer": trainer}


def main() -> None:
    """Whatever goes wrong lies in the job's folder."""
    name, path = sys.argv[1:]
    job, rank = Job.read(path), int(os.environ["RANK"])
    try:
        recorder = Recorder(job, rank)
        SIDES[name](job, recorder)
        recorder.write()
    except BaseException:
        text = f"{name}, rank {rank}:\n{traceback.format_exc()}"
        (Path(job.out) / f"{rank}.error").write_text(text)
        raise
    finally:
        # 69 MB for each rank, which DeepSpeed leaves behind; the harness makes none.
        left = f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_{rank}"
        for buffer in Path("/dev/shm").glob(left):
            buffer.unlink()


if __name__ == "__main__":
    main()
