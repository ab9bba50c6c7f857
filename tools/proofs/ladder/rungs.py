"""The ways to need less memory for long samples, and what the estimate says of each."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.config.run_config import RunConfig
from harness.estimate.rank_timeline import rank_timeline
from harness.layout.grid import axes_json
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.memory import memory_inputs
from harness.plan.plan import Plan
from tools.proofs.memory.compare import PEAKS

TOKENS = 32_768
DOCUMENT = 256
"""Tokens of a document, within which alone tokens attend: attention takes time that grows with the
sample, not with its square, and what is kept of it is the same."""
STEP = 1_024
"""Tokens by which a longest sample is exact."""
_MODEL = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2**24,
    "tie_word_embeddings": False,
}
_PARTS = {"mlp_tiles": 8, "loss_chunk": 128}
RUNGS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"checkpointing": "selective"},
    "every second layer": {"checkpointing": 2},
    "full": {"checkpointing": "full"},
    "full, offloaded": {"checkpointing": "full", "activation_offload": True},
    "reversible": {"reversible": True},
    "tiles and chunks": _PARTS,
    "full, tiles and chunks": {"checkpointing": "full", **_PARTS},
    "offloaded, tiles and chunks": {
        "checkpointing": "full",
        "activation_offload": True,
        **_PARTS,
    },
    "reversible, tiles and chunks": {"reversible": True, **_PARTS},
    "two ranks": {},
    "two ranks, full, tiles and chunks": {"checkpointing": "full", **_PARTS},
}
"""Keys of the run config's model section, by name. Two ranks share a sample."""


def write_model(folder: Path) -> None:
    """Write the model's config, before ranks read it."""
    (folder / "config.json").write_text(json.dumps(_MODEL))


@dataclass(frozen=True)
class Job:
    """A rung to measure with a sample of so many tokens."""

    rung: str
    tokens: int = TOKENS

    @property
    def ranks(self) -> int:
        """Ranks that share the sample."""
        return 2 if self.rung.startswith("two ranks") else 1

    @property
    def label(self) -> str:
        """Line for the terminal, and name of what it gives."""
        return f"{self.rung}, {self.tokens} tokens"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """Return what `asdict` gave as JSON."""
        return cls(**values)

    def plan(self, world: World, folder: Path) -> Plan:
        """Return the plan of a step of one sample; `folder` is that of `write_model`."""
        model = {"name": str(folder / "config.json"), "attention": "varlen", "loss_chunk": 0}
        run = RunConfig.model_validate(
            {
                "model": {**model, **RUNGS[self.rung]},
                "data": {"seq_len": self.tokens, "document_mask": True},
                "train": {"global_batch": 1, "micro_batch": 1, "steps": 2},
                "optim": {"warmup_steps": 0},
            }
        )
        buckets = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
        zero = {"stage": 1, **buckets} if self.ranks > 1 else {"stage": 0}
        ds = {"zero_optimization": zero, **axes_json(1, 1, self.ranks, 1)}
        return make_plan(run, ds, world, estimating=True)

    def estimated_bytes(self, folder: Path) -> int:
        """Return what a rank holds at most while it runs forward and backward: device and host are
        one memory on a CPU.
        """
        inputs = memory_inputs(self.plan(World(0, self.ranks, 0, self.ranks), folder))
        assert inputs is not None, "a llama's memory is known"
        timeline = rank_timeline(inputs, 0)
        return max(
            sum(
                size
                for place in ("device", "host")
                for component, size in timeline.phase(phase, place).items()
                if component != "process"
            )
            for phase in PEAKS["accumulate"]
        )

    def longest(self, limit_bytes: int, folder: Path) -> Job:
        """Return the job with the longest sample that a rank's limit holds by the estimate."""
        fits, too_long = 0, 2**13  # in STEPs
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            job = replace(self, tokens=middle * STEP)
            if job.estimated_bytes(folder) <= limit_bytes:
                fits = middle
            else:
                too_long = middle
        return replace(self, tokens=fits * STEP)
