"""Families of decoders, read from families.toml: the facts about each `model_type`."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

# Keys of any config that hold a size; the first is the one that transformers usually takes.
SIZE_KEYS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head": ("head_dim",),
    "width": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "positions": (
        *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"),
    ),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}

_FILE = Path(__file__).with_name("families.toml")
_NOT_INHERITED = {"like", "compared"}  # what was compared for one family says nothing of another
_COMPARISONS = {"activations", "divided activations", "divided experts", "liger", "halves"}
_WINDOW_RULES = {"every", "even", "asked", "upper"}


@dataclass(frozen=True)
class Module:
    """A module and its parameters, as one line of the table describes them."""

    kind: str
    name: str
    """Within the model, or within the layer."""
    sizes: tuple[str, ...]
    transposed: bool = False
    """True if a linear layer's weight is (in, out)."""
    bias: tuple[str, ...] | None = None
    """Conditions of which one gives it a bias; empty for always, None for never."""
    conditions: tuple[str, ...] = ()
    """Conditions that all hold where the module is there."""


@dataclass(frozen=True)
class Family:
    """One `model_type`; families.toml explains each key.

    The defaults are those of a family that has no table.
    """

    name: str
    # The config class: its keys, and what it assumes where they are absent
    keys: Mapping[str, list[str]] = field(default_factory=dict)
    tied: bool = False
    head_dim: int | None = None
    sliding_window: int | None = None
    slides: str | None = None
    mlp_ratio: int | None = None
    max_positions: int | None = None
    kv_heads: tuple[str, ...] = ()
    activation: str = ""
    dropouts: tuple[str, ...] = ("attention_dropout",)
    tokens: Mapping[str, int] = field(default_factory=dict)
    # Parameters
    experts: bool = False
    flags: Mapping[str, bool] = field(default_factory=dict)
    equal: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    always: tuple[str, ...] = ()
    before: tuple[Module, ...] = ()
    layer_prefix: str = ""
    layers: tuple[Module, ...] = ()
    after: tuple[Module, ...] = ()
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    divides_rows: bool = False
    # The forward pass
    sdpa_lacks: str = ""
    soft_caps: bool = False
    half_softmax: bool = False
    unexpanded_keys: bool = False
    alibi: bool = False
    positions_per_sample: bool = False
    rotary_in_part: bool = False
    fp32_rotary: bool = False
    fp32_norms: bool = False
    norms_side_by_side: bool = False
    compared: frozenset[str] = frozenset()

    def size_keys(self, size: str) -> tuple[str, ...]:
        """Keys of its config that hold a size, which SIZE_KEYS names.

        All that any config has for it, where the family is not known tensor by tensor.
        """
        if size in self.keys:
            return tuple(self.keys[size])
        return SIZE_KEYS[size][:1] if self.layers else SIZE_KEYS[size]

    @property
    def layer_norm(self) -> bool:
        """True if its norms are LayerNorms, which have a bias, rather than RMSNorms."""
        return any(module.kind == "norm" and module.bias is not None for module in self.layers)

    @property
    def learned_positions(self) -> bool:
        """True if positions are looked up in an embedding."""
        return any("positions" in size for module in self.before for size in module.sizes)

    @property
    def fused_projections(self) -> bool:
        """True if one module projects queries, keys and values."""
        return sum(module.kind == "attention" for module in self.layers) == 2

    @property
    def gated_mlp(self) -> bool:
        """True if the MLP multiplies two projections of its input."""
        outputs = [module.sizes[-1] for module in self.layers if module.kind == "mlp"]
        return outputs.count("width") + 2 * outputs.count("2*width") == 2


def family_of(model_type: str) -> Family:
    """Return the family of a model type: all defaults and no layers if it has no table."""
    return _TABLES.get(model_type) or Family(model_type)


def compared_families(comparison: str) -> tuple[str, ...]:
    """Return the model types of which something was held equal to real runs, in order."""
    return tuple(sorted(name for name, each in _TABLES.items() if comparison in each.compared))


