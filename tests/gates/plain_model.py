"""The plain loop's model: built only by transformers, with fp32 masters, in one process."""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harness.config.model_section import ModelConfig
from harness.config.sections import NEXT_TOKEN
from harness.data.batch import Batch
from harness.layout import tensor as styles
from harness.layout.box import Range
from harness.layout.tensor import TensorPlan
from harness.models.attention import attend_with
from harness.models.efficient_attention.kinds import function_name
from harness.models.initialize import materialize
from harness.models.skeleton import DTYPES, hf_config, skeleton
from harness.models.units import decoder_layers
from tests.gates import recipe
from tests.gates.cell import GLOBAL_BATCH
from tests.gates.layouts import KINDS
from tests.gates.models import ATTENTION, learned
from tests.gates.recipe import rows, targets

_NAMES = {
    "llama": ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    "gpt2": ("ln_1", "attn", "ln_2", "mlp"),
}


def two_streams(model: PreTrainedModel) -> None:
    """Make attention add to one stream and MLPs to another, both in fp32, in place."""
    layers = decoder_layers(model)[1]
    for index, layer in enumerate(layers):
        modules = [getattr(layer, name) for name in _NAMES[model.config.model_type]]
        ends = index == 0, index == len(layers) - 1
        layer.forward = functools.partial(_forward, modules, model.dtype, *ends)


def _forward(
    modules: list[nn.Module],
    dtype: torch.dtype,
    is_first: bool,
    is_last: bool,
    hidden_states: torch.Tensor,
    *cache_and_mask: Any,
    **kwargs: Any,
) -> torch.Tensor:
    if cache_and_mask:  # as GPT-2 passes them
        kwargs["attention_mask"] = cache_and_mask[1]
    norm_1, attention, norm_2, mlp = modules
    packed = torch.cat([hidden_states.float()] * 2, -1) if is_first else hidden_states
    first, second = packed.chunk(2, -1)
    first = first + attention(norm_1(second.to(dtype)), **kwargs)[0]
    second = second + mlp(norm_2(first.to(dtype)))
    return (0.5 * (first + second)).to(dtype) if is_last else torch.cat([first, second], -1)


FP16_SCALE = 2.0**12

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Split:
    """One way to walk through a global batch: the samples of each micro-batch."""

    micro_batches: tuple[tuple[int, ...], ...]

    @classmethod
    def even(cls, micro_batch: int) -> Split:
        """Return consecutive samples, `micro_batch` at a time."""
        starts = range(0, GLOBAL_BATCH, micro_batch)
        return cls(tuple(tuple(range(s, s + micro_batch)) for s in starts))

    def reordered(self, number: int) -> Split:
        """Return the same micro-batches and samples in another order; with 0, in this one."""
        shuffled, draw = [*self.micro_batches], random.Random(number)
        if number:
            draw.shuffle(shuffled)
            shuffled = [tuple(draw.sample(samples, len(samples))) for samples in shuffled]
        return Split(tuple(shuffled))


@dataclass(frozen=True)
class Way:
    """The plain loop's model, precision and compilation."""

    architecture: str
    precision: str
    bf16_states: bool = False
    compiled: bool = False
    """True for compiled layers: fused operations round only once, so both sides need them."""
    blocks: int = 1
    """Number of tensor-parallel ranks whose partial sums are added; each rounds once."""
    first_block: int = 0
    """Rank whose part a sum begins with: a ring of ranks begins with each of them."""
    sums: str = "fp32"
    """Precision to which the sum of the micro-batches' gradients is rounded after each."""
    tiles: int = 1
    """Parts of a micro-batch's tokens that an MLP processes, each rounding its gradients."""
    reversible: bool = False
    """True for two streams instead of one."""
    device: str = "cpu"
    """Device of the compared ranks, so that the loop's kernels round in the same way."""
    varlen: bool = False
    """True to attend document by document, which rounds differently from a mask."""
    kind: str = ""
    """Kind of approximate attention; "" for exact attention."""
    objective: str = NEXT_TOKEN
    """train.objective."""

    def batch(self, batch: Batch) -> Batch:
        """Return a batch as the objective reads it."""
        return batch if self.objective == NEXT_TOKEN else recipe.paired(batch)


