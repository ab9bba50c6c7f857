"""The path of hidden states through a decoder, which determines whether it can be split."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from harness.models.attention import separating
from harness.models.units import decoder_layers, meta_logits, units


@dataclass(frozen=True)
class Flow:
    """Modules around the decoder layers, by qualified name, in model order."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    """Tied parameters by both names: in a module before the layers, and in one after them."""
    returns_tuple: bool
    """True if a layer must return (hidden states, ...) rather than hidden states."""


class _CannotBeCut(ValueError):
    """Raised for a decoder that cannot be split into stages, with the reason."""


class _OtherStyle(Exception):
    """Raised if the model seems to expect layers to return the other form: a tuple or a tensor."""


def trace_flow(skeleton: PreTrainedModel) -> Flow:
    """Trace a skeleton's own forward pass with observers in place of its layers.

    Raises ValueError with the property that this decoder lacks in order to be split into stages:
    layers run once, in order; each reads the hidden states that the previous layer returned, and
    nothing else that layers or embeddings computed; nothing with parameters runs between them;
    everything after them reads only the last hidden states; no parameter inside a layer is tied.
    """
    kind = type(skeleton).__name__
    if getattr(skeleton.config, "layerdrop", 0):
        raise _CannotBeCut(f"{kind} skips layers at random: set model.overrides.layerdrop=0")
    for returns_tuple in (False, True):
        with contextlib.suppress(_OtherStyle):
            return _Observed(skeleton, returns_tuple).flow()
    raise _CannotBeCut(f"a layer of {kind} does not read the previous layer's output")


class _Observed:
    """One forward pass on the meta device. Outputs of layers and embeddings require gradients, and
    so does everything computed from them.
    """

    def __init__(self, skeleton: PreTrainedModel, returns_tuple: bool) -> None:
        self.model = skeleton
        self.kind = type(skeleton).__name__
        self.returns_tuple = returns_tuple
        _, self.layers = decoder_layers(skeleton)
        self.outside = {p.name: p.module for p in units(skeleton) if not p.whole}
        self.ran_at: dict[str, set[int]] = {name: set() for name in self.outside}
        self.layers_run = 0
        self.last: torch.Tensor | None = None

    def flow(self) -> Flow:
        """Run the model once and return its flow. Raises _CannotBeCut."""
        for name, module in self.outside.items():
            if any(inner is self.layers for inner in module.modules()):
                raise _CannotBeCut(f"{self.kind} has parameters outside its modules ({name})")
        count = len(self.layers)
        logits = self._run()
        if self.layers_run != count:
            raise _CannotBeCut(f"{self.kind} runs {self.layers_run} of its {count} layers")
        if logits.requires_grad:
            raise _CannotBeCut(
                f"the modules after the layers of {self.kind} read more than hidden states"
            )
        for name, places in self.ran_at.items():
            if places - {0, count} or len(places) > 1:
                raise _CannotBeCut(f"{self.kind} runs {name} between its layers")
        before = tuple(name for name, places in self.ran_at.items() if places == {0})
        after = tuple(name for name in self.outside if name not in before)
        return Flow(before, after, tuple(self._tied(before, after)), self.returns_tuple)

    def _tied(self, before: tuple[str, ...], after: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        names: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            first = names.setdefault(id(parameter), name)
            owners = first.rpartition(".")[0], name.rpartition(".")[0]
            if first != name and owners[0] in before and owners[1] in after:
                yield first, name
            elif first != name:
                raise _CannotBeCut(f"{self.kind} uses {first} again as {name}")

    def _run(self) -> torch.Tensor:
        with self._watching():
            try:
                return meta_logits(self.model)
            except (_CannotBeCut, _OtherStyle):
                raise
            except Exception as error:  # raised by arbitrary model code
                if self.layers_run > 0 and not self.returns_tuple:
                    raise _OtherStyle from error
                raise _CannotBeCut(f"{self.kind} cannot be traced: {error}") from error

    def layer(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a decoder layer."""
        inputs = [*args, *kwargs.values()]
        hidden = inputs.pop(0)
        if self.layers_run != index:
            raise _CannotBeCut(f"{self.kind} does not run its layers once, in order")
        if index > 0 and hidden is not self.last:
            raise _OtherStyle
        if any(tensor.requires_grad for tensor in _tensors(inputs)):
            raise _CannotBeCut(f"layer {index} of {self.kind} reads more than hidden states")
        self.layers_run += 1
        self.last = torch.empty_like(hidden, requires_grad=self.layers_run < len(self.layers))
        return (self.last,) if self.returns_tuple else self.last

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        config = self.model.config

        def ran(name: str, output: Any) -> None:
            self.ran_at[name].add(self.layers_run)
            if self.layers_run == 0:
                for tensor in _tensors([output]):
                    tensor.requires_grad_(tensor.is_floating_point())

        pad = getattr(config, "pad_token_id", None)
        trainable = {p: p.requires_grad for p in self.model.parameters()}
        originals = list(self.layers)
        hooks = [
            module.register_forward_hook(lambda m, i, output, name=name: ran(name, output))
            for name, module in self.outside.items()
        ]
        try:
            config.pad_token_id = None  # otherwise the model would read ids, which have no values
            self.model.requires_grad_(False)
            for index, layer in enumerate(originals):
                self.layers[index] = _Observer(self, index, layer)
            with torch.enable_grad(), separating(documents=False):
                yield
        finally:
            config.pad_token_id = pad
            for hook in hooks:
                hook.remove()
            for index, layer in enumerate(originals):
                self.layers[index] = layer
            for parameter, wanted in trainable.items():
                parameter.requires_grad_(wanted)


class StandIn(nn.Module):
    """Takes the place of a module and has its public attributes, such as a layer's attention type,
    which other modules read.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__ |= {k: v for k, v in vars(module).items() if not k.startswith("_")}


class _Observer(StandIn):
    def __init__(self, observed: _Observed, index: int, layer: nn.Module) -> None:
        super().__init__(layer)
        self._observed, self._index = observed, index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._observed.layer(self._index, *args, **kwargs)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested tuples, lists and dicts."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list | dict):
            yield from _tensors(value)