def read_families(text: str) -> dict[str, Family]:
    """Return the families in a TOML text, by model type.

    Raises ValueError that names the table and its unknown key or meaningless value.
    """
    raw: dict[str, dict[str, Any]] = {}
    for name, table in tomllib.loads(text).items():
        parent = table.get("like")
        if parent is not None and parent not in raw:
            raise ValueError(f"[{name}] is like {parent!r}, which is no table above it")
        inherited = raw[parent] if parent is not None else {}
        raw[name] = {k: v for k, v in inherited.items() if k not in _NOT_INHERITED} | table
    return {name: _family(name, table) for name, table in raw.items()}


def holds(condition: str, flags: Collection[str]) -> bool:
    """Return whether a flag is on, or off where the condition begins with "!"."""
    return condition[1:] not in flags if condition.startswith("!") else condition in flags


def _family(name: str, table: Mapping[str, Any]) -> Family:
    """Return one table as a Family, each value checked against the type of its field."""
    types = {each.name: str(each.type) for each in fields(Family) if each.name != "name"}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key == "like":
            continue
        if key not in types:
            raise ValueError(f"[{name}] has {key!r}, which no family has")
        kind = types[key]
        if not isinstance(value, _toml_type(kind)):
            raise ValueError(f"[{name}] {key} = {value!r} is not a {kind}")
        if "Module" in kind:
            value = tuple(_module(name, line) for line in value)
        elif kind.startswith("tuple"):
            value = tuple(value)
        elif kind.startswith("frozenset"):
            value = frozenset(value)
        values[key] = value
    family = Family(name, **values)
    for problem in _problems(family):
        raise ValueError(f"[{name}] {problem}")
    return family


def _toml_type(kind: str) -> type[Any]:
    """Return the type that tomllib reads for a field."""
    beginnings = {"tuple": list, "frozenset": list, "Mapping": dict, "bool": bool, "int": int}
    return next((type_ for word, type_ in beginnings.items() if kind.startswith(word)), str)


def _problems(family: Family) -> Iterator[str]:
    """Yield the values that no reader of the table understands."""
    if others := family.compared - _COMPARISONS:
        yield f"compared has {sorted(others)}: only {sorted(_COMPARISONS)} are compared"
    if unknown_sizes := family.keys.keys() - SIZE_KEYS.keys():
        yield f"keys has {sorted(unknown_sizes)}: the sizes are {', '.join(SIZE_KEYS)}"
    if family.slides is not None and family.slides not in _WINDOW_RULES:
        yield f"slides is {family.slides!r}: it must be one of {sorted(_WINDOW_RULES)}"
    if family.layers and bool(family.activation) == family.gated_mlp:
        yield "activation is for an MLP without a gate, and every one of those needs it"
    if bool(family.layers) != bool(family.layer_prefix):
        yield "layers and layer_prefix go together"


def _module(family: str, line: str) -> Module:
    """Parse one line: KIND NAME SIZES [bias | bias=FLAG|FLAG] [if=FLAG,!FLAG]."""
    kind, name, *words = line.split()
    kind, _, transposed = kind.partition("^")
    options = {}
    while words and words[-1].startswith(("bias", "if=")):
        key, _, value = words.pop().partition("=")
        options[key] = value
    if not words:
        raise ValueError(f"[{family}] {line!r} names no sizes")
    bias = options.get("bias")
    return Module(
        kind=kind,
        name=name,
        sizes=tuple(words),
        transposed=bool(transposed),
        bias=None if bias is None else tuple(filter(None, bias.split("|"))),
        conditions=tuple(filter(None, options.get("if", "").split(","))),
    )


_TABLES = read_families(_FILE.read_text(encoding="utf-8"))

# The families that are known tensor by tensor.
FAMILIES = {name: family for name, family in _TABLES.items() if family.layers}
