"""Plans of pages: presets and shipped JSONs on machines that sliders describe.

Only presets and models/, never a path or a hub id: an address must not make the studio read files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.config.assignments import beyond_bounds
from harness.config.ds_file import load_ds_json
from harness.config.ds_json import DsJson
from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.estimate.hardware import GPUS
from harness.estimate.timeline import Estimate
from harness.layout.attention_table import ATTENTIONS
from harness.layout.optimizer_table import OPTIMIZERS
from harness.layout.recompute import REVERSIBLE
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from tools.studio_app.page import Choice, Control, Slider, Values, powers_of_two

ROOT = Path(__file__).resolve().parents[2]
_PUBLISHED_AS = {path.stem: path for path in (ROOT / "tools/studio_app/models").glob("*.json")}
"""Models of papers without a preset: LLaMA-13B and 65B (arXiv 2302.13971, table 2)."""
MODELS = tuple(
    sorted([path.stem for path in (ROOT / "harness/presets").glob("*.toml")] + [*_PUBLISHED_AS])
)
JSONS = tuple(sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json")))
PER_NODE = 8  # GPUs

MODEL = Choice("model", "Model", MODELS, "llama-3-8b")
JSON = Choice("json", "DeepSpeed JSON", JSONS, "zero3")
GPU = Choice("gpu", "GPU", tuple(GPUS), "h100-sxm")
NUM_GPUS = Slider("gpus", "GPUs", powers_of_two(1, 1024), 64)
SEQ_LEN = Slider("seq_len", "Sequence length", powers_of_two(256, 1048576), 4096, "tokens")
MICRO_BATCH = Slider("micro_batch", "Micro-batch", powers_of_two(1, 64), 1, "samples", "sample")
ACCUMULATION = Slider(
    "accumulation", "Accumulation", powers_of_two(1, 64), 8, "micro-batches", "micro-batch"
)
CHECKPOINTING = Choice("checkpointing", "Checkpointing", ("none", "selective", "full"), "none")
RECOMPUTED = Choice(
    "checkpointing", "Checkpointing", (*CHECKPOINTING.options, REVERSIBLE), CHECKPOINTING.default
)
OFFLOAD = Choice("activation_offload", "Kept activations in", ("GPU", "host memory"), "GPU")
MLP_TILES = Slider("mlp_tiles", "Tiles of an MLP", powers_of_two(1, 32), 1, "tiles", "tile")
ATTENTION = Choice("attention", "Attention", ("auto", *ATTENTIONS), "auto")
_PUBLISHED = "as published"
CONTEXT = Choice(
    "context", "Positions", (_PUBLISHED, *map(str, powers_of_two(4096, 1048576))), _PUBLISHED
)
OPTIMIZER = Choice("optimizer", "Optimizer", tuple(OPTIMIZERS), "adamw")
_BF16 = "bf16.enabled=false"
PRECISIONS: dict[str, tuple[str, ...]] = {
    "the JSON's": (),
    "bf16": (_BF16.replace("false", "true"), "fp16.enabled=false"),
    "fp16": (_BF16, "fp16.enabled=true"),
    "fp32": (_BF16, "fp16.enabled=false"),
}
"""Changes of a DeepSpeed JSON, by precision."""
PRECISION = Choice("precision", "Precision", tuple(PRECISIONS), "the JSON's")
LORA = Slider("lora", "LoRA rank, 0: all is trained", (0, *powers_of_two(2, 256)), 0)
PLAN_CONTROLS: tuple[Control, ...] = (
    MODEL,
    JSON,
    GPU,
    NUM_GPUS,
    SEQ_LEN,
    CONTEXT,
    MICRO_BATCH,
    ACCUMULATION,
    RECOMPUTED,
    OFFLOAD,
    MLP_TILES,
    ATTENTION,
    LORA,
    OPTIMIZER,
    PRECISION,
)

_KEYS = {
    "seq_len": "data.seq_len",
    "micro_batch": "train.micro_batch",
    "accumulation": "gradient_accumulation_steps",
    "stages": "pipeline.stages",
    "devices": "pipeline.stages",
    "tensor": "tensor_parallel.autotp_size",
    "optimizer": "optim.name",
}
"""Keys of a run that controls set, by their names; those of others are model.NAME."""


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
        settings=settings_of(values),
        changes=PRECISIONS[values["precision"]],
        optimizer=values["optimizer"],
    )


def settings_of(values: Values) -> dict[str, Any]:
    """Return the keys of the section `model`, its name aside, that controls set, by their names."""
    settings: dict[str, Any] = {}
    way = values.get(CHECKPOINTING.name, "none")
    if way == REVERSIBLE:
        settings["reversible"] = True
    elif way != "none":
        settings["checkpointing"] = way
    if values.get(OFFLOAD.name, OFFLOAD.default) != OFFLOAD.default:
        settings["activation_offload"] = True
    for control in (MLP_TILES, ATTENTION):
        if values.get(control.name, control.default) != control.default:
            settings[control.name] = values[control.name]
    if values.get(CONTEXT.name, _PUBLISHED) != _PUBLISHED:
        settings["context"] = int(values[CONTEXT.name])
    if values.get(LORA.name):
        settings |= {"lora": {"rank": values[LORA.name]}, "init_from": name_of(values["model"])}
    return settings


def name_of(model: str) -> str:
    """Return the model.name of a page's model: a preset, or the path of a shipped config."""
    return str(_PUBLISHED_AS.get(model, model))


def in_words(problem: str, controls: Sequence[Control]) -> str:
    """Return a problem of a plan with the label of each control beside the key that it sets."""
    for model, path in _PUBLISHED_AS.items():
        problem = problem.replace(str(path), model)
    for control in controls:
        key = _KEYS.get(control.name, f"model.{control.name}")
        name = f'"{control.label}" ({key})'
        problem = re.sub(
            rf"(?<![\w.]){re.escape(key)}(?![\w.])( is \S+ )\(default\)", rf"{key}\1here", problem
        )
        problem = re.sub(rf"(?<![\w.]){re.escape(key)}(?![\w.])", name, problem)
    return problem


def planned(
    *,
    model: str,
    ds_json: str,
    gpu: str | None,
    gpus: int,
    seq_len: int,
    micro_batch: int,
    accumulation: int = 1,
    json_text: str = "",
    settings: Mapping[str, Any] | None = None,
    changes: tuple[str, ...] = (),
    optimizer: str = "adamw",
) -> Plan:
    """Return the plan that train.py would make; `settings` are keys of the section `model`,
    `changes` key=value of the JSON.

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
            "model": {"name": name_of(model), **(settings or {})},
            "data": {"seq_len": seq_len},
            "train": {"micro_batch": micro_batch},
            "optim": {"name": optimizer},
        }
    )
    world = World(
        world_size=gpus,
        local_world_size=min(PER_NODE, gpus),
        accelerator="cuda",
        gpu=gpu,
    )
    return make_plan(run, ds, world, estimating=True)


def estimate_of(plan: Plan) -> Estimate:
    """Return the estimate of a plan, whose `inputs` are of a family that is traced, too.

    Raises ValueError for a model that can be neither counted nor traced.
    """
    if plan.estimate is None:
        raise ValueError(f"{plan.config.model.name} can be neither counted nor traced here")
    return plan.estimate


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
