"""DeepSpeed JSONs: those that ship here, and shapes as people have them."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from functools import cache
from typing import Any

from tests.fuzz.case import SMALL_BUCKET, Case, Place
from tests.fuzz.files import replace_file
from tests.fuzz.trees import spoil, spoil_text
from tests.fuzz.values import hostile, to_json
from tests.trainer_json import ZERO_3
from tests.two_ranks import REPOSITORY

_AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)
_ADAM = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
# As in the guides of the Trainer and of fine-tuning tools.
_SHAPES: dict[str, dict[str, Any]] = {
    "the Trainer's, ZeRO 2": {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
        "optimizer": {"type": "AdamW", "params": _ADAM},
        "scheduler": {
            "type": "WarmupLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
        },
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
        "gradient_clipping": "auto",
        **_AUTO,
    },
    "the Trainer's, ZeRO 3": {
        "bf16": {"enabled": "auto"},
        "zero_optimization": ZERO_3,
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        **_AUTO,
    },
    "literals": {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": "auto",
                       "total_num_steps": "auto"},
        },
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
    },
    "monitors and profilers": {
        "zero_optimization": {"stage": 1},
        "csv_monitor": {"enabled": False, "output_path": "csv", "job_name": "a"},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1},
        "comms_logger": {"enabled": False},
        "steps_per_print": 10,
    },
    "nothing": {},
}  # fmt: skip


@cache
def _shipped() -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(REPOSITORY.glob("ds_configs/*.json"))}


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """A JSON, named by --deepspeed; planned, and where that is cheap trained with for a step."""
    path = place.folder / "ds.json"
    trees = {**{name: json.loads(text) for name, text in _shipped().items()}, **_deep_copies()}
    name = draw.choice([*trees])
    tree = trees[name]
    note, way = "valid", draw.randrange(8)
    if valid:
        path.write_text(to_json(tree))
    elif way < 5:
        note = spoil(draw, tree)
        if draw.randrange(4) == 0:
            tree[draw.choice(("optimizer", "scheduler", "fp16", "pipeline"))] = hostile(draw)
        path.write_text(to_json(tree), encoding="utf-8", errors="surrogatepass")
    elif way < 7:
        data, note = spoil_text(draw, to_json(tree))
        path.write_bytes(data)
    else:
        note = replace_file(draw, path)
    argv = ["--deepspeed", path.name]
    trained = draw.randrange(3) == 0 and way < 5 and _is_cheap(tree)
    training = [word for word in place.training() if word != SMALL_BUCKET]
    argv += training if trained else ["--dry-run"]
    if name == "zero2_bf16_states" or (not trained and "pipeline" in tree):
        valid = False  # of a device with bf16; of more ranks than one
    return Case(argv, f"{name}: {note}", valid=valid)


def _deep_copies() -> dict[str, Any]:
    return {name: deepcopy(tree) for name, tree in _SHAPES.items()}


def _is_cheap(tree: dict[str, Any]) -> bool:
    """Compiles nothing, takes one rank, and writes to no other place."""
    dear = (
        "offload",
        "pipeline",
        "monitor",
        "tensorboard",
        "wandb",
        "comet",
        "nvme",
        "aio",
        "fp16",
    )
    return not any(word in to_json(tree) for word in dear)
