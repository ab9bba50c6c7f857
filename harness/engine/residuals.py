"""The residual stream between tensor-parallel modules: whole on every rank, or divided by tokens.

Divided (arXiv 2205.05198, section 4.2.2), each rank has some tokens of every row outside the
modules with divided weights, so that norms, dropout and residuals cost 1/t. Such a module gets the
tokens of all ranks, and the sum of its partial results is scattered: two exchanges that move what
one sum does.
"""

import inspect
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from harness.models.exchange import (
    Readers,
    added,
    copied,
    gathered_for_parts,
    joined,
    own_slice,
    scattered_sum,
    sliced,
    summed,
)
from harness.models.flow import StandIn
from harness.models.units import decoder_layers
from harness.plan.overrides import DROPOUT_ENDINGS

_DROPOUT = functional.dropout


class Residuals:
    """The exchanges of one model's divided modules with its residual stream.

    `divided` says how the layers' last forward pass ran: rows that the ranks cannot divide, such as
    a prompt, stay whole.
    """

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup, divides: bool) -> None:
        self.group, self.divided = group, False
        self._divides = divides
        self._shape = torch.Size()  # of this rank's hidden states
        values = model.config.to_dict().items()
        self._draws = any(bool(value) for key, value in values if key.endswith(DROPOUT_ENDINGS))
        prefix, layers = decoder_layers(model) if divides else ("", ())
        self._layers = [layer for layer in layers if not isinstance(layer, StandIn)]
        self._prefix = f"{prefix}."

    def prepare(self, named: dict[str, nn.Module], divided: Collection[str]) -> None:
        """Sum the gradients of weights that see some of the tokens: those in layers, but not those
        of the modules `divided`, which have parts of the weights.
        """
        for layer in self._layers if self._draws else ():
            layer.forward = self._drawing(layer.forward)
        for name, module in named.items():
            if self.is_in_layer(name) and name not in divided:
                self.sum_gradients(module.parameters(recurse=False))

    def is_in_layer(self, name: str) -> bool:
        """Return True for a module of a layer, if the stream may be divided."""
        return self._divides and name.startswith(self._prefix)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of weights that every rank applies to its own tokens."""
        for parameter in parameters if self._divides else ():
            parameter.register_hook(lambda g: summed(g, self.group) if self.divided else g)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states for divided weights: of all ranks' tokens."""
        if not self.divided:
            return copied(hidden, self.group)
        whole = gathered_for_parts(hidden, hidden.ndim - 2, self.group)
        if not torch.compiler.is_compiling():  # which cannot trace what the readers share
            vars(whole)["own_part"] = hidden.detach(), Readers(self.group)
        return whole

    def linear(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return functional.linear; for what `enter` returned, only this rank's part is kept."""
        entered = None if torch.compiler.is_compiling() else getattr(hidden, "own_part", None)
        if entered is None or not torch.is_grad_enabled():
            return functional.linear(hidden, weight, bias)
        own, readers = entered
        output: torch.Tensor = readers.linear(hidden, own, weight, bias)
        return output

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' partial results: of this rank's tokens."""
        if not self.divided:
            return added(partial, self.group)
        return scattered_sum(partial, partial.ndim - 2, self.group)

    def divide(self) -> None:
        """Divide the stream before the first layer, and join it after the last. Call this once the
        layers have their last changes, which see each rank's tokens.
        """
        if not (self._divides and self._layers):  # a pipeline stage may have no layers
            return
        self._layers[0].register_forward_pre_hook(self._begin, with_kwargs=True)
        self._layers[-1].register_forward_hook(self._end)

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        rows, tokens, *width = hidden.shape
        self.divided = tokens % self.group.size() == 0
        self._shape = torch.Size((rows, tokens // self.group.size(), *width))
        if not self.divided:
            return None
        own = sliced(hidden, 1, self.group)
        return ((own, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": own})

    def _end(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.divided:
            return None
        if isinstance(output, tuple):
            return (joined(output[0], 1, self.group), *output[1:])
        return joined(output, 1, self.group)

    def _drawing(self, inner: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.divided:
                return inner(*args, **kwargs)
            with _WholeDraws(self):
                return inner(*args, **kwargs)

        return forward

    def dropped(self, hidden: torch.Tensor, rate: float) -> torch.Tensor | None:
        """Return this rank's hidden states after dropout, with its part of the numbers that every
        layout draws for whole rows. None if `hidden` is something else.
        """
        rows, tokens, width = self._shape
        if hidden.shape[-1] != width or hidden.numel() != self._shape.numel():
            return None
        whole = hidden.new_ones(rows, tokens * self.group.size(), width)
        kept = own_slice(functional.dropout(whole, rate), 1, self.group)
        return hidden * kept.view_as(hidden)


class _WholeDraws(TorchFunctionMode):
    """Within this context, a rank's hidden states are dropped as within whole rows."""

    def __init__(self, residuals: Residuals) -> None:
        super().__init__()
        self._residuals = residuals

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not _DROPOUT:
            return func(*args, **kwargs)
        (hidden, *_), bound = args, inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        if not (bound.arguments["training"] and bound.arguments["p"]):
            return hidden
        dropped = self._residuals.dropped(hidden, bound.arguments["p"])
        return func(*args, **kwargs) if dropped is None else dropped
