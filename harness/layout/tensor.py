"""Tensor parallelism: which rows, columns or expert widths of each weight a rank holds. box.py has
the terms: `Part` describes a slice, `Piece` a shard.

A style says how a module is sliced. transformers' plans (plans.json, written by
tests/gates/generate_plans.py) give a style for each module; families.toml has rows for families
without a plan or with a better one. Shapes alone determine the slices, so the same table serves
building, checkpoints and the estimate.

Module names are relative to the base model; "layers.*.mlp.up_proj" is that of every layer. The head
is in no plan. A plan may name modules that a config omits: a dense model's plan lists experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from harness.layout.box import Part, Range, share_of, share_of_fused
from harness.layout.families import FAMILIES, Keys, family_of, kv_heads
from harness.layout.releases import was_rewritten
from harness.layout.shape import Shape, Tensor
from harness.layout.state_size import RECURRENT_KEYS


def tensor_plan(model_type: str) -> dict[str, str] | None:
    """Return transformers' tensor-parallel style of each module ("colwise"), or None."""
    plan = None if was_rewritten(model_type) else _plan("tensor", model_type)
    # The vocabulary is divided anyway, by _VOCABULARY; since 5.24 some plans hold nothing else.
    return {name: s for name, s in (plan or {}).items() if not _is_vocabulary(name, s)} or None


def expert_plan(model_type: str) -> dict[str, str] | None:
    """Return transformers' expert-parallel style of each module ("grouped_gemm"), or None."""
    return _plan("expert", model_type)


def without_sdpa(model_type: str) -> bool:
    """Return True if transformers does not support torch's SDPA for a decoder."""
    return model_type in _table()["without_sdpa"] or was_rewritten(model_type)


def keys_read(model_type: str) -> frozenset[str] | None:
    """Return the config.json keys that affect a decoder or its export; None if unknown."""
    if model_type == "recurrent":
        return RECURRENT_KEYS
    table = _table()
    entries = (e["plan"].split() for e in table["keys"] if model_type in e["families"])
    signed = next(entries, None)
    if signed is None:
        return None
    more, fewer = ({key[1:] for key in signed if key[0] == sign} for sign in "+-")
    return frozenset({*table["most_keys"]} - fewer | more)


def every_key() -> frozenset[str]:
    """Return all config.json keys that any decoder reads."""
    table = _table()
    more = {key[1:] for entry in table["keys"] for key in entry["plan"].split() if key[0] == "+"}
    return frozenset({*table["most_keys"], *more})


def _plan(kind: str, model_type: str) -> dict[str, Any] | None:
    """Return a copy of transformers' plan; None if it has none."""
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
"""A projection in which each key head follows its queries and precedes its value."""
# Styles of modules that read full hidden states and return a slice of the output.
COLUMNS = ("colwise", "packed_colwise", "fused_qkv", GROUPED)
GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"
ROWS = ("rowwise", SPLIT)
EXPERTS = "moe_tp_experts"
SUMMED = "replicated_with_grad_allreduce"
"""Replicated on every rank, each of which computes a part of its gradient."""
EMBEDDING, HEAD = "embedding", "head"
"""Sliced by vocabulary, if the number of ranks divides its size."""
STYLES = (*COLUMNS, *ROWS, GATHERED, EXPERTS, SUMMED, EMBEDDING, HEAD)

_QUERIES = ("q_proj", "qkv_proj", "c_attn", "query_key_value")
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_VOCABULARY = {
    **dict.fromkeys(("embed_tokens", "embed_in", "wte", "word_embeddings"), EMBEDDING),
    **dict.fromkeys(("lm_head", "embed_out"), HEAD),
}


def _is_vocabulary(module: str, style: str) -> bool:
    """Return True for an embedding that transformers, too, divides by vocabulary."""
    name = module.rpartition(".")[2]
    return style == "embedding_rowwise" and _VOCABULARY.get(name) == EMBEDDING