class PlainModel:
    """A model in its own precision with fp32 masters and fp32 accumulated gradients.

    With `way.bf16_states`, masters, moments and the summed gradient for the optimizer are in bf16.
    """

    def __init__(self, way: Way, balance: bool) -> None:
        self.balance = balance
        self.dtype = DTYPES[way.precision]
        self.sums = DTYPES[way.sums]
        self.scale = FP16_SCALE if way.precision == "fp16" else 1.0
        if way.compiled:
            self.model = _compiled_once(way)
            self.model.load_state_dict(_built_by_transformers(way, self.dtype).state_dict())
        else:
            self.model = copy.deepcopy(_built_by_transformers(way, self.dtype))
            _divide(self.model, way)
        self.attention = self.model.config._attn_implementation
        if way.varlen:
            self.attention = "varlen"
            attend_with("varlen", self.model)
        if way.kind:
            self.attention = way.kind
            sizes = ModelConfig(**KINDS[way.kind], attention=way.kind).attention_sizes
            attend_with(function_name(way.kind, sizes, recipe.SEED), self.model)
        self.model.to(way.device)
        self.model.train()
        kept = torch.bfloat16 if way.bf16_states else torch.float32
        named = self.model.named_parameters()
        self.masters = {n: p.detach().to(kept, copy=True) for n, p in named}

    def accumulate(self, batch: Batch, split: Split) -> float:
        """Fill the masters' gradients; return the mean loss over the batch's target tokens."""
        total = 0.0
        sums = {n: torch.zeros_like(m, dtype=torch.float32) for n, m in self.masters.items()}
        for loss, gradients in self.each_micro_batch(batch, split):
            total += loss
            for name, gradient in gradients.items():
                added = (sums[name] + gradient) * self.scale
                sums[name] = added.to(self.sums).float() / self.scale
        for name, master in self.masters.items():
            master.grad = sums[name].to(master.dtype)
        return total

    def each_micro_batch(self, batch: Batch, split: Split) -> Iterator[tuple[float, Gradients]]:
        """Yield each micro-batch's share of the mean loss, and its fp32 gradients."""
        count = targets(batch)
        for chosen in split.micro_batches:
            loss, balancing = self._loss(rows(batch, list(chosen)))
            share = loss / count
            reported = float(share.detach())
            if balancing is not None and self.balance:
                share = share + balancing / len(split.micro_batches)
            (share * self.scale).backward()
            gradients = {}
            for name, parameter in self.model.named_parameters():
                assert parameter.grad is not None
                gradients[name] = parameter.grad.float() / self.scale
                parameter.grad = None
            yield reported, gradients

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the masters and copy them into the model."""
        optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])

    def untied(self) -> dict[str, str]:
        """Give a tied head its own weight; return its name, by that of the embedding."""
        head, before = self.model.get_output_embeddings(), {*self.masters}
        assert head is not None
        embedding = {id(p): name for name, p in self.model.named_parameters()}[id(head.weight)]
        head.weight = nn.Parameter(head.weight.detach().clone())
        added = {name for name, _ in self.model.named_parameters()} - before
        return dict.fromkeys((embedding,), *added) if added else {}

    @torch.no_grad()
    def evaluate(self, batch: Batch, micro_batch: int) -> float:
        """Return the mean loss over all target tokens of `batch`, in nats."""
        self.model.eval()
        every = range(len(batch.labels))
        parts = [rows(batch, [*every[s : s + micro_batch]]) for s in every[::micro_batch]]
        return sum(float(self._loss(part)[0]) for part in parts) / targets(batch)

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss summed over target tokens, and the weighted balancing loss or None."""
        tensors = (batch.input_ids, batch.labels, batch.position_ids)
        ids, labels, positions = (tensor.to(self.model.device) for tensor in tensors)
        keywords = batch.keywords(self.attention, self.model.device)
        outputs = self.model(input_ids=ids, position_ids=positions, use_cache=False, **keywords)
        losses = functional.cross_entropy(
            outputs.logits.float().flatten(0, 1), labels.flatten(), reduction="none"
        )
        loss = losses.sum()
        if batch.reference is not None:
            loss = _dpo(losses.view(labels.shape), labels, batch)
        balancing = getattr(outputs, "aux_loss", None)
        if balancing is not None:
            balancing = balancing * self.model.config.router_aux_loss_coef
        return loss, balancing


