"""The Hugging Face Trainer with the same JSON, on the same batches."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from tools.proofs.overhead.job import Job
from tools.proofs.overhead.recorder import Enough, Recorder


def trainer(job: Job, recorder: Recorder) -> None:
    """A line of metrics in every step, as the harness writes one; nothing is saved."""
    import numpy as np
    import torch
    from transformers import (
        AutoModelForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    recorder.mark("imported")

    class Stamps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            recorder.step_done()

    _allow_cpu_ranks()
    ids, labels = np.load(job.batches)
    # The labels are shifted already; `labels` is there for those who ask whether there are any.
    samples = [
        {"input_ids": i, "labels": j, "shift_labels": j} for i, j in zip(ids, labels, strict=True)
    ]
    arguments = TrainingArguments(
        f"{job.out}/trainer",
        deepspeed=job.ds_resolved,
        max_steps=job.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        dataloader_pin_memory=False,
        **_as_the_json_says(job.resolved()),
    )
    model = AutoModelForCausalLM.from_pretrained(job.weights, dtype=getattr(torch, job.dtype))
    hf_trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[Stamps()])
    with contextlib.suppress(Enough):
        hf_trainer.train()
    recorder.losses = [line["loss"] for line in hf_trainer.state.log_history if "loss" in line]
    torch.distributed.destroy_process_group()


def _allow_cpu_ranks() -> None:
    """Let it run under DeepSpeed without a GPU: neither transformers nor accelerate expect that."""
    from accelerate import DistributedType, PartialState
    from transformers import training_args

    training_args.is_torch_bf16_gpu_available = lambda: True
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)


def _as_the_json_says(ds: dict[str, Any]) -> dict[str, Any]:
    """Arguments that Trainer compares with the JSON."""
    adam = ds["optimizer"]["params"]
    return {
        "bf16": ds["bf16"]["enabled"],
        "per_device_train_batch_size": ds["train_micro_batch_size_per_gpu"],
        "gradient_accumulation_steps": ds["gradient_accumulation_steps"],
        "max_grad_norm": ds["gradient_clipping"],
        "learning_rate": adam["lr"],
        "adam_beta1": adam["betas"][0],
        "adam_beta2": adam["betas"][1],
        "adam_epsilon": adam["eps"],
        "weight_decay": adam["weight_decay"],
    }
