"""Write harness/config/ds_keys.json: the keys of a DeepSpeed JSON, each with type and default.

They are taken from the installed DeepSpeed's own config models and parsers, so that the packages
below the engine know its keys without importing it. Run it again after a DeepSpeed upgrade:

    python -m tests.gates.generate_ds_keys

A section is {"keys": {...}}, with "free": true if it accepts any other key. A key is
{"type": [JSON types], "default": ...} and, if DeepSpeed states them, "choices", "minimum", "above"
and "maximum". A number without a bound of DeepSpeed's is at least 0, unless its default is
negative. Other keys are {"same_as": another name of the key}; {"replaced_by": the new key,
"becomes": the value that true becomes there} if deprecated; and {"removed": DeepSpeed's message}.

"defaults" holds DeepSpeed's values for missing parameters of an optimizer or scheduler section.
"""

import dataclasses
import enum
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # affects some defaults; DeepSpeed logs less

import deepspeed
from deepspeed.autotuning.config import DeepSpeedAutotuningConfig
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.config import (
    _REMOVED_TOP_LEVEL_CONFIG_KEYS,
    _REMOVED_ZERO_CONFIG_KEYS,
    DeepSpeedConfig,
    DtypeEnum,
    get_pipeline_config,
)
from deepspeed.runtime.constants import GRADIENT_ALLREDUCE_OP_SUPPORTED
from deepspeed.runtime.data_pipeline.config import get_data_efficiency_config
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR
from deepspeed.runtime.model_checkpointing.config import (
    get_checkpoint_config,
    get_checkpoint_writer_config,
)
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel

from harness.launch.ranks import REPOSITORY
from tests.tables import beside

Node = dict[str, Any]

_TABLES = beside(__file__, "generate_ds_keys.toml")
TYPES: dict[str, list[str]] = _TABLES["types"]
WIDENED: dict[str, list[str]] = _TABLES["widened"]
OURS: dict[str, Node] = _TABLES["ours"]
MINIMUM: dict[str, int] = _TABLES["minimum"]
ABOVE: dict[str, int] = _TABLES["above"]
READ_ELSEWHERE: dict[str, Any] = _TABLES["read_elsewhere"]
FREE: list[str] = _TABLES["free"]
# Strings that DeepSpeed checks in its parsers.
_DTYPES = sorted({name for dtype in DtypeEnum for name in dtype._all_values[1:]})
CHOICES: dict[str, list[str]] = {
    "gradient_allreduce_op": list(GRADIENT_ALLREDUCE_OP_SUPPORTED),
    **{key: ["fp16", "bf16", "fp32"] for key in _TABLES["with_communicated_dtype"]},
    **dict.fromkeys(_TABLES["with_dtype"], _DTYPES),
}


# A key or a section of the table, from a config model, an annotation or values.

_JSON_TYPES: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
    list: "array",
    tuple: "array",
    dict: "object",
    type(None): "null",
}
_ANY = sorted(set(_JSON_TYPES.values()))


def from_values(path: str, values: Mapping[str, Any]) -> Node:
    """Return the section at `path` whose keys have these defaults."""
    keys: Node = {}
    for name, value in values.items():
        inner = f"{path}.{name}"
        if isinstance(value, dict):
            keys[name] = from_values(inner, value)
        else:
            keys[name] = leaf(inner, value)
    return {"keys": keys, **({"free": True} if path in FREE else {})}


def leaf(path: str, default: Any) -> Node:
    """Return the key at `path` with its default and its entries in the tables above."""
    kinds = TYPES.get(path)
    if kinds is None:
        kinds = ["string"] if default is None else [_JSON_TYPES[type(default)]]
    kinds = [*kinds, *WIDENED.get(path, ())]
    if default is None:
        kinds = [*kinds, "null"]
    choices = CHOICES.get(path)
    node = {"type": kinds, "default": default, **({"choices": choices} if choices else {})}
    if path in ABOVE:
        node["above"] = ABOVE[path]
    return _bounded(node, MINIMUM.get(path, 0))


