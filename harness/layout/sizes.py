"""A decoder's sizes, read from its HF config whatever the family calls the keys.

A key that a `config.json` leaves out means what it means in transformers 5's config class of that
model type: families.toml holds those meanings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.layout.families import FAMILIES, Family, family_of, holds


class UnknownArchitecture(ValueError):
    """A model type whose tensors nobody has written down here; callers do without a shape."""


class Keys:
    """Typed access to an HF config that gathers every problem instead of stopping at the first."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of `names` (synonyms) that is set, an integer of at least 1."""
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
        """The boolean `name`."""
        value = self.config.get(name)
        return default if value is None else bool(value)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder's tensors, in elements; lengths, in tokens."""

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
    """Per layer, how many tokens attention looks back over; None where it sees them all."""
    num_experts: int
    """Experts of a mixture-of-experts layer; 0 for a dense model."""
    experts_per_token: int
    expert_size: int
    """Width of one expert."""

    @property
    def family(self) -> Family:
        """The facts about the model type."""
        return family_of(self.model_type)

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads together."""
        return self.num_kv_heads * self.head_dim


def read_sizes(keys: Keys) -> Sizes:
    """Return the sizes in an HF config, and add what contradicts itself to `keys.problems`.

    Raises UnknownArchitecture for a `model_type` that is not in FAMILIES.
    """
    model_type = keys.config.get("model_type")
    if model_type not in FAMILIES:
        raise UnknownArchitecture(
            f"model_type {model_type!r} is traced from its class, where torch is installed: it "
            f"is not counted tensor by tensor, as are {', '.join(FAMILIES)}"
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
    if hidden_size % num_heads and assumed:
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
    """The family's flags that are on in a config."""
    equal = {
        flag
        for flag, values in family.equal.items()
        if all(keys.config.get(key) == value for key, value in values.items())
    }
    on = {flag for flag, default in family.flags.items() if keys.flag(flag, default)}
    return {*on, *equal, *family.always}


def kv_heads(keys: Keys, family: Family, num_heads: int) -> int:
    """Return the number of key heads, which a family may not name."""
    named = keys.size(*family.size_keys("kv_heads"), default=num_heads)
    on = flags_on(keys, family)
    for rule in family.kv_heads:
        number, _, conditions = rule.partition(" if=")
        if all(holds(condition, on) for condition in conditions.split(",")):
            return num_heads if number == "heads" else int(number)
    return named


def _sliding_windows(keys: Keys, family: Family, num_layers: int) -> tuple[int | None, ...]:
    # An explicit null switches the window off; an absent key leaves the family's default.
    default, rule = family.sliding_window, family.slides
    if rule is None or keys.config.get("sliding_window", default) is None:
        return (None,) * num_layers
    window = keys.size("sliding_window", default=default)
    if layer_types := keys.config.get("layer_types"):
        slides = [kind == "sliding_attention" for kind in layer_types]
    else:
        asked = rule in ("every", "even") or keys.flag("use_sliding_window", False)
        first = keys.config.get("max_window_layers", 28) if rule == "upper" else 0
        step = 2 if rule == "even" else 1
        slides = [asked and layer >= first and layer % step == 0 for layer in range(num_layers)]
    if len(slides) != num_layers:
        keys.problems.append(f"layer_types has {len(slides)} entries for {num_layers} layers")
    return tuple(window if slide else None for slide in slides)
