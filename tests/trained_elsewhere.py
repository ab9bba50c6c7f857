"""On every rank: saves as transformers' Trainer does, by DeepSpeed's own calls.

    python tests/trained_elsewhere.py OUT JSON CONFIG

Also writes OUT/expected.pt, with all weights and moments in full.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[0] = str(Path(__file__).resolve().parents[1])


def trainer(out: Path, ds_json: str, config: str) -> None:
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    # For inference; compiling it takes a minute. As an attribute of deepspeed.comm, torch is torch.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo")  # ZeRO 3 partitions the model while it is built
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
    """Return each parameter's fp32 weight and moments, by DeepSpeed's own functions."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return {
        name: {
            "weight": safe_get_full_fp32_param(p).clone(),
            **{k: safe_get_full_optimizer_state(p, k).clone() for k in ("exp_avg", "exp_avg_sq")},
        }
        for name, p in engine.module.named_parameters()
    }


if __name__ == "__main__":
    folder, *rest = sys.argv[1:]
    trainer(Path(folder), *rest)
