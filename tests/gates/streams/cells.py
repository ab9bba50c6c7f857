"""The cells of the stream simulator: every shipped JSON, and optional features of a run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.ds_json import value_of
from tests.shipped import DS_CONFIGS

STEPS = 6
MEASURED = 5  # the step whose waits are counted: not saved, evaluated or discarded
DISCARDED = 3

_LION = "optim.name=lion"  # uses torch operations, which the simulator sees; the CPU's Adam is C++
_IN_PLACE_OF = {  # settings that need more ranks than available -> sizes to use
    "pipeline.stages": 2,
    "tensor_parallel.autotp_size": 2,
    "sequence_parallel_size": 2,
    "expert_parallel.autoep_size": 2,
}


@dataclass(frozen=True)
class Cell:
    """One run in the simulator."""

    name: str
    json: str
    """Name of a JSON in ds_configs/."""
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    discards: bool = False
    """True if one step is judged a spike and skipped."""
    resumes: bool = False
    """True if a second run resumes the first and is measured instead of it."""
    adapts: bool = False
    """True if it starts from weights that stay frozen."""

    @property
    def is_plain(self) -> bool:
        """True for an unchanged shipped JSON."""
        return self.name == self.json

    @property
    def model(self) -> str:
        """Name of the model in tests/gates/models.py."""
        if self.adapts:
            return "llama_weights"
        return "mixtral" if value_of(self._values, "expert_parallel.enabled") else "llama"

    @property
    def needs_libaio(self) -> bool:
        """True if it writes optimizer states to NVMe."""
        return value_of(self._values, "zero_optimization.offload_optimizer.device") == "nvme"

    def command(self, folder: Path, steps: int) -> list[str]:
        """Return the arguments of train.py; `folder` holds the model and the text."""
        smaller = [
            f"ds.{key}={size}"
            for key, size in _IN_PLACE_OF.items()
            if isinstance(real := value_of(self._values, key), int) and real > size
        ]
        return [
            f"--deepspeed={DS_CONFIGS / self.json}.json",
            *(f"model.name={folder / self.model}", f"data.path={folder / 'text.jsonl'}"),
            *(f"data.cache_dir={folder / 'cache'}", "data.seq_len=32"),
            *("train.global_batch=8", "train.micro_batch=2", f"train.steps={steps}"),
            *("optim.warmup_steps=0", "eval.every=4", "eval.samples=8", "sample.tokens=0"),
            *("save.every=2", "save.async=true", "save.export=false", "guard.replicas_every=2"),
            *("plan.force=true", "layout.verify=false", "guard.hang_floor_s=0"),
            *("log.weights_every=1", "log.attention_every=4"),
            *([f"model.init_from={folder / self.model}"] if self.adapts else []),
            *(["ds.bf16.enabled=true"] if "bf16" in self._values else []),  # on any processor
            *smaller,
            *self.arguments,
        ]

    @property
    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((DS_CONFIGS / f"{self.json}.json").read_text())
        return values


def _ranks(name: str) -> int:
    return 4 if name == "3d" else 2


def _shipped() -> list[Cell]:
    names = sorted(path.stem for path in DS_CONFIGS.glob("*.json"))
    lion = {name: (_LION,) for name in names if "offload" in name}  # from NVMe, only Adam steps
    return [Cell(name, name, lion.get(name, ()), _ranks(name)) for name in names]


def _offloaded(*arguments: str) -> tuple[str, ...]:
    """Return ZeRO 2 settings without our wait for copies to the host."""
    return (_LION, "ds.zero_optimization.overlap_comm=false", *arguments)


_OFFLOADED_LAYERS = ("model.checkpointing=full", "model.activation_offload=true")
_VARLEN = ("model.attention=varlen", "data.document_mask=true")
_CHUNKS = "model.loss_chunk=128"  # a quarter of the vocabulary
_SKIP, _CLIP = "guard.spikes=skip", "optim.clip_value=0.001"
_ALONE = (
    *("train.micro_batch=8", "optim.clip_norm=1000", "ds.optimizer.params.fused=true"),
    *("log.weights_every=0", "log.attention_every=0", "guard.replicas_every=0"),
)
"""One micro-batch, gradients that are not scaled, Adam in one kernel as on GPUs, nothing else."""
BETWEEN_STEPS = [Cell(f"{n}-between", n, _ALONE, ranks=1) for n in ("zero1", "zero2", "zero3")]
VARIANTS = [
    *BETWEEN_STEPS,
    *(Cell(f"{n}-discard", n, (_SKIP,), discards=True) for n in ("zero1", "zero2", "zero3")),
    Cell("pipeline2-discard", "pipeline2", (_SKIP,), discards=True),
    Cell("fp32-discard", "fp32", (_SKIP,), discards=True),
    *(Cell(f"{n}-clip_value", n, (_CLIP,)) for n in ("zero1", "zero2", "zero3")),
    *(Cell(f"{n}-muon", n, ("optim.name=muon",)) for n in ("zero1", "zero2", "zero3")),
    Cell("zero2_offload-late", "zero2_offload", _offloaded()),
    Cell("zero2_offload-late-discard", "zero2_offload", _offloaded(_SKIP), discards=True),
    Cell("zero2_offload-late-clip_value", "zero2_offload", _offloaded(_CLIP)),
    Cell("zero3_offload-discard", "zero3_offload", (_LION, _SKIP), discards=True),
    *(Cell(f"{n}-resume", n, resumes=True) for n in ("zero1", "zero2", "zero3", "pipeline2")),
    Cell("zero2_offload-resume", "zero2_offload", (_LION,), resumes=True),
    *(Cell(f"{n}-documents", n, ("data.document_mask=true",)) for n in ("zero1", "pipeline2")),
    *(Cell(f"{n}-varlen", n, _VARLEN) for n in ("zero1", "zero3", "pipeline2")),
    Cell("zero3-varlen-recompute", "zero3", (*_VARLEN, "model.checkpointing=full")),
    *(Cell(f"{n}-recompute", n, ("model.checkpointing=full",)) for n in ("zero1", "zero3")),
    *(Cell(f"{n}-activation_offload", n, _OFFLOADED_LAYERS) for n in ("zero1", "zero3")),
    *(Cell(f"{n}-chunked", n, (_CHUNKS,)) for n in ("zero1", "zero3", "pipeline2")),
    *(Cell(f"{n}-selective", n, ("model.checkpointing=selective",)) for n in ("zero1", "zero3")),
    *(Cell(f"{n}-tiles", n, ("model.mlp_tiles=2",)) for n in ("zero1", "zero3")),
    *(Cell(f"{n}-lora", n, ("model.lora.rank=4",), adapts=True) for n in ("zero1", "zero3")),
    *(Cell(f"{n}-reversible", n, ("model.reversible=true",)) for n in ("zero1", "zero3")),
    Cell(
        "zero3-partitioned", "zero3", ("ds.zero_optimization.stage3_param_persistence_threshold=0",)
    ),
]


def all_cells() -> list[Cell]:
    """Return every cell."""
    return [*_shipped(), *VARIANTS]


def covering_cells() -> list[Cell]:
    """Return a few cells: each ZeRO stage, pipeline stages, offload, and judged steps."""
    names = (
        *("zero1", "zero2-discard", "zero3-clip_value", "pipeline2-documents", "zero1-varlen"),
        *("zero2_offload-late-clip_value", "zero0"),
        *(cell.name for cell in BETWEEN_STEPS),
    )
    by_name = {cell.name: cell for cell in all_cells()}
    return [by_name[name] for name in names]


CONTROLS = tuple(
    cell for cell in all_cells() if cell.name in ("zero2-discard", "zero2_offload-late-clip_value")
)
"""Cells of the self-test: nothing waits for the device, and the simulator must notice."""
