"""Tensor parallelism: which rows, columns or experts' widths of each weight a rank holds.

tests/gates/generate_plans.py writes that file.

Modules are named within the base model, "layers.*.mlp.up_proj" being that of every layer; the head
is in no plan.  Modules that a config leaves out may be named: a dense model's plan lists experts.

A style says how a module is divided: transformers' own plans name one for each (plans.json), rows
of families.toml where there is no plan or a better one.  Shapes alone decide the cuts, so the table
serves building, checkpoints and the estimate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from harness.layout.box import Part, Range, share_of, share_of_fused
from harness.layout.families import Keys, family_of, kv_heads
from harness.layout.shape import Shape, Tensor

Ends = tuple[list[str], list[str]]
"""Names of a module's inputs, and of its outputs."""


def tensor_plan(model_type: str) -> dict[str, str] | None:
    """Return the style in which tensor-parallel ranks divide each module, such as "colwise"."""
    return _plan("tensor", model_type)


def expert_plan(model_type: str) -> dict[str, str] | None:
    """Return the style in which expert-parallel ranks divide each module: "grouped_gemm"."""
    return _plan("expert", model_type)


def pipeline_plan(model_type: str) -> dict[str, Ends] | None:
    """Return the inputs and outputs of the modules between which a pipeline is cut, in order."""
    plan = _plan("pipeline", model_type)
    return plan and {module: (takes, returns) for module, (takes, returns) in plan.items()}


def without_sdpa(model_type: str) -> bool:
    """Return whether transformers refuses torch's attention for a decoder."""
    return model_type in _table()["without_sdpa"]


def keys_read(model_type: str) -> frozenset[str] | None:
    """Return the keys of a config.json that change a decoder or its export."""
    table = _table()
    entries = (e["plan"].split() for e in table["keys"] if model_type in e["families"])
    signed = next(entries, None)
    if signed is None:
        return None
    more, fewer = ({key[1:] for key in signed if key[0] == sign} for sign in "+-")
    return frozenset({*table["most_keys"]} - fewer | more)


def every_key() -> frozenset[str]:
    """Return the keys of a config.json that any decoder reads."""
    table = _table()
    more = {key[1:] for entry in table["keys"] for key in entry["plan"].split() if key[0] == "+"}
    return frozenset({*table["most_keys"], *more})


def _plan(kind: str, model_type: str) -> dict[str, Any] | None:
    """Return a copy of the plan, None if transformers has none."""
    entries = (e["plan"] for e in _table()[kind] if model_type in e["families"])
    plan: dict[str, Any] | None = next(entries, None)
    return None if plan is None else dict(plan)


@cache
def _table() -> dict[str, Any]:
    path = Path(__file__).with_name("plans.json")
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


Ranges = tuple[Range, ...]

GROUPED = "grouped_qkv"
"""One projection, in which the queries of a key head, the head and its value are neighbours."""
# Modules that read whole hidden states and give a part of the output, each by its own cut.
COLUMNS = ("colwise", "packed_colwise", "fused_qkv", GROUPED)
GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"
ROWS = ("rowwise", SPLIT)
EXPERTS = "moe_tp_experts"
SUMMED = "replicated_with_grad_allreduce"
"""Whole on every rank, which computes a part of its gradient."""
EMBEDDING, HEAD = "embedding", "head"
"""Divided by the vocabulary, if that divides."""
STYLES = (*COLUMNS, *ROWS, GATHERED, EXPERTS, SUMMED, EMBEDDING, HEAD)

_QUERIES = ("q_proj", "qkv_proj", "c_attn", "query_key_value")
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_VOCABULARY = {
    **dict.fromkeys(("embed_tokens", "embed_in", "wte", "word_embeddings"), EMBEDDING),
    **dict.fromkeys(("lm_head", "embed_out"), HEAD),
}


