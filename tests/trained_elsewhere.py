"""On every rank: what other programs save, by those programs' own calls.

    python tests/trained_elsewhere.py harness OUT train.py's arguments
    python tests/trained_elsewhere.py trainer OUT JSON CONFIG

"harness": the main loop, saving as its earlier versions did, through DeepSpeed's `save_checkpoint`.
"trainer": transformers' Trainer. It also leaves OUT/expected.pt, all weights and moments in full.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[0] = str(Path(__file__).resolve().parents[1])


def harness(out: Path, arguments: list[str]) -> None:
    import harness.loop
    from harness.plan.command import parse_command, plan_from

    def save(run: harness.loop.Run, watch: object, background: bool) -> None:
        folder = run.folder.checkpoints_dir / f"step-{run.state.step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        run.engine.engine.save_checkpoint(str(folder), tag="engine", save_latest=False)
        (folder / "state.json").write_text(json.dumps({"state": asdict(run.state)}))

    harness.loop.save = save
    plan = plan_from(parse_command([*arguments, f"run.dir={out}"]))
    sys.exit(int(harness.loop.train(harness.loop.build(plan))))


def trainer(out: Path, ds_json: str, config: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    wish = TrainingArguments(
        str(out),
        deepspeed=ds_json,
        max_steps=3,
        save_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-2,
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (24, 16), generator=draw)
    its = Trainer(model, wish, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    its.train()
    held = in_full(its.model_wrapped)
    if dist.get_rank() == 0:
        torch.save(held, out / "expected.pt")


def in_full(engine: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """By parameter: its fp32 weight and its moments, by DeepSpeed's own functions."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return {
        name: {
            "weight": safe_get_full_fp32_param(p).clone(),
            **{k: safe_get_full_optimizer_state(p, k).clone() for k in ("exp_avg", "exp_avg_sq")},
        }
        for name, p in engine.module.named_parameters()
    }


if __name__ == "__main__":
    kind, folder, *rest = sys.argv[1:]
    if kind == "harness":
        harness(Path(folder), rest)
    else:
        trainer(Path(folder), *rest)
