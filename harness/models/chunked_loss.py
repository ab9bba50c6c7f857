"""Output head and cross-entropy, computed in chunks of the vocabulary.

The full logits of a micro-batch never exist. The forward pass keeps the log-sum-exp of each token's
logits. The backward pass recomputes the logits chunk by chunk; each chunk gives its rows of the
head's gradient, complete, and a summand of the hidden states' gradient. Chunks divide the
vocabulary rather than the tokens. Otherwise the gradient of the whole head would be accumulated,
which takes more memory in fp32 than the logits that chunking avoids.

The operations by which a model family turns the head's output into logits are traced.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from harness.models.exchange import copied
from harness.models.token_losses import Vocabulary, record
from harness.models.units import decoder_layers, meta_logits


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

    with torch.no_grad(), _replaced(skeleton, head, lambda *_, **__: _Body((hidden,)), product):
        try:
            with recorder:
                logits = meta_logits(skeleton)
        except _NotInParts as reason:
            raise ValueError(f"{kind} {reason}") from reason
        except Exception as error:  # raised by arbitrary model code
            raise ValueError(f"the head of {kind} cannot be traced: {error}") from error
    if logits is not recorder.last:
        raise ValueError(f"the logits of {kind} are not those of its output head")
    return tuple(recorder.operations)


class _NotInParts(Exception):
    """Raised if logits cannot be computed in chunks. Its message follows the model's name."""