@dataclass(frozen=True)
class TensorPlan:
    """The division of one model over tensor-parallel ranks.

    `styles`: by the end of a module's name, in which "*" stands for a number.
    """

    styles: Mapping[str, str]
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    transposed: bool = False
    """True if a linear layer's weight is (in, out)."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TensorPlan:
        """Return the plan of a model from its HF `config.json`; raises ValueError as `make`."""
        model_type = str(config["model_type"])
        family = family_of(model_type)

        def size(name: str) -> int:
            values = (config.get(key) for key in family.size_keys(name))
            return next((value for value in values if isinstance(value, int)), 0)

        heads = size("heads")
        vocabulary = config.get("vocab_size")
        return cls.make(
            model_type,
            heads,
            kv_heads(Keys(config), family, heads),
            vocabulary if isinstance(vocabulary, int) else 0,
        )

    @classmethod
    def make(
        cls, model_type: str, num_heads: int, num_kv_heads: int, vocab_size: int
    ) -> TensorPlan:
        """Return the plan of a family's model with these sizes.

        Raises ValueError naming the family if it has no plan, or one with an unknown style.
        """
        family = family_of(model_type)
        styles = dict(family.tensor_plan) or tensor_plan(model_type) or {}
        # Of experts plans name the weights, too; their module's style says all, unless these
        # weights are (in, out).
        styles = {n: s for n, s in styles.items() if ".experts." not in n or s == "packed_rowwise"}
        unknown = sorted({style for style in styles.values() if style not in STYLES})
        if not styles or unknown:
            reason = f"the styles {', '.join(unknown)} are unknown" if styles else "there is none"
            raise ValueError(f"{model_type} has no plan to divide its tensors: {reason}")
        for name in [name for name, style in styles.items() if name.endswith("self_attn.q_proj")]:
            if styles[name] == "colwise":  # a norm of each head, which some plans forget
                head = name.removesuffix("q_proj")
                styles |= {f"{head}q_norm": SUMMED, f"{head}k_norm": SUMMED}
        for name in [name for name in styles if name.endswith("mlp.up_proj")]:
            if styles[name] == "colwise":  # an activation that is trained, such as Apertus's
                styles[f"{name.removesuffix('up_proj')}act_fn"] = SUMMED
        return cls(
            {**styles, **_VOCABULARY},
            num_heads,
            num_kv_heads,
            vocab_size,
            any(module.transposed for module in family.layers),
        )

    def style_of(self, module: str) -> str | None:
        """Return the style of a module by its qualified name; None if it is whole on every rank."""
        parts = ["*" if part.isdigit() else part for part in module.split(".")]
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        return next((self.styles[end] for end in ends if end in self.styles), None)

    @property
    def divides_attention(self) -> bool:
        """True if a rank computes some heads alone, False if all of them."""
        return any(
            style in ("colwise", "fused_qkv", GROUPED) and name.endswith(_QUERIES)
            for name, style in self.styles.items()
        )

    def divides_vocabulary(self, places: int) -> bool:
        """Return whether a rank has a part of the embedding, of the head and of the logits."""
        return places > 1 and self.vocab_size % places == 0

    def kv_copies(self, places: int) -> int:
        """Return how many ranks have the same key head: 1 unless there are fewer than ranks."""
        return max(1, places // self.num_kv_heads)

    def problems(self, places: int) -> list[str]:
        """Return the reasons why heads cannot be divided over so many ranks."""
        if not self.divides_attention:
            return []
        problems, kv = [], self.num_kv_heads
        if self.num_heads % places:
            problems.append(f"{self.num_heads} attention heads cannot be divided over {places}")
        if kv % places and GROUPED in self.styles.values():
            problems.append(
                f"{kv} key heads cannot be divided over {places}, nor be shared where one "
                "projection holds them and the queries"
            )
        elif kv % places and places % kv:
            problems.append(f"{kv} key heads cannot be divided over {places}, nor be shared")
        return problems

    def cut(self, name: str, shape: tuple[int, ...], place: int, places: int) -> dict[int, Ranges]:
        """Return the ranges of each divided dimension of a parameter, as a `share.Cutter` does.

        Raises ValueError naming the parameter if a dimension does not divide.
        """
        if places == 1:
            return {}
        module, _, key = name.rpartition(".")
        style = self.style_of(module)
        if style in (EMBEDDING, HEAD):
            return {0: share_of(shape[0], place, places)} if not shape[0] % places else {}
        if style is None or style == SUMMED:
            return {}
        if style == EXPERTS:
            return self._of_experts(name, shape, place, places)
        out = len(shape) - 1 if self.transposed else 0
        if style in ROWS:
            if key == "bias":
                return {}  # added once, after the sum
            dimension = 1 - out
            sizes = [shape[dimension]]
        else:
            dimension, sizes = out, [shape[out]]
            if style == "packed_colwise":
                sizes = [shape[out] // 2] * 2
            elif style == "fused_qkv":
                each = shape[out] // (self.num_heads + 2 * self.num_kv_heads)
                sizes = [each * self.num_heads, *[each * self.num_kv_heads] * 2]
            elif module.endswith(_KEYS_AND_VALUES) and style == "colwise":
                copies = self.kv_copies(places)
                place, places = place // copies, places // copies
        return {dimension: _even(name, dimension, sizes, place, places)}

    def _of_experts(
        self, name: str, shape: tuple[int, ...], place: int, places: int
    ) -> dict[int, Ranges]:
        """Every expert is on every rank, with a part of its width."""
        if name.endswith("gate_up_proj"):
            return {1: _even(name, 1, [shape[1] // 2] * 2, place, places)}
        if name.endswith("down_proj"):
            return {2: _even(name, 2, [shape[2]], place, places)}
        raise ValueError(f"{name} cannot be divided: only gate_up_proj and down_proj are known")


def _even(
    name: str, dimension: int, sizes: Iterable[int], place: int, places: int
) -> tuple[Range, ...]:
    blocks = list(sizes)
    if any(size % places for size in blocks):
        raise ValueError(
            f"{name}: {' + '.join(map(str, blocks))} elements of dimension {dimension} cannot be "
            f"divided over {places} tensor-parallel ranks"
        )
    return share_of_fused(blocks, place, places)


@lru_cache(maxsize=64)
def plan_of(shape: Shape) -> TensorPlan:
    """Return the plan of a model by its shape. Raises ValueError if its family has none."""
    return TensorPlan.make(shape.model_type, shape.num_heads, shape.num_kv_heads, shape.vocab_size)


def tensor_problems(shape: Shape, places: int, ranks: int | None = None) -> list[str]:
    """Return the reason why so many ranks cannot divide a model, and the numbers that can.

    `ranks`: that the other axes leave, which these numbers must divide, too; None for `places`.
    """
    problems = list(_problems(shape, places))
    if not problems:
        return []
    ranks = ranks or places
    most = max(places, shape.num_heads)
    legal = [n for n in range(1, most + 1) if not (ranks % n or any(_problems(shape, n)))]
    more = f" (and {len(problems) - 1} like it)" if len(problems) > 1 else ""
    return [f"{problems[0]}{more}: use {' or '.join(map(str, legal))}"]


def _problems(shape: Shape, places: int) -> Iterator[str]:
    if places == 1:
        return
    try:
        plan = plan_of(shape)
    except ValueError as error:
        yield str(error)
        return
    yield from plan.problems(places)
    for tensor in shape.tensors():
        try:
            plan.cut(tensor.name, tensor.shape, 0, places)
        except ValueError as error:
            yield str(error)


@lru_cache(maxsize=64)
def tensor_shard(shape: Shape, ranks: int) -> Shape:
    """Return the part of a model on each of `ranks` tensor-parallel ranks."""
    if ranks == 1:
        return shape
    plan, body = plan_of(shape), shape.body

    def cut(tensor: Tensor, prefix: str = "") -> Tensor:
        part = Part.of(tensor.shape)
        for dimension, ranges in plan.cut(prefix + tensor.name, tensor.shape, 0, ranks).items():
            part = part.cut(dimension, ranges)
        return replace(tensor, shape=part.shape)

    # Layers that are alike are one object, before and after; their numbers decide nothing.
    kinds = {id(layer): layer for layer in body.layers}
    parts = {
        kind: tuple(cut(tensor, f"{body.layer_prefix}0.") for tensor in layer)
        for kind, layer in kinds.items()
    }
    layers = tuple(parts[id(layer)] for layer in body.layers)
    heads = ranks if plan.divides_attention else 1
    return replace(
        shape,
        num_heads=shape.num_heads // heads,
        num_kv_heads=max(1, shape.num_kv_heads // heads),
        intermediate_size=shape.intermediate_size // ranks,
        expert_size=shape.expert_size // ranks,
        vocab_size=shape.vocab_size // ranks
        if plan.divides_vocabulary(ranks)
        else shape.vocab_size,
        body=replace(
            body,
            before=tuple(map(cut, body.before)),
            layers=layers,
            after=tuple(map(cut, body.after)),
        ),
    )


def divides_vocabulary(shape: Shape, ranks: int) -> bool:
    """Return True if each of `ranks` tensor-parallel ranks has a part of the logits alone."""
    return ranks > 1 and plan_of(shape).divides_vocabulary(ranks)
