"""Decoder families from families.toml, and model sizes regardless of the config keys' names.

A key missing from `config.json` has the default of the model type's config class in transformers 5;
families.toml contains these defaults.
"""

from __future__ import annotations  # Family's types are read as text

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

# Config keys of each size; the first is the one most common in transformers.
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
_NOT_INHERITED = {"like", "compared", "even_heads"}  # true of one family only
_COMPARISONS = {
    "activations",
    "divided activations",
    "divided experts",
    "liger",
    "compiled",
    "halves",
}
_WINDOW_RULES = {"every", "even", "asked", "upper"}


@dataclass(frozen=True)
class Module:
    """A module and its parameters, parsed from one line of a table."""

    kind: str
    name: str
    """Relative to the model or to the layer."""
    sizes: tuple[str, ...]
    transposed: bool = False
    """True if a linear layer's weight is (in, out)."""
    bias: tuple[str, ...] | None = None
    """Conditions for a bias, any of which suffices; empty for always, None for never."""
    conditions: tuple[str, ...] = ()
    """Conditions for the module to exist, all of which must hold."""


@dataclass(frozen=True)
class Family:
    """One `model_type`; families.toml explains each key.

    The defaults apply to a family without a table.
    """

    name: str
    # The config class: its keys and defaults
    keys: Mapping[str, list[str]] = field(default_factory=dict)
    tied: bool = False
    head_dim: int | None = None
    default_kv_heads: int | None = None
    even_heads: bool = False
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
        """Return the config keys of a size, which is named as in SIZE_KEYS.

        Without a table of tensors, these are the keys that any config uses for it.
        """
        if size in self.keys:
            return tuple(self.keys[size])
        return SIZE_KEYS[size][:1] if self.layers else SIZE_KEYS[size]

    @property
    def layer_norm(self) -> bool:
        """True if its norms are LayerNorms, which have a bias, instead of RMSNorms."""
        return any(module.kind == "norm" and module.bias is not None for module in self.layers)

    @property
    def learned_positions(self) -> bool:
        """True if it has a position embedding."""
        return any("positions" in size for module in self.before for size in module.sizes)

    @property
    def fused_projections(self) -> bool:
        """True if a single module projects queries, keys and values."""
        return sum(module.kind == "attention" for module in self.layers) == 2

    @property
    def gated_mlp(self) -> bool:
        """True if the MLP multiplies two projections of its input."""
        outputs = [module.sizes[-1] for module in self.layers if module.kind == "mlp"]
        return outputs.count("width") + 2 * outputs.count("2*width") == 2


DEVIATION_KEYS = ("initializer_range", "init_std")
"""Names of the standard deviation of initial weights in configs; a family reads one of them."""
_RESIDUAL = re.compile(
    r"(^|\.)(o_proj|out_proj|c_proj|dense|dense_4h_to_h|down_proj|fc2|fc_out|wo|w2)(\.weight)?$"
)


def is_residual(name: str) -> bool:
    """Return True for a weight whose output is added to the residual stream, by its name."""
    return bool(_RESIDUAL.search(name))


def given_size(config: Mapping[str, Any], size: str) -> int | None:
    """Return a size that a config.json states under any of its names (SIZE_KEYS), or None."""
    values = (config.get(key) for key in SIZE_KEYS[size])
    return next((value for value in values if isinstance(value, int)), None)


def family_of(model_type: str) -> Family:
    """Return the family of a model type; without a table, all defaults and no layers."""
    return _TABLES.get(model_type) or Family(model_type)


def compared_families(comparison: str) -> tuple[str, ...]:
    """Return the model types for which a property was compared with real runs, sorted."""
    return tuple(sorted(name for name, each in _TABLES.items() if comparison in each.compared))


def read_families(text: str) -> dict[str, Family]:
    """Return the families in a TOML text, by model type.

    Raises ValueError that names the table and its unknown key or meaningless value.
    """
    raw: dict[str, dict[str, Any]] = {}
    for name, table in tomllib.loads(text).items():
        parent = table.get("like")
        if parent is not None and parent not in raw:
            raise ValueError(f"[{name}] is like {parent!r}, which is not a table above it")
        inherited = raw[parent] if parent is not None else {}
        raw[name] = {k: v for k, v in inherited.items() if k not in _NOT_INHERITED} | table
    return {name: _family(name, table) for name, table in raw.items()}


def holds(condition: str, flags: Collection[str]) -> bool:
    """Return True if a flag is on; a condition starting with "!" requires it to be off."""
    return condition[1:] not in flags if condition.startswith("!") else condition in flags


def _family(name: str, table: Mapping[str, Any]) -> Family:
    """Return a table as a Family, after checking each value against the type of its field."""
    types = {each.name: str(each.type) for each in fields(Family) if each.name != "name"}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key == "like":
            continue
        if key not in types:
            raise ValueError(f"[{name}] has the unknown key {key!r}")
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
    """Yield problems with the values of a family."""
    if others := family.compared - _COMPARISONS:
        yield f"compared has {sorted(others)}: only {sorted(_COMPARISONS)} are compared"
    if unknown_sizes := family.keys.keys() - SIZE_KEYS.keys():
        yield f"keys has {sorted(unknown_sizes)}: the sizes are {', '.join(SIZE_KEYS)}"
    if family.slides is not None and family.slides not in _WINDOW_RULES:
        yield f"slides is {family.slides!r}: it must be one of {sorted(_WINDOW_RULES)}"
    if family.layers and bool(family.activation) == family.gated_mlp:
        yield "activation is required for an MLP without a gate, and only allowed there"
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