def _bounded(node: Node, minimum: int = 0) -> Node:
    """Return the node, with a lower bound if it is a number without one."""
    default = node.get("default")
    free = isinstance(default, int | float) and default < 0
    if "above" not in node and not free and {"integer", "number"} & set(node.get("type", [])):
        node.setdefault("minimum", minimum)
    return node


def from_model(model: type[BaseModel]) -> Node:
    """Return the section that a config model parses."""
    keys: Node = {}
    for name, field in model.model_fields.items():
        extra: Any = field.json_schema_extra
        default = plain(field.get_default(call_default_factory=True))
        node = from_annotation(field.annotation, default)
        for bound in field.metadata:
            for attribute, word in (("ge", "minimum"), ("gt", "above"), ("le", "maximum")):
                if hasattr(bound, attribute):
                    node[word] = getattr(bound, attribute)
        if isinstance(extra, dict) and extra.get("deprecated"):
            new = model.model_fields.get(extra["new_param"])
            node["replaced_by"] = (new and new.alias) or extra["new_param"]
            if extra.get("set_new_param", True):
                becomes = extra.get("new_param_fn", lambda value: value)(True)
                node["becomes"] = _set_fields(becomes)
        keys[field.alias or name] = _bounded(node)
        if field.alias and field.alias != name:
            keys[name] = {"same_as": field.alias}
    return {"keys": keys}


def from_annotation(annotation: Any, default: Any) -> Node:
    """Return type, default and choices of an annotated field, or its config model's section."""
    kinds: list[str] = []
    choices: list[Any] = []
    alternatives = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType)
        else (annotation,)
    )
    for each in alternatives:
        origin = typing.get_origin(each) or each
        if origin is typing.Literal:
            choices += typing.get_args(each)
            kinds.append("string")
        elif inspect.isclass(origin) and issubclass(origin, BaseModel):
            return from_model(origin) | ({"nullable": True} if len(alternatives) > 1 else {})
        elif inspect.isclass(origin) and issubclass(origin, enum.Enum):
            choices += [member.value for member in origin]
            kinds.append("integer" if issubclass(origin, int) else "string")
        else:
            kinds += [_JSON_TYPES[origin]] if origin in _JSON_TYPES else _ANY
    node: Node = {"type": list(dict.fromkeys(kinds)), "default": default}
    return node | ({"choices": list(dict.fromkeys(choices))} if choices else {})


def _set_fields(value: Any) -> Any:
    """Return a config model as its section; any other value unchanged."""
    return (
        value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value
    )


