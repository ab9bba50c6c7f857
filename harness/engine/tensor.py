"""Tensor parallelism: makes modules compute with their slices and exchange the rest.

The modules remain transformers' own, with the same names; `forward` is replaced only where a weight
is sliced or an input or output must be exchanged (layout/tensor.py defines the styles).
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from harness.engine.residuals import Residuals
from harness.layout import tensor as styles
from harness.layout.grid import Share
from harness.layout.tensor import TensorPlan
from harness.models.attention import draw_by_place
from harness.models.exchange import added, copied, joined, sliced, summed
from harness.models.token_losses import Vocabulary

Forward = Callable[..., torch.Tensor]


class Divided(NamedTuple):
    """What the tensor-parallel ranks of a model divide, or else have in common."""

    residuals: Residuals | None = None
    vocabulary: Vocabulary | None = None
    sharing_a_head: dist.ProcessGroup | None = None
    """The ranks that have the same key head, if there are fewer heads than ranks."""


def divide_forward(
    model: PreTrainedModel,
    plan: TensorPlan,
    share: Share,
    group: dist.ProcessGroup,
    divides_residuals: bool = False,
) -> Divided:
    """Make a model with this rank's slices compute the full model's outputs.

    Collective: ranks that share a key head create groups.
    """
    places, named = group.size(), dict(model.named_modules())
    # Whether a module has parameters depends on the config.
    how = {
        name: style
        for name, module in named.items()
        if [*module.parameters()] and (style := plan.style_of(name))
    }
    if not plan.divides_vocabulary(places):
        how = {n: s for n, s in how.items() if s not in (styles.EMBEDDING, styles.HEAD)}
    entrances = _entrances(named, how)
    residuals = Residuals(model, group, divides_residuals)
    residuals.prepare(named, how)
    whole = Residuals(model, group, divides=False)
    for name in entrances:
        stream = residuals if residuals.is_in_layer(name) else whole
        named[name].register_forward_pre_hook(_entering(stream), with_kwargs=True)
    sharing = _sharing_a_head(share, plan.kv_copies(places))
    for name, style in how.items():
        owner_name = name.rpartition(".")[0]
        module: Any = named[name]
        owner: Any = named[owner_name]
        stream = residuals if residuals.is_in_layer(name) else whole
        if style in (*styles.COLUMNS, styles.HEAD):
            module.forward = _column(module, stream, enters=owner_name not in entrances)
        elif style == styles.GATHERED:
            module.forward = _column(module, stream, gathers=True)
        elif style in styles.ROWS:
            module.forward = _row(module, stream, splits=style == styles.SPLIT)
        elif style == styles.EMBEDDING:
            module.forward = _embedding(module, group)
        elif style == styles.EXPERTS:
            module.forward = _experts(module, group)
        elif style == styles.SUMMED:
            _sum_gradients(module, group)
        if style == "fused_qkv":
            _count_fused_heads(owner, plan.num_heads, places)
        if style == styles.GROUPED:
            owner.register_forward_pre_hook(
                _biasing_own_heads(plan.num_heads, group), with_kwargs=True
            )
            if hasattr(owner, "num_kv_heads"):
                owner.num_kv_heads //= places
        if style == "rowwise" and hasattr(owner, "num_heads"):
            # OPT views (batch, -1, heads, width): a slice of the hidden size would shrink -1.
            owner.num_heads //= places
        if sharing is not None and style == "colwise" and name.endswith(("k_proj", "v_proj")):
            owner.num_key_value_groups = plan.num_heads // places
            _sum_gradients(module, sharing)
    if plan.divides_attention:
        draw_by_place(model, group.rank())
    vocabulary = None
    if plan.divides_vocabulary(places):
        size = plan.vocab_size // places
        vocabulary = Vocabulary(group.rank() * size, size, plan.vocab_size, group)
    return Divided(residuals, vocabulary, sharing)


def _entrances(named: dict[str, nn.Module], how: dict[str, str]) -> set[str]:
    """Return the modules whose weights are all sliced, or replicated with summed gradients. All
    their column-wise layers read the module's input, so its gradient is summed once for all.
    """
    within = {*styles.COLUMNS, "rowwise", styles.SUMMED}
    entrances = set()
    for name in {name.rpartition(".")[0] for name, style in how.items() if style in styles.COLUMNS}:
        owner = named[name]
        children = {how.get(f"{name}.{k}") for k, m in owner.named_children() if [*m.parameters()]}
        if children <= within and not [*owner.parameters(recurse=False)]:
            entrances.add(name)
    return entrances


def _sharing_a_head(share: Share, copies: int) -> dist.ProcessGroup | None:
    """Return the group of ranks that share this rank's key head, if any. Collective."""
    if copies == 1:
        return None
    mine = None
    for ranks in share.grid.groups("tensor"):
        for start in range(0, len(ranks), copies):
            sharing = ranks[start : start + copies]
            group = dist.new_group(sharing)
            if share.rank in sharing:
                mine = group
    return mine