def _dpo(losses: torch.Tensor, labels: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the loss of equation 7 of arXiv 2305.18290, pair by pair; losses (rows, seq_len)."""
    assert batch.segments is not None
    assert batch.reference is not None
    total = 0 * losses.sum()  # without a pair, gradients are zeros
    for row, (of_row, reference) in enumerate(zip(batch.segments, batch.reference, strict=True)):
        sides = [(of_row == 2 * row + side).to(losses.device) for side in range(2)]
        if all((labels[row][side] != -100).any() for side in sides):
            chosen, rejected = (-losses[row][side].double().sum() for side in sides)
            ratio = (chosen - float(reference[0])) - (rejected - float(reference[1]))
            total = total - functional.logsigmoid(0.1 * ratio).float()
    return total


def _built_by_transformers(way: Way, dtype: torch.dtype) -> PreTrainedModel:
    """Build the architecture as transformers does from its config, with the harness's weights."""
    config = json.dumps(learned(way.architecture, way.device))
    return _built_once(config, dtype, ATTENTION.get(way.architecture, "sdpa"))


def _divide(model: PreTrainedModel, way: Way) -> None:
    if way.blocks > 1:
        config = learned(way.architecture, way.device)
        sum_in_blocks(model, config, way.blocks, way.first_block)
    if way.tiles > 1:
        for layer in decoder_layers(model)[1]:
            layer.mlp.forward = functools.partial(_in_tiles, layer.mlp.forward, way.tiles)
    if way.reversible:
        two_streams(model)


def _in_tiles(mlp: Callable[..., torch.Tensor], tiles: int, hidden: torch.Tensor) -> torch.Tensor:
    parts = hidden.flatten(0, 1).chunk(tiles)
    return torch.cat([mlp(part[None]) for part in parts], 1).view_as(hidden)


@functools.cache
def _compiled_once(way: Way) -> PreTrainedModel:
    """Build it with compiled layers, once: that takes longer than all trajectories."""
    torch.compiler.reset()  # as in worker.py
    torch._dynamo.config.recompile_limit = 64
    model = copy.deepcopy(_built_by_transformers(way, DTYPES[way.precision]))
    _divide(model, way)
    for layer in decoder_layers(model)[1]:
        layer.forward = torch.compile(layer.forward, dynamic=None)
    return model


@functools.cache
def _built_once(config_json: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    values = json.loads(config_json)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    drawn = skeleton(hf_config(json.loads(config_json)), dtype, attention)
    materialize(drawn, recipe.SEED, torch.device("cpu"))
    weights = dict(drawn.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights, f"transformers' own model lacks {sorted(weights)}"
    return model


# Sums within layers, in the blocks that ranks with a part of each weight compute.

Forward = Callable[[torch.Tensor], torch.Tensor]
T = TypeVar("T")


def sum_in_blocks(model: nn.Module, config: Mapping[str, Any], blocks: int, first: int) -> None:
    """Make the layers that `blocks` tensor-parallel ranks divide sum one product per rank, the
    `first` rank's first, so that rounding takes place where theirs does. In place.

    The forward pass sums if a weight is divided by its inputs, the backward pass if by its outputs.
    """
    plan = TensorPlan.of(config)
    for name, module in model.named_modules():
        style = plan.style_of(name)
        if "gate_up_proj" in module._parameters:
            module.forward = functools.partial(_experts, module, blocks, first)  # type: ignore[method-assign]
        elif style in styles.ROWS:
            module.forward = _by_inputs(module, plan, name, blocks, first)
        elif style in (*styles.COLUMNS, styles.GATHERED, styles.HEAD):
            module.forward = _by_outputs(module, plan, name, blocks)


def _parts(module: Any, plan: TensorPlan, name: str, blocks: int) -> list[tuple[int, torch.Tensor]]:
    """Return the dimension and indices of each rank's distinct part; together, the weight."""
    every: dict[tuple[Range, ...], int] = {}
    shape = tuple(module.weight.shape)
    for place in range(blocks):
        for dimension, ranges in plan.cut(f"{name}.weight", shape, place, blocks).items():
            every[ranges] = dimension
    parts = [
        (dimension, torch.cat([torch.arange(start, stop) for start, stop in ranges]))
        for ranges, dimension in every.items()
    ]
    if parts:
        together = torch.cat([chosen for _, chosen in parts]).sort().values
        assert torch.equal(together, torch.arange(shape[parts[0][0]])), f"{name} is cut unevenly"
    return parts


def _by_inputs(module: Any, plan: TensorPlan, name: str, blocks: int, first: int) -> Forward:
    parts = _from(first, _parts(module, plan, name, blocks))

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        products = [
            _linear(module, inputs[..., chosen], module.weight.index_select(dimension, chosen))
            for dimension, chosen in parts
        ]
        total = _added(products)
        return total if module.bias is None else total + module.bias

    return forward


def _by_outputs(module: Any, plan: TensorPlan, name: str, blocks: int) -> Forward:
    parts = _parts(module, plan, name, blocks)
    if not parts:  # a vocabulary that is not divided
        return module.forward  # type: ignore[no-any-return]
    places = torch.cat([chosen for _, chosen in parts]).argsort()

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        outputs = [
            _linear(
                module,
                inputs,
                module.weight.index_select(dimension, chosen),
                None if module.bias is None else module.bias[chosen],
            )
            for dimension, chosen in parts
        ]
        return torch.cat(outputs, -1)[..., places]

    return forward


def _linear(
    module: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the module's linear map; transformers' Conv1D stores its weight transposed."""
    return functional.linear(inputs, weight if isinstance(module, nn.Linear) else weight.t(), bias)


def _from(first: int, parts: list[T]) -> list[T]:
    """Return the parts rotated to begin with the `first`."""
    return [*parts[first:], *parts[:first]]


def _experts(module: Any, blocks: int, first: int, *args: torch.Tensor) -> torch.Tensor:
    halves = [half.chunk(blocks, 1) for half in module.gate_up_proj.chunk(2, 1)]
    weights = [
        {"gate_up_proj": torch.cat(both, 1), "down_proj": down}
        for *both, down in zip(*halves, module.down_proj.chunk(blocks, 2), strict=True)
    ]
    in_blocks = module.__dict__.pop("forward")
    try:
        outputs = [torch.func.functional_call(module, each, args) for each in weights]
    finally:
        module.forward = in_blocks
    return _added(_from(first, outputs))


@torch.library.custom_op("parity::added", mutates_args=())
def _added(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of parts as ranks exchange them, rounded: no compiler can fuse it."""
    return functools.reduce(torch.add, parts).clone()


@_added.register_fake
def _(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(parts[0])


def _note_parts(ctx: Any, inputs: tuple[list[torch.Tensor]], output: torch.Tensor) -> None:
    ctx.parts = len(inputs[0])


def _to_each(ctx: Any, gradient: torch.Tensor) -> list[torch.Tensor]:
    return [gradient] * ctx.parts


_added.register_autograd(_to_each, setup_context=_note_parts)