def plain(value: Any) -> Any:
    """Return a default as a JSON value; null if JSON cannot express it (a dtype, a sentinel)."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, BaseModel):
        return {}
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return value if isinstance(value, (str, float, bool, list, dict)) else None


# Every section of the JSON, as read by the corresponding part of DeepSpeed.


class Recorder(dict[str, Any]):
    """A config section that records the keys a parser asks for, with their defaults."""

    def __init__(self, section: Mapping[str, Any] | None = None) -> None:
        super().__init__(section or {})
        self.asked: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value as a dict does, and record the key."""
        self.asked.setdefault(key, default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:
        """Return the recorder itself, so that `in config.keys()` is recorded too."""
        return self


def all_sections() -> dict[str, Node]:
    """Return the sections by name, without top-level keys."""
    sections = {name: from_model(resolve_name(m)) for name, m in _TABLES["models"].items()}
    hints = typing.get_type_hints(AutoEPConfig)
    expert_parallel = {
        field.name: from_annotation(hints[field.name], plain(field.default))
        for field in dataclasses.fields(AutoEPConfig)
        if not field.name.startswith("_")
    }
    flops, autotuning, checkpoint, writer = (Recorder() for _ in range(4))
    DeepSpeedFlopsProfilerConfig({"flops_profiler": flops})
    DeepSpeedAutotuningConfig({"autotuning": autotuning})
    get_checkpoint_config({"checkpoint": checkpoint})
    get_checkpoint_writer_config({"writer": writer})
    whole = {
        "activation_checkpointing": ACT_CHKPT_DEFAULT,
        "aio": AIO_DEFAULT_DICT,
        "autotuning": autotuning.asked,
        "flops_profiler": flops.asked,
        "pipeline": {**get_pipeline_config({}), "use_reentrant": True},
        "checkpoint": {
            **_asked_by_config("checkpoint"),
            **checkpoint.asked,
            "writer": writer.asked,
            "parallel_write": {"pipeline_stage": False},
        },
        "data_efficiency": get_data_efficiency_config({}),
        "data_types": _asked_by_config("data_types"),
        "torch_autocast": {**_asked_by_config("torch_autocast"), "dtype": None},
        "optimizer": {"type": None, "params": {}, "legacy_fusion": False},
        "scheduler": {"type": None, "params": {}},
    }
    sections |= {name: from_values(name, values) for name, values in whole.items()}
    sections["expert_parallel"] = {"keys": expert_parallel}
    sections["timers"] = {"keys": {"throughput": from_model(DeepSpeedThroughputTimerConfig)}}
    return sections


def _asked_by_config(section: str) -> dict[str, Any]:
    """Return the keys of one section that DeepSpeedConfig itself asks for."""
    recorder = Recorder()
    DeepSpeedConfig._initialize_params(object.__new__(DeepSpeedConfig), {section: recorder})
    return recorder.asked


# DeepSpeed's defaults for missing parameters of an optimizer or scheduler section.

_SCHEDULERS = (WarmupLR, WarmupDecayLR, WarmupCosineLR)
_LEARNED = ("lr", "betas", "eps", "momentum", "weight_decay")
_SCHEDULED = ("warmup_max_lr", "warmup_num_steps", "warmup_type", "cos_min_ratio")


def optimizer_defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults of the optimizer classes, by DeepSpeed's name in lower case."""
    defaults = {}
    for name, classes in _TABLES["optimizers"].items():
        first, *others = [_defaults(resolve_name(kind), _LEARNED) for kind in classes]
        assert all(first == defaults_ for defaults_ in others), f"{name}: {first}, {others}"
        defaults[name] = first
    del defaults["adafactor"]["eps"]  # because it is a pair
    return {**defaults, "muon": _TABLES["muon"]}


def scheduler_defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults of the scheduler classes by name."""
    return {kind.__name__: _defaults(kind, _SCHEDULED) for kind in _SCHEDULERS}


def _defaults(kind: type, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the defaults of a class's arguments among `names`, except None."""
    arguments = inspect.signature(kind).parameters
    values = {name: arguments[name].default for name in names if name in arguments}
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
    return {name: value for name, value in plain.items() if value is not None}


OUTPUT = REPOSITORY / "harness" / "config" / "ds_keys.json"


def build_keys() -> Node:
    """Return the whole table, nested as the JSON is."""
    top = Recorder()
    DeepSpeedConfig._initialize_params(object.__new__(DeepSpeedConfig), top)
    sections = all_sections()
    keys: Node = {}
    for key, default in sorted({**top.asked, **READ_ELSEWHERE, **sections}.items()):
        keys[key] = sections.get(key) or leaf(key, default)
    keys["bfloat16"] = {"same_as": "bf16"}
    for key, node in OURS.items():
        section, _, name = key.partition(".")
        keys[section]["keys"][name] = node
    keys |= _removed(_REMOVED_TOP_LEVEL_CONFIG_KEYS)
    keys["zero_optimization"]["keys"] |= _removed(_REMOVED_ZERO_CONFIG_KEYS)
    defaults = {"optimizer": optimizer_defaults(), "scheduler": scheduler_defaults()}
    return {"deepspeed": deepspeed.__version__, "keys": keys, "defaults": defaults}


def _removed(messages: Mapping[str, str]) -> Node:
    """Return the removed keys with DeepSpeed's message, without its link."""
    link = re.compile(r"\s*See https\S+\s*$")
    return {key: {"removed": link.sub("", text).strip()} for key, text in messages.items()}


def as_text() -> str:
    """Return the exact content of ds_keys.json."""
    return json.dumps(build_keys(), indent=1) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(as_text(), encoding="utf-8")
    print(f"wrote {OUTPUT}")
