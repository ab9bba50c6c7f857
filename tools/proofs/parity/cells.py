"""What the gate compares: architectures, layouts, precisions, accumulation and ranks."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
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
    # Other than what transformers takes where a key is left out.
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
# Llama 3's, for an original length of eight tokens: most frequencies are changed.
_SCALED_ROTATION = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_DECODER, "model_type": "llama", "rope_parameters": _SCALED_ROTATION},
    "gpt2": {  # tied embeddings, biases, learned positions
        **_SMALL,
        "model_type": "gpt2",
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": SEQ_LEN,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-3,
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
# States of less than a megabyte stay in memory: wide enough for some to be in files.
ARCHITECTURES["llama_wide"] = {
    **ARCHITECTURES["llama"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
}
# Models that are cut into stages: five layers, which neither two nor four stages share evenly.
_DEEP = {**_DECODER, "num_hidden_layers": 5}
PIPELINED: dict[str, dict[str, Any]] = {
    "llama_deep": {**_DEEP, "model_type": "llama"},
    "llama_tied": {
        **_DEEP,
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu",
    },
    "qwen2": {**_DEEP, "model_type": "qwen2"},
    "qwen3_deep": {**_DEEP, "model_type": "qwen3"},
    "mistral": {**_DEEP, "model_type": "mistral", "sliding_window": 8},
    "gpt2_deep": {**ARCHITECTURES["gpt2"], "n_layer": 5},
    "mixtral_deep": {**ARCHITECTURES["mixtral"], "num_hidden_layers": 5},
    "gemma2": {  # scaled embeddings, soft-capped logits and scores, every other layer slides
        **_DEEP,
        "model_type": "gemma2",
        "sliding_window": 8,
        "query_pre_attn_scalar": 12,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "olmo2": {**_DEEP, "model_type": "olmo2", "pad_token_id": 0},
}
ARCHITECTURES |= PIPELINED
# The other presets' architectures without stages: on two ranks, four micro-batches each.
PRESETS = ("gemma2", "olmo2", "qwen3_moe")
ARCHITECTURES["qwen3_moe"] = {
    **_DECODER,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.02,
}
# In fp16 transformers' own model, alone in a plain loop, gives NaN: gemma2 in its first gradient,
# olmo2 after three steps, whatever the loss scale.
NOT_IN_FP16 = {"gemma2", "olmo2"}
ATTENTION = {"gemma2": "eager"}  # its soft-capped scores are in no other; sdpa for the rest
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
# Layouts that are compared in few combinations, a layout by itself in the covering set.
FEW: dict[str, dict[str, Any]] = {
    # The second copy of the weights within each of two nodes of two ranks.
    "zeropp": {**LAYOUTS["zero3"], "zero_hpz_partition_size": 2},
    # Master weights and moments in bf16: held to a plain loop that keeps them so, too.
    "zero2_bf16_states": LAYOUTS["zero2"],
    "zero3_bf16_states": LAYOUTS["zero3"],
    # Every decoder layer compiled.
    "compiled_zero3": LAYOUTS["zero3"],
    "compiled_zero1": LAYOUTS["zero1"],
}
_BF16_STATES = {
    "enabled": True,
    "bf16_master_weights_and_grads": True,
    "bf16_optimizer_states": True,
}
# Only where DeepSpeed's reads and writes can be compiled (libaio), so not in the covering set.
NVME: dict[str, dict[str, Any]] = {
    "zero3_nvme": {
        **LAYOUTS["zero3"],
        "sub_group_size": 300_000,  # on two ranks all sub-groups but the last fill a file
        "offload_optimizer": {"device": "nvme", "nvme_path": "auto", "pin_memory": False},
        "offload_param": _CPU,
    },
}
STAGES = {f"pipe{n}_zero{z}": (n, f"zero{z}") for n in (2, 4) for z in (0, 1)}
"""Pipeline layouts: how many stages, and what is under them."""
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
    def stages(self) -> int:
        """Pipeline stages."""
        return STAGES[self.layout][0] if self.layout in STAGES else 1

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.ranks // self.stages

    @property
    def micro_batch(self) -> int:
        """Samples in one micro-batch."""
        return GLOBAL_BATCH // (self.accumulation * self.data_ranks)

    @property
    def compiled(self) -> bool:
        """Whether every decoder layer is compiled."""
        return self.layout.startswith("compiled")

    @property
    def zero(self) -> str:
        """The layout under the pipeline stages, or the layout."""
        return STAGES[self.layout][1] if self.layout in STAGES else self.layout

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Whether gradients are summed over the ranks before they are over micro-batches."""
        stage: int = {**LAYOUTS, **FEW, **NVME}[self.zero]["stage"]
        return stage >= 2

    @property
    def sums(self) -> str:
        """The precision in which a rank adds up the gradients of its micro-batches."""
        if self.layout in STAGES and self.zero == "zero0":
            return self.precision
        return "fp16" if self.precision == "fp16" else "fp32"

    @property
    def has_bf16_states(self) -> bool:
        """Whether master weights and moments are in bf16, in the plain loop as well."""
        return self.layout.endswith("bf16_states")

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The DeepSpeed JSON of this cell, before it is resolved."""
        stages = {"pipeline": {"stages": self.stages}} if self.layout in STAGES else {}
        precision = dict(PRECISIONS[self.precision])
        if self.has_bf16_states:
            precision["bf16"] = _BF16_STATES
        if self.sums == "bf16":
            precision.pop("data_types", None)  # it has no other sums
        zero = {**LAYOUTS, **FEW, **NVME}[self.zero]
        return {"zero_optimization": zero, **stages, **precision}


@dataclass(frozen=True)
class Job:
    """A cell to train into a folder, with a defect planted or none."""

    cell: Cell
    defect: str | None = None
    folder: str = "."


def all_cells() -> list[Cell]:
    """Every combination."""
    flat = [name for name in ARCHITECTURES if name not in (*PIPELINED, *PRESETS, "llama_wide")]
    values = (flat, LAYOUTS, PRECISIONS, ACCUMULATIONS, RANKS)
    cells = [Cell(*combination) for combination in itertools.product(*values)]
    return cells + preset_cells() + few_cells(flat) + nvme_cells() + pipeline_cells()


def nvme_cells() -> list[Cell]:
    """Optimizer states in files, in every precision, on one and on two ranks."""
    return [
        Cell("llama_wide", layout, precision, 2, ranks)
        for layout, precision, ranks in itertools.product(NVME, PRECISIONS, RANKS)
    ]


def few_cells(architectures: list[str]) -> list[Cell]:
    """FEW layouts with every architecture and precision, two micro-batches on each of four ranks;
    on two where only the states are other than in LAYOUTS.
    """
    combinations = itertools.product(FEW, architectures, PRECISIONS)
    cells = [Cell(name, layout, precision, 2, 4) for layout, name, precision in combinations]
    halves = [replace(cell, ranks=2) for cell in cells if cell.has_bf16_states]
    whole = [cell for cell in cells if not cell.has_bf16_states]
    return whole + [cell for cell in halves if cell.precision == "bf16"]


def preset_cells() -> list[Cell]:
    """The presets' other architectures under every layout that has no stages, ZeRO-2 first."""
    layouts = dict.fromkeys(("zero2", *LAYOUTS))
    return [
        Cell(architecture, layout, precision, ACCUMULATIONS[-1], RANKS[0])
        for architecture, layout, precision in itertools.product(PRESETS, layouts, PRECISIONS)
        if precision != "fp16" or architecture not in NOT_IN_FP16
    ]