def _entering(stream: Residuals) -> Callable[..., Any]:
    """Return a pre-forward hook for a module whose input is read by sliced weights."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (stream.enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": stream.enter(kwargs["hidden_states"])}

    return hook


def _biasing_own_heads(heads: int, group: dist.ProcessGroup) -> Callable[..., Any]:
    """Return a pre-forward hook that selects this rank's heads of BLOOM's or Falcon's ALiBi."""
    size = heads // group.size()
    own = slice(group.rank() * size, (group.rank() + 1) * size)

    def part(biases: Any) -> Any:
        if not torch.is_tensor(biases):
            return biases
        if biases.ndim == 3:
            return biases.view(-1, heads, *biases.shape[1:])[:, own].flatten(0, 1)
        return biases[:, own] if biases.shape[1] == heads else biases

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {key: part(kwargs[key]) for key in ("alibi", "attention_mask")}

    return hook


def _weight(module: Any) -> torch.Tensor:
    weight: torch.Tensor = module.weight
    return weight.t() if type(module).__name__ == "Conv1D" else weight  # GPT-2's is (in, out)


def _column(module: Any, stream: Residuals, enters: bool = True, gathers: bool = False) -> Forward:
    """Return the forward function of a column-wise layer. Hidden states enter here or at its owner;
    with `gathers`, every rank gets the whole output.
    """

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        inputs = stream.enter(inputs) if enters else inputs
        output = stream.linear(inputs, _weight(module), module.bias)
        return joined(output, -1, stream.group) if gathers else output

    return forward


def _row(module: Any, stream: Residuals, splits: bool) -> Forward:
    if module.bias is not None:
        stream.sum_gradients([module.bias])  # it is added to this rank's tokens

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        own = sliced(inputs, -1, stream.group) if splits else inputs
        output = stream.leave(functional.linear(own, _weight(module)))
        return output if module.bias is None else output + module.bias

    return forward


def _embedding(module: Any, group: dist.ProcessGroup) -> Forward:
    rows = module.num_embeddings // group.size()
    first = group.rank() * rows
    scale, padding = getattr(module, "embed_scale", None), module.padding_idx
    if padding is not None:  # this id's row gets no gradient
        padding = padding - first if first <= padding < first + rows else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids < first) | (ids >= first + rows)
        own = (ids - first).masked_fill(elsewhere, 0)
        rows_here = functional.embedding(own, module.weight, padding)
        output = added(rows_here.masked_fill(elsewhere[..., None], 0), group)
        return output if scale is None else output * scale.to(output.dtype)

    return forward


def _experts(module: Any, group: dist.ProcessGroup) -> Forward:
    """Return the forward function of experts whose width is sliced over the ranks; `weights` are
    the router's.
    """
    inner = module.forward

    def forward(states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = inner(copied(states, group), index, copied(weights, group))
        return added(output, group)

    return forward


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of a weight that every rank holds, before DeepSpeed sees them."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: summed(gradient, group))


def _count_fused_heads(owner: Any, num_heads: int, places: int) -> None:
    """Make an attention module with a fused projection split it by this rank's number of heads."""
    if hasattr(owner, "split_size"):
        owner.split_size //= places
    if hasattr(owner, "num_key_value_heads"):
        owner.num_key_value_heads //= places
    owner.config = copy.copy(owner.config)
    owner.config.num_attention_heads = num_heads // places
