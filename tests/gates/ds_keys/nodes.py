"""A key or a section of the table, from a config model, an annotation or values."""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tests.gates.ds_keys.by_hand import CHOICES, FREE, MINIMUM, TYPES, WIDENED

Node = dict[str, Any]

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
    """Return the key at `path` with its default, and what is stated of it by hand."""
    kinds = TYPES.get(path)
    if kinds is None:
        kinds = ["string"] if default is None else [_JSON_TYPES[type(default)]]
    kinds = [*kinds, *WIDENED.get(path, ())]
    if default is None:
        kinds = [*kinds, "null"]
    choices = CHOICES.get(path)
    node = {"type": kinds, "default": default, **({"choices": choices} if choices else {})}
    return _bounded(node, MINIMUM.get(path, 0))


def _bounded(node: Node, minimum: int = 0) -> Node:
    """With a lower bound, where it is a number that lacks one."""
    default = node.get("default")
    free = isinstance(default, int | float) and default < 0
    if "above" not in node and not free and {"integer", "number"} & set(node.get("type", [])):
        node.setdefault("minimum", minimum)
    return node


def from_model(model: type[BaseModel]) -> Node:
    """Return the section that a config model parses."""
    keys: Node = {}
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
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
    """Type, default and choices of one annotated field, or the section it is the model of."""
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
    """A config model as the section that makes it; any other value as it is."""
    return (
        value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value
    )


def plain(value: Any) -> Any:
    """A default as JSON has it; what is no JSON value (a dtype, a sentinel) becomes null."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, BaseModel):
        return {}
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return value if isinstance(value, (str, float, bool, list, dict)) else None