class _Body(tuple[torch.Tensor]):
    """The outputs of a decoder without its head: hidden states, and None for everything else."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Recorder(TorchDispatchMode):
    """Records every operation on `last`, whose result becomes the new `last`."""

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


class ChunkedLoss:
    """The loss of a model, computed inside its output head while `of` supplies the labels.

    It is computed in the head's own call, so that ZeRO 3 gathers the weight as for logits: once per
    pass. The model's own operations on the head's output are ignored. Create this after DeepSpeed's
    engine: the engine's hooks on the head must see the loss first.
    """

    def __init__(self, model: PreTrainedModel, chunk: int, operations: Operations) -> None:
        """`chunk`: vocabulary entries per chunk. `operations`: see `operations_on_logits`."""
        self._model, self._chunk, self._operations = model, chunk, operations
        self._asked: tuple[torch.Tensor, _How] | None = None
        self._loss: torch.Tensor | None = None
        head: Any = model.get_output_embeddings()
        self._logits: Callable[[torch.Tensor], torch.Tensor] = head.forward
        head.forward = self._forward
        head.register_forward_hook(self._keep)

    @contextlib.contextmanager
    def of(
        self, labels: torch.Tensor, smoothing: float, part: Vocabulary | None = None
    ) -> Iterator[None]:
        """Within this context, the head computes the loss instead of logits.

        labels (micro_batch, seq_len). `part`: this rank's shard of a sharded vocabulary.
        """
        self._asked = labels.reshape(-1), _How(self._chunk, self._operations, smoothing, part)
        try:
            yield
        finally:
            self._asked = None

    def taken(self, output: torch.Tensor) -> torch.Tensor:
        """Return the losses of the last micro-batch's tokens, (micro_batch * seq_len,), in fp32.

        `output`: the model's `logits`, computed from the losses. DeepSpeed prepares for the
        backward pass in a hook on it; without that, BF16_Optimizer adds the last micro-batch's
        gradients twice.
        """
        loss, self._loss = self._loss, None
        assert loss is not None, "the model did not run its output head"
        beside: torch.Tensor = _Beside.apply(loss, output)  # type: ignore[no-untyped-call]
        return beside

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._asked is None:
            return self._logits(hidden)
        head: Any = self._model.get_output_embeddings()
        if (part := self._asked[1].part) is not None:
            hidden = copied(hidden, part.group)
        arguments = (hidden.reshape(-1, hidden.shape[-1]), head.weight, head.bias, *self._asked)
        loss: torch.Tensor = _HeadAndLoss.apply(*arguments)  # type: ignore[no-untyped-call]
        return loss

    def _keep(self, _module: Any, _args: Any, output: torch.Tensor) -> None:
        if self._asked is not None:
            self._loss = output


class _Beside(Function):
    """Returns a loss unchanged; its backward pass also sends zeros through another output."""

    @staticmethod
    def forward(context: Any, loss: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        context.like = output.new_zeros(output.shape)
        return loss.view_as(loss)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return gradient, context.like


@dataclass(frozen=True)
class _How:
    chunk: int
    operations: Operations
    smoothing: float
    part: Vocabulary | None
    """This rank's shard of a sharded vocabulary."""

    def columns(self, vocab_size: int) -> Iterator[slice]:
        for start in range(0, vocab_size, self.chunk):
            yield slice(start, min(start + self.chunk, vocab_size))

    def target(self, labels: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a mask of the tokens whose target is among these columns, and the target's index
        among them, 0 for other tokens.
        """
        place = labels - columns.start - (self.part.first if self.part else 0)
        is_here = (labels != -100) & (place >= 0) & (place < columns.stop - columns.start)
        return is_here, place.masked_fill(~is_here, 0)


def _product(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, columns: slice
) -> torch.Tensor:
    """Return the head's output for these columns, (tokens, columns)."""
    if bias is None:
        return hidden @ weight[columns].t()
    return torch.addmm(bias[columns], hidden, weight[columns].t())


def _add_summand(total: torch.Tensor, slope: torch.Tensor, weight: torch.Tensor) -> None:
    """Add a chunk's contribution to the fp32 gradient of the hidden states."""
    total += slope @ weight


class _HeadAndLoss(Function):
    """Cross-entropy of the head's logits, token by token."""

    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        how: _How,
    ) -> torch.Tensor:
        """Return (tokens,); hidden (tokens, hidden_size), labels (tokens,). Collective if the head
        is sharded.
        """
        largest = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
        # Per token: the sum of exponentials, the target's logit, the sum of logits.
        sums = torch.zeros(3, len(hidden), dtype=torch.float32, device=hidden.device)
        for columns in how.columns(len(weight)):
            # The product has no name, so that it is freed once it is cast.
            logits = applied(how.operations, _product(hidden, weight, bias, columns)).float()
            is_here, place = how.target(labels, columns)
            sums[1] += logits.gather(1, place[:, None])[:, 0].masked_fill(~is_here, 0)
            if how.smoothing:
                sums[2] += logits.sum(-1)
            before, largest = largest, torch.maximum(largest, logits.amax(-1))
            sums[0] *= (before - largest).exp_()
            sums[0] += logits.sub_(largest[:, None]).exp_().sum(-1)
            del logits  # frees them before the next chunk
        vocab_size = len(weight)
        if how.part is not None:
            before, vocab_size = largest.clone(), how.part.whole
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=how.part.group)
            sums[0] *= (before - largest).exp_()
            dist.all_reduce(sums, group=how.part.group)
        log_sum = sums[0].log() + largest
        context.save_for_backward(hidden, weight, bias, labels, log_sum)
        context.how, context.even = how, how.smoothing / vocab_size
        losses: torch.Tensor = log_sum - (1 - how.smoothing) * sums[1] - context.even * sums[2]
        losses = losses.masked_fill(labels == -100, 0)
        record(losses)
        return losses

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of hidden states, weight and bias. Not collective."""
        hidden, weight, bias, labels, log_sum = context.saved_tensors
        how: _How = context.how
        needs = context.needs_input_grad
        for_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs[0] else None
        for_weight = torch.empty_like(weight) if needs[1] else None
        for_bias = torch.empty_like(bias) if needs[2] else None
        scale = gradient * (labels != -100)
        for columns in how.columns(len(weight)):
            product = _product(hidden, weight, bias, columns)
            if how.operations:
                with torch.enable_grad():
                    logits = applied(how.operations, product.requires_grad_())
                dtype, slope = logits.dtype, logits.detach().to(torch.float32, copy=True)
            else:
                dtype, slope = product.dtype, product.float()
                del product
            is_here, place = how.target(labels, columns)
            slope.sub_(log_sum[:, None]).exp_()
            if how.smoothing:
                slope.sub_(context.even)
            slope.scatter_add_(1, place[:, None], (how.smoothing - 1) * is_here[:, None].float())
            slope = slope.mul_(scale[:, None]).to(dtype)
            if how.operations:
                (slope,) = torch.autograd.grad(logits, product, slope)
                del logits, product
            if for_hidden is not None:
                _add_summand(for_hidden, slope, weight[columns])
            if for_weight is not None:
                torch.mm(slope.t(), hidden, out=for_weight[columns])
            if for_bias is not None:
                for_bias[columns] = slope.sum(0)
            del slope  # frees it before the next product
        for_hidden = None if for_hidden is None else for_hidden.to(hidden.dtype)
        return for_hidden, for_weight, for_bias, None, None
