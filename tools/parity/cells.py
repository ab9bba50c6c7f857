"""What the gate compares: architectures, layouts, precisions, accumulation and ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

VOCAB_SIZE = 128
SEQ_LEN = 32  # tokens
GLOBAL_BATCH = 8  # samples
STEPS = 20

_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "max_position_embeddings": SEQ_LEN,
}
_DECODER = {
    **_SMALL,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "tie_word_embeddings": False,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_DECODER, "model_type": "llama"},
    "gpt2": {  # tied embeddings, biases, learned positions
        **_SMALL,
        "model_type": "gpt2",
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": SEQ_LEN,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "qwen3": {**_DECODER, "model_type": "qwen3"},
    "mixtral": {  # experts, and a balancing loss that is not linear in the micro-batch
        **_DECODER,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.02,
        "router_jitter_noise": 0.0,
    },
}
# Buckets and thresholds scaled down with the model: several buckets a step, parameters larger than
# a bucket, and ZeRO-3 that really partitions, as in a large run.
_BUCKETS = {"reduce_bucket_size": 4096, "allgather_bucket_size": 4096}
_LIVE = {
    "stage3_param_persistence_threshold": 64,
    "stage3_prefetch_bucket_size": 4096,
    "stage3_max_live_parameters": 20_000,
    "stage3_max_reuse_distance": 20_000,
    "sub_group_size": 20_000,
}
_CPU = {"device": "cpu", "pin_memory": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1, **_BUCKETS},
    "zero2": {"stage": 2, **_BUCKETS},
    "zero3": {"stage": 3, **_BUCKETS, **_LIVE},
    "zero2_offload": {"stage": 2, **_BUCKETS, "offload_optimizer": _CPU},
    "zero3_offload": {
        "stage": 3,
        **_BUCKETS,
        **_LIVE,
        "offload_optimizer": _CPU,
        "offload_param": _CPU,
    },
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12}},
}
# Where several cells cover equally many pairs, the covering set takes the first.
ACCUMULATIONS = (1, 4)
RANKS = (2, 1)


@dataclass(frozen=True)
class Cell:
    """One combination; `accumulation` is micro-batches per rank and optimizer step."""

    architecture: str
    layout: str
    precision: str
    accumulation: int
    ranks: int

    @property
    def name(self) -> str:
        """How tables and files call it."""
        return "-".join(str(value) for value in asdict(self).values())

    @property
    def micro_batch(self) -> int:
        """Samples in one micro-batch."""
        return GLOBAL_BATCH // (self.accumulation * self.ranks)

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The DeepSpeed JSON of this cell, before it is resolved."""
        return {"zero_optimization": LAYOUTS[self.layout], **PRECISIONS[self.precision]}

    @property
    def refused(self) -> str | None:
        """Why the harness refuses this combination, None where it trains."""
        if self.layout == "zero0" and self.precision != "fp32":
            return f"DeepSpeed's stage 0 does not train right in {self.precision}"
        return None


@dataclass(frozen=True)
class Job:
    """A cell to train into a folder, with a defect planted or none."""

    cell: Cell
    defect: str | None = None
    folder: str = "."


def all_cells() -> list[Cell]:
    """Every combination, refused ones included."""
    values = (ARCHITECTURES, LAYOUTS, PRECISIONS, ACCUMULATIONS, RANKS)
    return [Cell(*combination) for combination in itertools.product(*values)]


def covering_cells() -> list[Cell]:
    """A small set in which every pair of values that can occur together does occur.

    Greedy: take the cell that covers most of the pairs still uncovered, until none is left.
    """
    candidates = [cell for cell in all_cells() if cell.refused is None]
    uncovered = set().union(*(_pairs(cell) for cell in candidates))
    chosen = []
    while uncovered:
        best = max(candidates, key=lambda cell: len(_pairs(cell) & uncovered))
        chosen.append(best)
        uncovered -= _pairs(best)
    return chosen


def _pairs(cell: Cell) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    values: Iterable[tuple[str, Any]] = asdict(cell).items()
    return set(itertools.combinations(values, 2))