# The families whose table lists their tensors.
FAMILIES = {name: family for name, family in _TABLES.items() if family.layers}


class UnknownArchitecture(ValueError):
    """A model type without a table of tensors; callers work without a shape."""


class Keys:
    """Typed access to an HF config; collects problems instead of stopping at the first."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the first value that is set under `names`, an integer of at least 1."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                self.problems.append(f"{name} = {value!r} is not an integer of at least 1")
                return 1
            return value
        if default is None:
            self.problems.append(f"{' or '.join(names)} is missing")
            return 1
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Return the boolean `name`."""
        value = self.config.get(name)
        return default if value is None else bool(value)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder's tensors in elements, and lengths in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of a dense MLP."""
    max_positions: int
    """Longest sequence in tokens."""
    tied: bool
    """True if the output head is the embedding matrix."""
    sliding_windows: tuple[int | None, ...]
    """For each layer, the number of tokens that attention looks back; None for full attention."""
    num_experts: int
    """Number of experts per mixture-of-experts layer; 0 for a dense model."""
    experts_per_token: int
    expert_size: int
    """Width of one expert."""

    @property
    def family(self) -> Family:
        """The facts about the model type."""
        return family_of(self.model_type)

    @property
    def q_size(self) -> int:
        """Total width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Total width of all key heads, which is also that of all value heads."""
        return self.num_kv_heads * self.head_dim


def read_sizes(keys: Keys) -> Sizes:
    """Return the sizes of an HF config; contradictions are added to `keys.problems`.

    Raises UnknownArchitecture for a `model_type` that is not in FAMILIES.
    """
    model_type = keys.config.get("model_type")
    if model_type not in FAMILIES:
        raise UnknownArchitecture(
            f"the planner has no table for model_type {model_type!r}: it counts the tensors by "
            "tracing the model's class, which needs torch"
        )
    family = FAMILIES[model_type]
    hidden_size = keys.size(*family.size_keys("hidden"))
    num_layers = keys.size(*family.size_keys("layers"))
    num_heads = keys.size(*family.size_keys("heads"))
    num_kv_heads = kv_heads(keys, family, num_heads)
    head_keys = family.size_keys("head")
    head_dim = keys.size(*head_keys, default=family.head_dim or hidden_size // num_heads or 1)
    has_experts = family.experts
    num_experts = keys.size(*family.size_keys("experts")) if has_experts else 0
    experts_per_token = keys.size("num_experts_per_tok") if has_experts else 0
    if num_heads % num_kv_heads:
        keys.problems.append(
            f"num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    assumed = all(keys.config.get(key, family.head_dim) is None for key in head_keys)
    if hidden_size % num_heads and (assumed or family.even_heads):
        keys.problems.append(
            f"hidden size {hidden_size} is not a multiple of {num_heads} attention heads"
        )
    if experts_per_token > num_experts:
        keys.problems.append(
            f"num_experts_per_tok = {experts_per_token} of only {num_experts} experts"
        )
    return Sizes(
        model_type=model_type,
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.size(
            *family.size_keys("width"),
            default=family.mlp_ratio * hidden_size if family.mlp_ratio else None,
        ),
        max_positions=keys.size(*family.size_keys("positions"), default=family.max_positions),
        tied=keys.flag("tie_word_embeddings", family.tied),
        sliding_windows=_sliding_windows(keys, family, num_layers),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_size=keys.size("moe_intermediate_size", "intermediate_size") if has_experts else 0,
    )


def flags_on(keys: Keys, family: Family) -> set[str]:
    """Return the family's flags that are on in a config."""
    equal = {
        flag
        for flag, values in family.equal.items()
        if all(keys.config.get(key) == value for key, value in values.items())
    }
    on = {flag for flag, default in family.flags.items() if keys.flag(flag, default)}
    return {*on, *equal, *family.always}


def kv_heads(keys: Keys, family: Family, num_heads: int) -> int:
    """Return the number of key heads, even if the config does not specify it."""
    names = family.size_keys("kv_heads")
    named = keys.size(*names, default=default_kv_heads(keys.config, family) or num_heads)
    on = flags_on(keys, family)
    for rule in family.kv_heads:
        number, _, conditions = rule.partition(" if=")
        if all(holds(condition, on) for condition in conditions.split(",")):
            return num_heads if number == "heads" else int(number)
    return named


def default_kv_heads(config: Mapping[str, Any], family: Family) -> int | None:
    """Return the family's number of key heads, for a config without a key for it.

    None means the attention heads, as does an explicit null.
    """
    absent = not any(name in config for name in family.size_keys("kv_heads"))
    return family.default_kv_heads if absent else None


def _sliding_windows(keys: Keys, family: Family, num_layers: int) -> tuple[int | None, ...]:
    # An explicit null disables the window; a missing key means the family's default.
    default, rule = family.sliding_window, family.slides
    if rule is None or keys.config.get("sliding_window", default) is None:
        return (None,) * num_layers
    window = keys.size("sliding_window", default=default)
    if layer_types := keys.config.get("layer_types"):
        slides = [kind == "sliding_attention" for kind in layer_types]
    else:
        enabled = rule in ("every", "even") or keys.flag("use_sliding_window", False)
        first = keys.config.get("max_window_layers", 28) if rule == "upper" else 0
        step = 2 if rule == "even" else 1
        slides = [enabled and layer >= first and layer % step == 0 for layer in range(num_layers)]
    if len(slides) != num_layers:
        keys.problems.append(f"layer_types has {len(slides)} entries for {num_layers} layers")
    return tuple(window if slide else None for slide in slides)
