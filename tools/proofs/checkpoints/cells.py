"""What makes a round trip: architectures, precisions, and the layouts on both of its sides."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from tools.proofs.parity.cells import GLOBAL_BATCH, NVME, SEQ_LEN
from tools.proofs.parity.cells import LAYOUTS as ZERO

# Odd sizes: nothing divides by two ranks, so every share ends in padding or in the middle of a row.
_SMALL = {
    "vocab_size": 513,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "max_position_embeddings": SEQ_LEN,
}
_LLAMA = {
    **_SMALL,
    "model_type": "llama",
    "hidden_size": 45,
    "intermediate_size": 111,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "tie_word_embeddings": False},
    "llama_tied": {**_LLAMA, "tie_word_embeddings": True},
    # Two weights that nobody trains, and two buffers that belong to the model: see models.py.
    "llama_frozen": {**_LLAMA, "tie_word_embeddings": True},
    "mixtral": {
        **_LLAMA,
        "model_type": "mixtral",
        "hidden_size": 48,  # torch multiplies groups in rows of 16 bytes
        "intermediate_size": 104,
        "tie_word_embeddings": False,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        # The balancing loss is not a sum over samples: another split would be another loss.
        "output_router_logits": False,
        "router_jitter_noise": 0.0,
    },
    "gpt2_dropout": {
        **_SMALL,
        "model_type": "gpt2",
        "n_embd": 45,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": SEQ_LEN,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    },
}
# States of less than a megabyte stay in memory: wide enough for some to be in files.
WIDE = "llama_wide"
ARCHITECTURES[WIDE] = {
    **ARCHITECTURES["llama_tied"],
    "hidden_size": 270,
    "intermediate_size": 555,
    "head_dim": 90,
}
EVERYWHERE = "llama_tied"
"""Between all layouts: what is tied is held twice under pipeline stages."""
FROZEN, DROPOUT = "llama_frozen", "gpt2_dropout"

_SPLIT = {**ZERO["zero3"], "stage3_param_persistence_threshold": 0}
_STAGED = {"pipe2_zero0": "zero0", "pipe2_zero1": "zero1"}
_BF16_SUMS = {"zero1_bf16_sums": ZERO["zero1"], "zero3_bf16_sums": _SPLIT}
LAYOUTS: dict[str, dict[str, Any]] = {
    **ZERO,
    "zero3": _SPLIT,
    "zero3_offload": {**ZERO["zero3_offload"], "stage3_param_persistence_threshold": 0},
    # A second copy of the weights, which what is loaded must not leave behind.
    "zeropp": {**_SPLIT, "zero_hpz_partition_size": 2},
    "zero3_default": {"stage": 3},  # everything so small stays whole on every rank
    **{name: ZERO[zero] for name, zero in _STAGED.items()},
    **_BF16_SUMS,
}
# Go on where they stopped; between them and the others a checkpoint is rounded.
BF16_STATES = {"zero2_bf16_states": ZERO["zero2"], "zero3_bf16_states": _SPLIT}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # The first step overflows; the scale is doubled again between save and end.
    "fp16": {
        "fp16": {
            "enabled": True,
            "initial_scale_power": 32,
            "hysteresis": 1,
            "loss_scale_window": 3,
        }
    },
}
_FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
ACCUMULATION = 2  # micro-batches per rank and step


@dataclass(frozen=True)
class Side:
    """Who holds a checkpoint: a layout on so many ranks."""

    layout: str
    ranks: int

    @property
    def name(self) -> str:
        """How tables and files call it."""
        return f"{self.layout}x{self.ranks}"

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return 2 if self.layout in _STAGED else 1

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.ranks // self.stages

    @property
    def micro_batch(self) -> int:
        """Samples in one micro-batch."""
        return GLOBAL_BATCH // (ACCUMULATION * self.data_ranks)

    def deepspeed(self, precision: str) -> dict[str, Any]:
        """The DeepSpeed JSON, before it is resolved."""
        zero_optimization = {**LAYOUTS, **BF16_STATES, **NVME}[self.layout]
        ds = {"zero_optimization": zero_optimization, **PRECISIONS[precision]}
        if self.layout in BF16_STATES:
            keys = ("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states")
            ds["bf16"] = dict.fromkeys(keys, True)
        if self.stages > 1:
            ds |= {"pipeline": {"stages": self.stages}}
        zero = _STAGED.get(self.layout, self.layout)
        if precision == "bf16" and zero != "zero0" and self.layout not in _BF16_SUMS:
            ds |= _FP32_SUMS  # at stage 1 that is another optimizer: BF16_Optimizer
        return ds

    def sound(self, precision: str) -> bool:
        """Whether it trains right: see the same in tools/proofs/parity/cells.py."""
        if self.layout in _BF16_SUMS:
            return precision == "bf16"
        if self.layout in ("zero0", "zeropp"):
            return precision == "fp32"  # of zeropp enough: it cuts and keeps what zero3 does
        return self.layout != "pipe2_zero0" or precision != "fp16"


@dataclass(frozen=True)
class Cell:
    """One round trip: saved by `source`, loaded and saved again by `target`."""

    precision: str
    architecture: str
    source: Side
    target: Side

    @property
    def name(self) -> str:
        """How tables and files call it."""
        sides = f"{self.source.name}-{self.target.name}"
        return f"{self.precision}-{self.architecture}-{sides}"

    @property
    def same(self) -> bool:
        """Whether nothing at all changes: then the losses have to be equal bit by bit."""
        return self.source == self.target


def sides(precision: str) -> list[Side]:
    """All that train right; in 16 bits on one rank only what is cut otherwise there."""
    alone = tuple(LAYOUTS) if precision == "fp32" else ("zero1", "zero3")
    found = [
        Side(layout, ranks)
        for layout, ranks in itertools.product(LAYOUTS, (1, 2))
        if ranks == 2 or (layout in alone and layout not in (*_STAGED, "zeropp"))
    ]
    return [side for side in found if side.sound(precision)]


def all_cells() -> list[Cell]:
    """A tied Llama between all layouts; the others where they may differ from it."""
    few = [Side("zero1", 2), Side("zero3", 2), Side("pipe2_zero1", 2), Side("zero3", 1)]
    cells = []
    for precision in PRECISIONS:
        every = sides(precision)
        pairs = list(itertools.product(every, every))
        cells += [Cell(precision, EVERYWHERE, *pair) for pair in pairs]
        around = [*zip(few, few, strict=True), *zip(few, few[1:] + few[:1], strict=True)]
        for architecture in ("llama", "mixtral", FROZEN):
            cells += [Cell(precision, architecture, *pair) for pair in around]
        if precision == "fp32":  # the second copy of what nobody trains
            cells.append(Cell(precision, FROZEN, few[0], Side("zeropp", 2)))
        if precision == "bf16":
            halves = [Side(layout, 2) for layout in BF16_STATES]
            cells += [Cell(precision, EVERYWHERE, side, side) for side in halves]
        # Another layout draws other masks.
        cells += [Cell(precision, DROPOUT, side, side) for side in every]
    return cells + [cell for precision in PRECISIONS for cell in nvme_cells(precision)]


def nvme_cells(precision: str) -> list[Cell]:
    """Optimizer states in files: gone on with, left, reached, on other ranks."""
    one, two = Side("zero3_nvme", 1), Side("zero3_nvme", 2)
    plain = Side("zero1", 2)
    pairs = ((two, two), (two, plain), (plain, two), (two, one))
    return [Cell(precision, WIDE, *pair) for pair in pairs]


def covering_cells() -> list[Cell]:
    """A small set that holds everything that `covers` names, without NVMe: see parity/cells.py.

    Greedy: take the cell that covers most of what is still uncovered, until nothing is left.
    """
    candidates = [cell for cell in all_cells() if cell.architecture != WIDE]
    uncovered = set().union(*map(covers, candidates))
    chosen: list[Cell] = []
    while uncovered:
        best = max(candidates, key=lambda cell: len(covers(cell) & uncovered))
        chosen.append(best)
        uncovered -= covers(best)
    return chosen


def covers(cell: Cell) -> set[tuple[Any, ...]]:
    """What a cell shows: every layout is left and reached in every precision, goes on alike in one,
    every architecture is there in fp32 and bf16, and every change of the number of ranks.
    """
    precision, source, target = cell.precision, cell.source, cell.target
    shown: set[tuple[Any, ...]] = {("architecture", cell.architecture)}
    if precision != "fp16":
        shown |= {("architecture", precision, cell.architecture)}
    if cell.same and source.layout in BF16_STATES:
        return shown | {("same", "bf16_states")}
    if cell.same:
        # zeropp goes on as zero3 does.
        return shown | {("same", source.layout)} - {("same", "zeropp")}
    shown |= {("ranks", source.ranks, target.ranks)}
    if target.layout == "zeropp":
        shown |= {("second copy", cell.architecture == FROZEN)} - {("second copy", False)}
    if source.layout == target.layout:
        return shown
    return shown | {("from", precision, source.layout), ("to", precision, target.layout)}
