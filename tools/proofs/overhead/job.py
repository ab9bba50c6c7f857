"""The common job of all sides: a model, its weights, its batches and a resolved JSON, on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
SEQ_LEN = 128  # tokens
LAYERS = 10
MODEL = {  # 25 million parameters
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1120,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ACCUMULATED = 2  # micro-batches of one sample on each rank, in a step
LEARNED = (  # the learning rate is constant: then the JSON says all of it
    f"data.seq_len={SEQ_LEN}",
    "train.micro_batch=1",
    "optim.schedule=constant",
    "optim.warmup_steps=0",
    "optim.lr=1e-3",
    "eval.every=0",
    "eval.samples=1",
    "guard.hang_floor_s=3600",  # a start that waits for its turn does not hang
)


@dataclass(frozen=True)
class Job:
    """Job of one side in one process group."""

    weights: str
    """Hugging Face folder that all sides begin with."""
    ds_given: str
    """The JSON file as a user names it."""
    ds_resolved: str
    """The same as the harness hands it to DeepSpeed."""
    batches: str
    """.npy of (2, samples, seq_len) int64, ids and shifted labels, in the harness's order."""
    arguments: tuple[str, ...]
    """Further key=value arguments of the harness."""
    ranks: int
    warm_up: int
    """Steps before it waits for its turn; the first ends the start-up."""
    steps: int
    """All of them, at most."""
    socket_path: str
    """Socket where each rank asks for its turns: turns.py."""
    out: str
    """Folder of each rank's measurements, and of the run."""
    frozen: bool
    """Collect no garbage from the end of the first step on."""
    unevaluated: bool
    """The harness: leave out the held-out loss before the first step."""
    began: float
    """time.monotonic() when the command was typed."""

    def write(self) -> Path:
        """The file that a side reads."""
        path = Path(self.out) / "job.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str) -> Job:
        """Return the job that `write` wrote."""
        values = json.loads(Path(path).read_text())
        return cls(**{**values, "arguments": tuple(values["arguments"])})

    def resolved(self) -> dict[str, Any]:
        """The JSON that DeepSpeed gets."""
        values: dict[str, Any] = json.loads(Path(self.ds_resolved).read_text())
        return values

    @property
    def dtype(self) -> str:
        """In which the model computes, by torch's name."""
        return "bfloat16" if self.resolved()["bf16"]["enabled"] else "float32"

    def micro_batches(self, rank: int) -> Iterator[list[tuple[Any, Any]]]:
        """(ids, shifted labels), (micro_batch, seq_len) int64, of one rank's steps."""
        import numpy as np
        import torch

        ds = self.resolved()
        micro, accum = ds["train_micro_batch_size_per_gpu"], ds["gradient_accumulation_steps"]
        both = np.load(self.batches)[:, : self.steps * accum * self.ranks * micro]
        shape = (2, self.steps, accum, self.ranks, micro, both.shape[-1])
        both = torch.from_numpy(both.reshape(shape)[:, :, :, rank].copy())
        for ids, labels in zip(*both, strict=True):  # (accum, micro_batch, seq_len)
            yield list(zip(ids, labels, strict=True))
