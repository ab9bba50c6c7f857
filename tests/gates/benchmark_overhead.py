"""Compare the step time of the harness with a bare DeepSpeed loop.

    python -m tests.gates.benchmark_overhead
    python -m tests.gates.benchmark_overhead --stages 3 --ranks 1 --rounds 6

Both train 25 million parameters on CPU ranks with the same weights, batches and resolved JSON. The
harness writes its run folder and a line of metrics in every step; the loop only trains. Each round
starts both as new processes, in alternating order. The table has the ratio of their median steps,
and the ratio of the seconds from the command to the end of the first step: median, minimum and
maximum over the rounds. A round on two ranks takes 2.5 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from harness.launch.ranks import ON_CPU, REPOSITORY, raise_errors, started
from harness.terminal import HelpFormatter
from tools.made_with import machine, versions

SEQ_LEN, ACCUMULATED = 128, 2  # tokens; micro-batches of one sample on each rank
WARM_UP, TIMED = 4, 9  # steps; in the first three the harness compares its memory with the estimate
MODEL: dict[str, Any] = {"model_type": "llama", "vocab_size": 8192, "hidden_size": 384}
MODEL |= {"intermediate_size": 1120, "num_hidden_layers": 10, "num_attention_heads": 6}
MODEL |= {"num_key_value_heads": 6, "max_position_embeddings": SEQ_LEN, "bos_token_id": 1}
MODEL |= {"eos_token_id": 2, "tie_word_embeddings": False}
RUN = (
    *(f"data.seq_len={SEQ_LEN}", f"train.steps={WARM_UP + TIMED}", "train.micro_batch=1"),
    "optim.schedule=constant",  # then the JSON determines the rate
    *("optim.warmup_steps=0", "optim.lr=1e-3", "eval.every=0", "eval.samples=1"),
    *("sample.tokens=0", "save.export=false"),
)


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3], metavar="STAGE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="RANKS")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    print(f"{machine()}; {versions()}\n")
    print(f"{'harness / bare DeepSpeed':26} {'a step':22} {'to the end of the first step'}")
    with tempfile.TemporaryDirectory() as temporary:
        weights = _weights(Path(temporary))
        for stage, ranks in product(args.stages, args.ranks):
            ratios = [
                _round(Path(temporary), weights, stage, ranks, number)
                for number in range(args.rounds)
            ]
            print(f"ZeRO {stage}, {ranks} ranks".ljust(26), *map(_range, zip(*ratios, strict=True)))
    return 0


def _range(ratios: tuple[float, ...]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})".ljust(22)


def _weights(folder: Path) -> Path:
    """Return the folder of the exported initial weights."""
    config = folder / "config.json"
    config.write_text(json.dumps(MODEL))
    words = [*RUN, f"model.name={config}", f"run.dir={folder / 'first'}"]
    subprocess.run(
        [sys.executable, "harness/train.py", *words, "train.steps=0", "save.export=true"],
        cwd=REPOSITORY,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return folder / "first" / "export"


def _round(folder: Path, weights: Path, stage: int, ranks: int, number: int) -> tuple[float, float]:
    """Return the ratios harness / bare of the step time and of the time to the first step's end."""
    from harness.data.build import build_data
    from harness.data.spec import DataSpec
    from harness.layout.world import World
    from harness.plan.command import parse_command, plan_from

    out = folder / f"{stage}-{ranks}-{number}"
    out.mkdir()
    words = ["--deepspeed", str(REPOSITORY / f"ds_configs/zero{stage}.json"), *RUN]
    words += [f"model.init_from={weights}", f"train.global_batch={ACCUMULATED * ranks}"]
    words += [f"run.dir={out / 'run'}"]
    plan = plan_from(parse_command(words), world=World(world_size=ranks, local_world_size=ranks))
    data = build_data(DataSpec.of_run(plan.config, plan.model_config))
    batch = data.train.batch(0, (WARM_UP + TIMED) * ACCUMULATED * ranks)
    job = {"words": words, "deepspeed": plan.deepspeed, "weights": str(weights), "out": str(out)}
    job |= {"ids": batch.input_ids.tolist(), "labels": batch.labels.tolist()}
    seconds = {}
    for side in ("harness", "bare")[:: -1 if number % 2 else 1]:
        path = out / f"{side}.json"
        path.write_text(json.dumps(job | {"began": time.monotonic()}))
        command = [sys.executable, "-m", "tests.gates.benchmark_overhead", side, str(path)]
        with started(command, ranks, logs=out, env=ON_CPU) as group:
            raise_errors(group.wait(), out)
        seconds[side] = json.loads((out / f"{side}.seconds").read_text())
    ours, bare = seconds["harness"], seconds["bare"]
    steps = [statistics.median(times[WARM_UP:]) for times in (ours, bare)]
    return steps[0] / steps[1], ours[0] / bare[0]


class Clock:
    """Records the duration of each step; the first one starts with the command."""

    def __init__(self, began: float) -> None:
        """`began` is time.monotonic() at the command."""
        self._last, self.seconds = began, list[float]()

    def step_done(self) -> None:
        """Record the end of a step."""
        now = time.monotonic()
        self.seconds.append(now - self._last)
        self._last = now


def harness(job: dict[str, Any], clock: Clock) -> None:
    """Train as harness/train.py does."""
    from harness.loop import build, train
    from harness.plan.command import parse_command, plan_from

    run = build(plan_from(parse_command(job["words"])))
    take_step = run.engine.train_batch

    def train_batch(*arguments: Any) -> Any:
        result = take_step(*arguments)
        clock.step_done()
        return result

    run.engine.train_batch = train_batch
    train(run)


def bare(job: dict[str, Any], clock: Clock) -> None:
    """Train as in DeepSpeed's tutorials, on batches in memory, without reading the loss."""
    import deepspeed
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    config, rank = job["deepspeed"], int(os.environ["RANK"])
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    kept = HfDeepSpeedConfig(config)  # with ZeRO 3, from_pretrained needs it
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job["weights"], dtype=dtype)
    decay = config["optimizer"]["params"]["weight_decay"]
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": wd} for wd in (decay, 0.0)]
    for name, parameter in model.named_parameters():
        groups["norm" in name or "embed" in name]["params"].append(parameter)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    del kept
    engine.train()
    shape = (WARM_UP + TIMED, ACCUMULATED, -1, 1, SEQ_LEN)  # steps, micro-batches, ranks
    both = (torch.tensor(job[name]).reshape(shape)[:, :, rank] for name in ("ids", "labels"))
    for step in zip(*both, strict=True):
        for ids, labels in zip(*step, strict=True):
            logits = engine(input_ids=ids, use_cache=False).logits
            engine.backward(cross_entropy(logits.float().flatten(0, 1), labels.flatten()))
            engine.step()
        clock.step_done()
    torch.distributed.destroy_process_group()


def side(name: str, path: str) -> None:
    """Train one side on this rank; rank 0 writes its step times beside the job."""
    job = json.loads(Path(path).read_text())
    clock = Clock(job["began"])
    {"harness": harness, "bare": bare}[name](job, clock)
    if os.environ["RANK"] == "0":
        Path(path).with_suffix(".seconds").write_text(json.dumps(clock.seconds))
    for left in Path("/dev/shm").glob(f"deepspeed_*_{os.environ['MASTER_PORT']}_*"):
        left.unlink(missing_ok=True)  # 69 MB per rank, which DeepSpeed leaves behind


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("harness", "bare"):
        side(*sys.argv[1:])
    else:
        sys.exit(main())
