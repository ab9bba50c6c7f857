"""The operations that a model family applies to its output head's product to get logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from harness.models.units import decoder_layers


@dataclass(frozen=True)
class Operation:
    """One pointwise operation: a cast, a scale, or part of a soft cap."""

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    """Arguments after the tensor."""
    keywords: dict[str, Any]


Operations = tuple[Operation, ...]


def applied(operations: Operations, product: torch.Tensor) -> torch.Tensor:
    """Return the logits for the head's output, or for any part of it."""
    for operation in operations:
        product = operation.function(product, *operation.args, **operation.keywords)
    return product


def operations_on_logits(skeleton: PreTrainedModel) -> Operations:
    """Trace what the family's own code does to the head's output, on the meta device.

    Raises ValueError, with the reason, if the logits are not computed entry by entry from the
    product of a single Linear; then they cannot be computed in chunks.
    """
    kind, head = type(skeleton).__name__, skeleton.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(f"the output head of {kind} is not an nn.Linear")
    hidden = torch.empty(1, 4, head.in_features, dtype=skeleton.dtype, device="meta")
    recorder = _Recorder()

    def product(inputs: torch.Tensor) -> torch.Tensor:
        if recorder.last is not None:
            raise _NotInParts("runs its output head more than once")
        shape = (*inputs.shape[:-1], head.out_features)
        recorder.last = torch.empty(shape, dtype=head.weight.dtype, device="meta")
        return recorder.last

    routers = "output_router_logits"
    quiet = {routers: False} if hasattr(skeleton.config, routers) else {}
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    with torch.no_grad(), _replaced(skeleton, head, lambda *_, **__: _Body((hidden,)), product):
        try:
            with recorder:
                logits = skeleton(input_ids=ids, use_cache=False, **quiet).logits
        except _NotInParts as reason:
            raise ValueError(f"{kind} {reason}") from reason
        except Exception as error:  # raised by arbitrary model code
            raise ValueError(f"the head of {kind} cannot be traced: {error}") from error
    if logits is not recorder.last:
        raise ValueError(f"the logits of {kind} are not those of its output head")
    return tuple(recorder.operations)


class _NotInParts(Exception):
    """Raised if logits depend on one another."""


class _Body(tuple[torch.Tensor]):
    """The outputs of a decoder without its head: hidden states, and None for everything else."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Recorder(TorchDispatchMode):
    """Records every operation on `last` and on the results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last: torch.Tensor | None = None
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        output = function(*args, **keywords)
        tensors = [leaf for leaf in tree_leaves((args, keywords)) if torch.is_tensor(leaf)]
        if self.last is None or not any(tensor is self.last for tensor in tensors):
            return output
        casts = function is torch.ops.aten._to_copy.default and {*keywords} <= {"dtype"}
        pointwise = torch.Tag.pointwise in function.tags and not function._schema.is_mutable
        if len(tensors) > 1 or args[0] is not self.last or not (casts or pointwise):
            raise _NotInParts(f"computes its logits with {function}")
        self.operations.append(Operation(function, args[1:], keywords))
        self.last = output
        return output


@contextlib.contextmanager
def _replaced(
    model: PreTrainedModel, head: nn.Module, body: Callable[..., Any], product: Callable[..., Any]
) -> Iterator[None]:
    """Within this context, `body` replaces everything before the head, and `product` the head."""
    name, _ = decoder_layers(model)
    words = name.split(".")[:-1]
    bodies = [model.get_submodule(".".join(words[: n + 1])) for n in range(len(words))]
    forwards: list[tuple[nn.Module, Any]] = [(head, product), *((owner, body) for owner in bodies)]
    before = [(module, vars(module).get("forward")) for module, _ in forwards]
    try:
        for module, forward in forwards:
            module.forward = forward
        yield
    finally:
        for module, own in before:
            del module.forward
            if own is not None:
                module.forward = own
