"""Train with the Trainer of transformers and DeepSpeed's ZeRO 2: `torchrun trainer.py JOB.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tools.proofs.overhead.trainer import _allow_cpu_ranks


def main() -> None:
    """Train to `last`; save after `save`, losses into `out`."""
    job = json.loads(Path(sys.argv[1]).read_text())
    _allow_cpu_ranks()
    ids, labels = np.load(job["batches"])
    samples = [
        {"input_ids": i, "labels": j, "shift_labels": j} for i, j in zip(ids, labels, strict=True)
    ]
    adam = job["adam"]
    arguments = TrainingArguments(
        job["checkpoint"],
        deepspeed=job["deepspeed"],
        per_device_train_batch_size=job["batch"] // job["ranks"],
        max_steps=job["last"],
        learning_rate=adam["lr"],
        adam_beta1=adam["betas"][0],
        adam_beta2=adam["betas"][1],
        adam_epsilon=adam["eps"],
        weight_decay=adam["weight_decay"],
        max_grad_norm=job["clip"],
        lr_scheduler_type="constant",
        bf16=False,
        save_steps=job["save"] or 10**9,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
    )
    model = AutoModelForCausalLM.from_pretrained(job["weights"], dtype=torch.float32)
    trainer = Trainer(model, arguments, train_dataset=samples)
    trainer.train(resume_from_checkpoint=job["resume"] or None)
    if trainer.is_world_process_zero():
        lines = [line for line in trainer.state.log_history if "loss" in line]
        losses = [line["loss"] for line in lines if line["step"] > job["first"]]
        Path(job["out"]).write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