@dataclass(frozen=True)
class TensorPlan:
    """The distribution of one model over tensor-parallel ranks.

    `styles`: by suffix of the module name, in which "*" stands for a number.
    """

    styles: Mapping[str, str]
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    transposed: bool = False
    """True if a linear layer's weight is (in, out)."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TensorPlan:
        """Return the plan of a model from its HF `config.json`. Raises ValueError like `make`."""
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
        """Return the plan of a model of a family with these sizes.

        Raises ValueError naming the family if it has no plan, or one with an unknown style.
        """
        family = family_of(model_type)
        styles = dict(family.tensor_plan) or tensor_plan(model_type) or {}
        # Plans also name the weights of experts; the style of their module suffices, unless the
        # weights are (in, out).
        styles = {n: s for n, s in styles.items() if ".experts." not in n or s == "packed_rowwise"}
        unknown = sorted({style for style in styles.values() if style not in STYLES})
        if not styles or unknown:
            reason = f": unknown styles {', '.join(unknown)}" if styles else ""
            raise ValueError(f"{model_type} has no usable tensor-parallel plan{reason}")
        for name in [name for name, style in styles.items() if name.endswith("self_attn.q_proj")]:
            if styles[name] == "colwise":  # per-head norms, which some plans omit
                head = name.removesuffix("q_proj")
                styles |= {f"{head}q_norm": SUMMED, f"{head}k_norm": SUMMED}
        for name in [name for name in styles if name.endswith("mlp.up_proj")]:
            if styles[name] == "colwise":  # a trainable activation, such as Apertus's
                styles[f"{name.removesuffix('up_proj')}act_fn"] = SUMMED
        return cls(
            {**styles, **_VOCABULARY},
            num_heads,
            num_kv_heads,
            vocab_size,
            any(module.transposed for module in family.layers),
        )

    def style_of(self, module: str) -> str | None:
        """Return the style of a module by its qualified name; None if it is replicated."""
        parts = ["*" if part.isdigit() else part for part in module.split(".")]
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        return next((self.styles[end] for end in ends if end in self.styles), None)

    @property
    def divides_attention(self) -> bool:
        """True if each rank computes only some of the heads."""
        return any(
            style in ("colwise", "fused_qkv", GROUPED) and name.endswith(_QUERIES)
            for name, style in self.styles.items()
        )

    def divides_vocabulary(self, places: int) -> bool:
        """Return True if embedding, head and logits are sliced by vocabulary."""
        return places > 1 and self.vocab_size % places == 0

    def kv_copies(self, places: int) -> int:
        """Return the number of ranks that share a key head."""
        return max(1, places // self.num_kv_heads)

    def problems(self, places: int) -> list[str]:
        """Return the reasons why the heads cannot be split over this number of ranks."""
        if not self.divides_attention:
            return []
        problems, kv = [], self.num_kv_heads
        if self.num_heads % places:
            problems.append(f"{self.num_heads} attention heads cannot be divided over {places}")
        if kv % places and {GROUPED, "fused_qkv"} & {*self.styles.values()}:
            problems.append(
                f"{kv} key heads cannot be divided over {places}, nor be shared where one "
                "projection holds them and the queries"
            )
        elif kv % places and places % kv:
            problems.append(f"{kv} key heads cannot be divided over {places}, nor be shared")
        return problems

    def cut(self, name: str, shape: tuple[int, ...], place: int, places: int) -> dict[int, Ranges]:
        """Return the ranges of each sliced dimension of a parameter, as a `grid.Cutter`.

        Raises ValueError naming the parameter if a dimension is not divisible.
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
                return {}  # replicated; added once, after the sum
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
        """Return the ranges of an expert parameter: a slice of each expert's width."""
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
    """Return the plan of a model from its shape. Raises ValueError if its family has none."""
    return TensorPlan.make(shape.model_type, shape.num_heads, shape.num_kv_heads, shape.vocab_size)


def tensor_problems(shape: Shape, places: int, ranks: int | None = None) -> list[str]:
    """Return the reason why `places` ranks cannot split a model, with the numbers that can.

    `ranks`: the ranks left by the other axes, which these numbers must divide (None: `places`).
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
    """Return the shape of a model on each of `ranks` tensor-parallel ranks."""
    if ranks == 1:
        return shape
    plan, body = plan_of(shape), shape.body

    def cut(tensor: Tensor, prefix: str = "") -> Tensor:
        part = Part.of(tensor.shape)
        for dimension, ranges in plan.cut(prefix + tensor.name, tensor.shape, 0, ranks).items():
            part = part.cut(dimension, ranges)
        return replace(tensor, shape=part.shape)

    # Identical layers are one object, before and after; the layer index does not matter.
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


def whole_stream(
    shape: Shape | None, tokens: int, places: int, mlp_tiles: int, is_reversible: bool
) -> str:
    """Return why `places` ranks cannot divide the residual stream of rows of `tokens` tokens, with
    the key to change; "" if they can.
    """
    if tokens % places:
        return f"{tokens} tokens cannot be divided over {places} ranks: raise data.seq_len"
    if shape is None or not _divides_layers(shape):
        return "its layers have matrices that every rank holds: set it to false"
    if is_reversible:
        return "its layers pass on two streams: set model.reversible=false"
    return "tiles of an MLP read whole rows: set model.mlp_tiles=1" if mlp_tiles > 1 else ""


@lru_cache(maxsize=64)
def _divides_layers(shape: Shape) -> bool:
    """Return True for a known family whose layers have only matrices that read the stream as a
    whole and return a part, or the reverse.
    """
    try:
        plan = plan_of(shape)
    except ValueError:
        return False
    names = {t.name for layer in shape.body.layers for t in layer if len(t.shape) > 1}
    styles = {plan.style_of(f"{shape.body.layer_prefix}0.{n}".rpartition(".")[0]) for n in names}
    return shape.model_type in FAMILIES and styles <= {*COLUMNS, "rowwise"}


def divides_vocabulary(shape: Shape, ranks: int) -> bool:
    """Return True if each of `ranks` tensor-parallel ranks has only a slice of the logits."""
    return ranks > 1 and plan_of(shape).divides_vocabulary(ranks)