def pipeline_cells() -> list[Cell]:
    """Every pipelined combination: as many micro-batches as stages and twice that; 2 x 2 ranks."""
    cells = []
    for architecture, (layout, (stages, _)), precision in itertools.product(
        PIPELINED, STAGES.items(), PRECISIONS
    ):
        if precision == "fp16" and architecture in NOT_IN_FP16:
            continue
        for accumulation in (stages, 2 * stages):
            cells.append(Cell(architecture, layout, precision, accumulation, stages))
        if stages == 2:
            cells.append(Cell(architecture, layout, precision, stages, 2 * stages))
    return cells


def covering_cells() -> list[Cell]:
    """A small set in which every pair of values that can occur together does occur; of pipelined
    cells and of PRESETS an architecture counts by itself, as does a layout of FEW: in pairs it
    would take dozens more.

    Greedy: take the cell that covers most of what is still uncovered, until nothing is left.
    """
    candidates = [cell for cell in all_cells() if cell.layout not in NVME]
    uncovered = set().union(*(_covers(cell) for cell in candidates))
    chosen = []
    while uncovered:
        best = max(candidates, key=lambda cell: len(_covers(cell) & uncovered))
        chosen.append(best)
        uncovered -= _covers(best)
    return chosen


def _covers(cell: Cell) -> set[tuple[tuple[str, Any], ...]]:
    values: dict[str, Any] = asdict(cell)
    if cell.layout in FEW:
        kind = "bf16_states" if cell.has_bf16_states else cell.layout.partition("_zero")[0]
        return {(("layout", kind),)}
    alone = set()
    if cell.layout in STAGES or cell.architecture in PRESETS:
        alone = {(("architecture", values.pop("architecture")),)}
    return alone | set(itertools.combinations(values.items(), 2))
