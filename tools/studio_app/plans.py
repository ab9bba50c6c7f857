"""Plans behind pages: presets and shipped JSONs on machines that sliders describe.

Pages accept only presets and models/, never a path or a hub id: an address must not make the studio
read files.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config.assignments import beyond_bounds, flat
from harness.config.ds_json import DsJson, load_ds_json
from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.estimate.hardware import GPUS
from harness.estimate.memory_item import GIB
from harness.estimate.timeline import Estimate
from harness.layout.attention_table import ATTENTIONS
from harness.layout.optimizer_table import OPTIMIZERS
from harness.layout.recompute import REVERSIBLE
from harness.layout.shape import Shape
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.model_config import preset_names
from harness.plan.plan import Plan
from harness.report.charts import grouped
from harness.report.formatting import gib
from harness.report.palette import COMPONENTS
from tools.studio_app.figures import Bars, Verdict
from tools.studio_app.page import Choice, Control, Slider, Values, powers_of_two

ROOT = Path(__file__).resolve().parents[2]
_PUBLISHED_AS = {path.stem: path for path in (ROOT / "tools/studio_app/models").glob("*.json")}
"""Models from papers without a preset: LLaMA-13B and 65B (arXiv 2302.13971, table 2)."""
MODELS = tuple(sorted([*preset_names(), *_PUBLISHED_AS]))
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
"""Changes to a DeepSpeed JSON, by precision."""
PRECISION = Choice("precision", "Precision", tuple(PRECISIONS), "the JSON's")
LORA = Slider("lora", "LoRA rank, 0: all is trained", (0, *powers_of_two(2, 256)), 0)
PLAN_CONTROLS: tuple[Control, ...] = (
    *(MODEL, JSON, GPU, NUM_GPUS, SEQ_LEN, CONTEXT, MICRO_BATCH, ACCUMULATION, RECOMPUTED, OFFLOAD),
    *(MLP_TILES, ATTENTION, LORA, OPTIMIZER, PRECISION),
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
"""Run config keys by control name; a control that is not listed sets model.NAME."""


def planned(values: Values, changes: tuple[str, ...] = (), json_text: str = "") -> Plan:
    """Return the plan that train.py would make from a page's values.

    Defaults for missing values: one sample of 512 tokens, one GPU, ZeRO 1. `changes`: key=value of
    the DeepSpeed JSON; `json_text` replaces the shipped one. Raises ConfigError with every problem.
    """
    accumulation, gpus = values.get("accumulation", 1), values.get("gpus", 1)
    if json_text.strip():
        tree = {"gradient_accumulation_steps": accumulation, **_read(json_text)}
        ds, problems = DsJson(tree, "your JSON"), []
    else:
        changes = (
            f"gradient_accumulation_steps={accumulation}",
            *PRECISIONS[values.get("precision", PRECISION.default)],
            *changes,
        )
        path = ROOT / "ds_configs" / f"{values.get('json', 'zero1')}.json"
        ds, problems = load_ds_json(path, changes)
    if problems:
        raise ConfigError(problems)
    run = RunConfig.model_validate(
        {
            "model": {"name": name_of(values["model"]), **settings_of(values)},
            "data": {"seq_len": values.get("seq_len", 512)},
            "train": {"micro_batch": values.get("micro_batch", 1)},
            "optim": {"name": values.get("optimizer", OPTIMIZER.default)},
        }
    )
    local = min(PER_NODE, gpus)
    gpu = values.get("gpu")
    world = World(world_size=gpus, local_world_size=local, accelerator="cuda", gpu=gpu)
    return make_plan(run, ds, world, estimating=True)


def settings_of(values: Values) -> dict[str, Any]:
    """Return the keys of the section `model` that controls set, without the model's name."""
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


def train_command(values: Values, changes: Sequence[str] = ()) -> str:
    """Return the command that starts the run of planned(values, changes), through Slurm if it needs
    several nodes.
    """
    gpus, model = values.get("gpus", 1), Path(name_of(values["model"]))
    start = f"deepspeed --num_gpus {gpus} harness/train.py"
    if gpus > PER_NODE:
        nodes = f"--nodes={gpus // PER_NODE} --gpus-per-node={PER_NODE} --exclusive --mem=0"
        start = f"sbatch {nodes} slurm/train.sbatch"
    tokens = f"train.tokens={values['tokens']}e9 " if "tokens" in values else ""
    parts = [
        f"{start} --deepspeed ds_configs/{values.get('json', 'zero1')}.json",
        f"model.name={model.relative_to(ROOT) if model.is_absolute() else model} "
        f"data.seq_len={values.get('seq_len', 512)}",
        f"{tokens}train.micro_batch={values.get('micro_batch', 1)}",
        f"ds.gradient_accumulation_steps={values.get('accumulation', 1)}",
        *(f"ds.{change}" for change in PRECISIONS[values.get("precision", PRECISION.default)]),
        *(f"ds.{change}" for change in changes),
    ]
    if values.get("optimizer", OPTIMIZER.default) != OPTIMIZER.default:
        parts.append(f"optim.name={values['optimizer']}")
    for key, value in flat(settings_of(values)):
        text = str(value).lower() if isinstance(value, bool) else value
        parts.append(f"model.{key}={'FOLDER_OF_ITS_WEIGHTS' if key == 'init_from' else text}")
    return " \\\n  ".join(parts)


def name_of(model: str) -> str:
    """Return the model.name of a page's model: a preset, or the path of a shipped config."""
    return str(_PUBLISHED_AS.get(model, model))


def in_words(problem: str, controls: Sequence[Control]) -> str:
    """Return a plan's problem, with each key followed by the label of the control that sets it."""
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


def estimate_of(plan: Plan) -> Estimate:
    """Return a plan's estimate. Raises ValueError for a model that cannot be counted or traced."""
    if plan.estimate is None:
        raise ValueError(f"{plan.config.model.name} can be neither counted nor traced")
    return plan.estimate


def _read(text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"your JSON is not valid: {error}") from None
    if problem := beyond_bounds(tree):
        raise ConfigError(f"your JSON: {problem}")
    if not isinstance(tree, dict):
        raise ConfigError("your JSON is not an object {...}")
    return tree


def shape_of(model: str) -> Shape:
    """Return the tensors of a model. Raises ValueError for a model that is in no table."""
    shape = planned({"model": model}).shape
    if shape is None:
        raise ValueError(f"the tensors of {model} are in no table: choose another model")
    return shape


VERDICTS: dict[str, Verdict] = {"fits": "good", "tight": "warning", "does not fit": "bad"}
"""Colours of an estimate's verdict."""


def memory_bars(
    title: str, sizes: Mapping[str, Mapping[str, int]], device: int | None, height: int = 340
) -> Bars:
    """Return the six uses of memory as stacked bars, one bar per name, with the device as a
    limit.
    """
    groups = {name: grouped(parts) for name, parts in sizes.items()}
    parts = {use: [group[use] / GIB for group in groups.values()] for use in COMPONENTS}
    limits = [(f"device, {gib(device)}", device / GIB)] if device else []
    colours = {use: use for use in COMPONENTS}
    return Bars(title, "GiB", list(groups), parts, colours, limits, height=height)
