"""Plans of pages: presets and shipped JSONs on machines that sliders describe.

Only presets, never a path or a hub id: an address must not make the studio read files.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.config.bounds import beyond_bounds
from harness.config.ds_file import load_ds_json
from harness.config.ds_json import DsJson
from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.estimate.hardware import GPUS
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from tools.studio_app.page import Choice, Control, Slider, Values, powers_of_two

ROOT = Path(__file__).resolve().parents[2]
MODELS = tuple(sorted(path.stem for path in (ROOT / "harness/presets").glob("*.toml")))
JSONS = tuple(sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json")))
PER_NODE = 8  # GPUs

MODEL = Choice("model", "Model", MODELS, "llama-3-8b")
JSON = Choice("json", "DeepSpeed JSON", JSONS, "zero3")
GPU = Choice("gpu", "GPU", tuple(GPUS), "h100-sxm")
NUM_GPUS = Slider("gpus", "GPUs", powers_of_two(1, 1024), 64)
SEQ_LEN = Slider("seq_len", "Sequence length", powers_of_two(256, 131072), 4096, "tokens")
MICRO_BATCH = Slider("micro_batch", "Micro-batch", powers_of_two(1, 64), 1, "samples", "sample")
ACCUMULATION = Slider(
    "accumulation", "Accumulation", powers_of_two(1, 64), 8, "micro-batches", "micro-batch"
)
CHECKPOINTING = Choice("checkpointing", "Checkpointing", ("none", "selective", "full"), "none")
PLAN_CONTROLS: tuple[Control, ...] = (
    MODEL,
    JSON,
    GPU,
    NUM_GPUS,
    SEQ_LEN,
    MICRO_BATCH,
    ACCUMULATION,
    CHECKPOINTING,
)

LLAMA_13B = {"num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 13824}
"""LLaMA-13B over a Llama preset (arXiv 2302.13971, table 2)."""
LLAMA_13B |= {"num_attention_heads": 40, "num_key_value_heads": 40, "vocab_size": 32000}
LLAMA_65B = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 22016}
"""LLaMA-65B, from the same table."""
LLAMA_65B |= {"num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 32000}


def plan_of(values: Values, json_text: str = "") -> Plan:
    """Return the plan of PLAN_CONTROLS; `json_text` replaces the shipped JSON.

    Raises ConfigError with every problem.
    """
    return planned(
        model=values["model"],
        ds_json=values["json"],
        json_text=json_text,
        gpu=values["gpu"],
        gpus=values["gpus"],
        seq_len=values["seq_len"],
        micro_batch=values["micro_batch"],
        accumulation=values["accumulation"],
        checkpointing=values["checkpointing"],
    )


def planned(
    *,
    model: str,
    ds_json: str,
    gpu: str | None,
    gpus: int,
    seq_len: int,
    micro_batch: int,
    accumulation: int = 1,
    checkpointing: str | int = "none",
    json_text: str = "",
    overrides: dict[str, Any] | None = None,
    changes: tuple[str, ...] = (),
) -> Plan:
    """Return the plan that train.py would make; `changes` are key=value of the JSON.

    Raises ConfigError with every problem.
    """
    set_over = (f"gradient_accumulation_steps={accumulation}", *changes)
    if json_text.strip():
        tree = _read(json_text)
        ds, problems = (
            DsJson({"gradient_accumulation_steps": accumulation, **tree}, "your JSON"),
            [],
        )
    else:
        ds, problems = load_ds_json(ROOT / "ds_configs" / f"{ds_json}.json", set_over)
    if problems:
        raise ConfigError(problems)
    run = RunConfig.model_validate(
        {
            "model": {
                "name": model,
                "checkpointing": checkpointing,
                "overrides": overrides or {},
            },
            "data": {"seq_len": seq_len},
            "train": {"micro_batch": micro_batch},
        }
    )
    world = World(
        world_size=gpus,
        local_world_size=min(PER_NODE, gpus),
        accelerator="cuda",
        gpu=gpu,
    )
    return make_plan(run, ds, world, estimating=True)


def _read(text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"your JSON is not valid: {error}") from None
    if problem := beyond_bounds(tree):
        raise ConfigError(f"your JSON: {problem}")
    if not isinstance(tree, dict):
        raise ConfigError("your JSON is no object {...}")
    return tree


@lru_cache
def shipped_json(name: str) -> str:
    """Return the text of a shipped JSON."""
    return (ROOT / "ds_configs" / f"{name}.json").read_text(encoding="utf-8")
