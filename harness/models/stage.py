"""One pipeline stage of a decoder: the model itself, with pass-through modules for other stages.

Nothing is rebuilt: Hugging Face's own code makes masks, positions and rotary embeddings, every
parameter keeps its name, and layer i is still layer i. One tensor travels between stages, so that
one backward pass returns its gradient: the hidden states and, concatenated along the last axis, the
router logits of a mixture of experts, which the load balancing loss needs at the end.
"""

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from harness.layout.families import SIZE_KEYS
from harness.models.attention import separating
from harness.models.flow import Flow, StandIn
from harness.models.units import decoder_layers, units

_MASK = "attention_mask"  # argument of the loss below that selects the tokens to count
_BALANCING = "load_balancing_loss_func"  # name of the loss in every mixture's module

Finish = Callable[[Callable[[], Any]], torch.Tensor]


class Stage(nn.Module):
    """One stage of a model that `reduce_to_stage` has cut, between receiving and sending.

    Takes and returns what DeepSpeed sends between stages: token ids on the first stage, otherwise
    (micro_batch, seq_len, hidden_size + routers); with document boundaries a tuple of that and the
    position ids. The last stage returns the result of `finish`, which receives a function that runs
    the model. `keywords`: arguments for attention, per micro-batch. Raises ValueError for a mixture
    whose load balancing loss is not transformers' function.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        _, layers = decoder_layers(model)
        self.enter = next((layer for layer in layers if isinstance(layer, _Enter)), None)
        self.leave = next((layer for layer in layers if isinstance(layer, _Leave)), None)
        self.finish: Finish = lambda run: run()
        self.keywords: Iterator[dict[str, Any]] = itertools.repeat({})
        self.gets_padding = False
        config = model.config.get_text_config(decoder=True)
        self.routed = bool(getattr(config, "output_router_logits", False))
        self.experts = _num_experts(model) if self.routed else 0

    def forward(self, inputs: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        """Run one micro-batch through this stage."""
        carried, *positions = inputs if isinstance(inputs, tuple) else (inputs,)
        with separating(documents=bool(positions)):
            return self._forward(carried, positions)

    def _forward(self, carried: torch.Tensor, positions: list[torch.Tensor]) -> Any:
        keywords = next(self.keywords)
        if positions:
            keywords = {**keywords, "position_ids": positions[0]}
        routers: tuple[torch.Tensor, ...] = ()
        ids = carried
        if self.enter is not None:
            self.enter.hidden, routers = self._unpacked(carried)
            ids = torch.zeros(carried.shape[:2], dtype=torch.int64, device=carried.device)
        if self.leave is None:
            run = partial(self.model, input_ids=ids, use_cache=False, **keywords)
            counted = counted_tokens(positions[0] if positions else None, self.gets_padding)
            earlier = (lambda own: (*routers, *(own or ()))) if routers else None
            with balancing_of(self.model, counted, earlier):
                return self.finish(run)
        outputs = self.model.base_model(input_ids=ids, use_cache=False, **keywords)
        own = (outputs.router_logits or ()) if self.routed else ()  # dense layers have no routers
        packed = self._packed(self.leave.taken(), (*routers, *own))
        return (packed, *positions) if positions else packed

    def _packed(self, hidden: torch.Tensor, routers: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return hidden states and router logits concatenated, (micro_batch, seq_len, hidden_size +
        layers so far x experts), in the wider dtype.
        """
        if not routers:
            return hidden
        return torch.cat([hidden, *(r.view(*hidden.shape[:2], -1) for r in routers)], dim=-1)

    def _unpacked(self, carried: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        if not self.routed:
            return carried, ()
        hidden_size = self.model.config.get_text_config(decoder=True).hidden_size
        hidden, routers = carried[..., :hidden_size], carried[..., hidden_size:]
        layers = routers.shape[-1] // self.experts
        if not layers:
            return hidden, ()
        return hidden.to(self.model.dtype), tuple(routers.flatten(0, 1).chunk(layers, dim=-1))


class _PassThrough(StandIn):
    """Takes the place of another stage's module and returns its first input."""

    def __init__(self, module: nn.Module, returns_tuple: bool = False) -> None:
        super().__init__(module)
        self._returns_tuple = returns_tuple

    def forward(self, hidden: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        return (hidden,) if self._returns_tuple else hidden


class _Enter(_PassThrough):
    """Takes the place of the layer before this stage; returns what the previous stage sent."""

    hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, self.hidden = self.hidden, None
        return super().forward(hidden)


class _Leave(_PassThrough):
    """Takes the place of the layer after this stage; keeps the hidden states for the next stage."""

    _hidden: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        assert hidden is not None, "a layer returned nothing"
        self._hidden = hidden
        return super().forward(hidden.detach())

    def taken(self) -> torch.Tensor:
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "the model did not run its layers"
        return hidden


class _NoEmbedding(StandIn):
    """Returns zeros in the shape of embeddings; the stage's first layer never reads them."""

    def __init__(self, module: nn.Embedding, is_input: bool, dtype: torch.dtype) -> None:
        super().__init__(module)
        self._is_input, self._dtype = is_input, dtype
        self._size = module.embedding_dim
        # Some models read its device.
        self.register_buffer("weight", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        zero = torch.zeros((), dtype=self._dtype, device=ids.device)
        return zero.expand(*ids.shape, self._size) if self._is_input else zero


def reduce_to_stage(model: PreTrainedModel, flow: Flow, first_layer: int, end_layer: int) -> None:
    """Keep decoder layers [first_layer, end_layer) of a skeleton, and the modules before the first
    or after the last layer if that layer is among them; pass everything else through. In place.
    """
    _, layers = decoder_layers(model)
    others = (flow.before if first_layer > 0 else ()) + (
        flow.after if end_layer < len(layers) else ()
    )
    embedding = model.get_input_embeddings()
    for piece in [piece for piece in units(model) if piece.name in others]:
        stand_in: nn.Module = _PassThrough(piece.module)
        if isinstance(piece.module, nn.Embedding):
            stand_in = _NoEmbedding(piece.module, piece.module is embedding, model.dtype)
        model.set_submodule(piece.name, stand_in)
    for index, layer in enumerate(layers):
        if index == first_layer - 1:
            layers[index] = _Enter(layer, flow.returns_tuple)
        elif index == end_layer:
            layers[index] = _Leave(layer, flow.returns_tuple)
        elif not first_layer <= index < end_layer:
            layers[index] = _PassThrough(layer, flow.returns_tuple)


def _num_experts(model: PreTrainedModel) -> int:
    module = sys.modules[type(model).__module__]
    config = model.config.get_text_config(decoder=True)
    counts = [getattr(config, key, None) for key in SIZE_KEYS["experts"]]
    experts = next((count for count in counts if count), None)
    if not hasattr(module, _BALANCING) or experts is None:
        raise ValueError(
            f"the balancing loss of {type(model).__name__} cannot be passed across stages: set "
            "model.overrides.output_router_logits=false, or use ZeRO 3"
        )
    return int(experts)


def counted_tokens(positions: torch.Tensor | None, gets_padding: bool) -> torch.Tensor | None:
    """Return True for tokens and False for padding; None if there is no padding or no positions.

    positions (micro_batch, seq_len) start at 1 in padding, at 0 in a document
    (data/packed_documents.py).
    """
    if positions is None or not gets_padding:
        return None
    begins = (positions[:, 1:] == 1) & (positions[:, :-1] != 0)
    return functional.pad(begins, (1, 0)).cumsum(1) == 0


@contextlib.contextmanager
def balancing_of(
    model: PreTrainedModel, counted: torch.Tensor | None, change: Callable[[Any], Any] | None = None
) -> Iterator[None]:
    """Within this context, a mixture's load balancing loss covers only the tokens in `counted`, a
    mask of any shape (None: all). `change` maps the model's own router logits, a (tokens, experts)
    tensor per layer, to those that the loss uses.
    """
    module = sys.modules[type(model).__module__]
    original = getattr(module, _BALANCING, None)
    if original is None or (counted is None and change is None):
        yield
        return
    takes_mask = counted is not None and _MASK in inspect.signature(original).parameters

    def of_changed(own: Any, *args: Any, **kwargs: Any) -> Any:
        routers = own if change is None else change(own)
        bound = inspect.signature(original).bind(routers, *args, **kwargs)
        if takes_mask:
            bound.arguments[_MASK] = counted
        return original(*bound.args, **bound.kwargs)

    setattr(module, _BALANCING, of_changed)
    try:
        yield
    finally:
        setattr(module, _BALANCING, original)
