"""Train with FSDP 2: `accelerate launch --config_file fsdp.yaml fsdp.py JOB.json`.

A loop of one's own, as accelerate's documentation has it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM


def main() -> None:
    """Train from `first` to `last`; save after `save`, losses into `out`."""
    job = json.loads(Path(sys.argv[1]).read_text())
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(job["weights"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **job["adam"])
    model, optimizer = accelerator.prepare(model, optimizer)
    if job["resume"]:
        accelerator.load_state(job["resume"])
    ranks, batch = accelerator.num_processes, job["batch"]
    both = torch.from_numpy(np.load(job["batches"]))  # (2, samples, seq_len) int64
    losses = []
    for step in range(job["first"], job["last"]):
        of_step = both[:, step * batch : (step + 1) * batch]
        ids, labels = of_step[:, accelerator.process_index :: ranks]
        logits = model(input_ids=ids, use_cache=False).logits
        summed = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        # FSDP averages over the ranks; the mean over the targets of all is wanted.
        share = summed / int((of_step[1] != -100).sum())
        accelerator.backward(share * ranks)
        accelerator.clip_grad_norm_(model.parameters(), job["clip"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(share.detach(), "sum")))
        if step + 1 == job["save"]:
            accelerator.save_state(job["checkpoint"])
    if accelerator.is_main_process:
        Path(job["out"]).write_text(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
