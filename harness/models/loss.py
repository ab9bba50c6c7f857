"""The training loss, summed over target tokens or over preference pairs.

A LossSetup says how: from all logits, in chunks if they are large, with a sharded vocabulary, or by
Liger. engine/zero.py and engine/pipeline.py divide the sum by the targets of the global batch: its
target tokens, or its pairs.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from harness.config.own import ROWS
from harness.errors import ConfigError
from harness.models.attention import separating
from harness.models.chunked_loss import ChunkedLoss
from harness.models.preferences import Pairs, Preferences
from harness.models.sequence import DividedRows
from harness.models.stage import balancing_of, counted_tokens
from harness.models.token_losses import Vocabulary, record, token_losses
from harness.plan.plan import Plan


@dataclass(frozen=True)
class LossSetup:
    """What the loss needs to know of how a model was built and of its batches."""

    vocabulary: Vocabulary | None = None
    """This rank's shard of the logits; None if it has all."""
    chunked: ChunkedLoss | None = None
    fuses_loss: bool = False
    """In training, Liger's forward pass returns the loss instead of logits."""
    gets_padding: bool = False
    """Batches contain padding, which the balancing loss of a mixture of experts ignores."""
    rows: DividedRows | None = None
    """With these, this rank computes its tokens of each row."""
    preferences: Preferences | None = None
    """The objective for pairs; None: cross-entropy."""
    own: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """The training loss of run.code (`own_loss`); None for cross-entropy."""

    @property
    def in_evaluation(self) -> "LossSetup":
        """The setup for evaluations, whose loss is cross-entropy."""
        return replace(self, own=None)


PLAIN = LossSetup()
"""For a whole model, without padding."""


def forward(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    setup: LossSetup = PLAIN,
    smoothing: float = 0.0,
    keywords: Mapping[str, Any] = MappingProxyType({}),
    pairs: Pairs | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the model on one micro-batch; the three tensors are (micro_batch, seq_len) int64.

    Returns the result of `losses`. No attention mask is passed: every position is a token.
    Documents are separated by `position_ids`, which is None if each row is one document, or by
    `keywords`, which are passed to attention (Batch.keywords).
    """
    arguments: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
    if (rows := setup.rows) is not None:
        with separating(position_ids is not None):
            arguments = rows.keywords(input_ids, position_ids)
        input_ids, labels = rows.own(input_ids), rows.own(labels)
        pairs = pairs and replace(pairs, segments=rows.own(pairs.segments))
    own: Any = getattr(model, "module", model)
    if setup.fuses_loss and own.training and not smoothing and setup.own is None:
        # Liger returns the sum, divided by 1. It accumulates the head's gradient over chunks of
        # tokens in fp32, not in the weight's bf16.
        arguments |= {"shift_labels": labels, "num_items_in_batch": 1, "accum_dtype": torch.float32}
    run = partial(model, input_ids=input_ids, use_cache=False, **arguments, **keywords)
    counted = counted_tokens(position_ids, setup.gets_padding)
    balancing = balancing_of(own, counted) if rows is None else rows.balancing(counted)
    with separating(position_ids is not None), balancing:
        return losses(own, run, labels, setup, smoothing, pairs)


def losses(
    model: Any,
    run: Callable[[], Any],
    labels: torch.Tensor,
    setup: LossSetup,
    smoothing: float,
    pairs: Pairs | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the summed loss of `run`, which calls the model, and the auxiliary loss of a mixture
    of experts, already multiplied by the model's coefficient (None for dense models). The sum is
    over `pairs` if there are any, otherwise over tokens.
    """
    chunked = setup.chunked
    with chunked.of(labels, smoothing, setup.vocabulary) if chunked else contextlib.nullcontext():
        outputs = run()
    auxiliary = getattr(outputs, "aux_loss", None)
    if auxiliary is not None:
        auxiliary = auxiliary * float(model.config.router_aux_loss_coef)
    if outputs.logits is None:  # fused head, see models/layer_changes.py
        return outputs.loss.float(), auxiliary
    if setup.own is not None:
        each = setup.own(outputs.logits.float(), labels)
    elif chunked is not None:
        each = chunked.taken(outputs.logits)
    elif setup.vocabulary is not None:
        each = setup.vocabulary.token_losses(outputs.logits, labels, smoothing)
    else:
        each = token_losses(outputs.logits, labels, smoothing)
    if pairs is None or setup.preferences is None:
        return each.sum(), auxiliary
    return setup.preferences(each, labels, pairs), auxiliary


def own_loss(plan: Plan) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return train.loss by token if it is one of run.code, after a trial with random logits on the
    CPU; None for cross-entropy. Raises ConfigError.
    """
    row = ROWS.get(("loss", plan.config.train.loss))
    if row is None:
        return None
    function = row.bound(plan.config.own.given)

    def recorded(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses: torch.Tensor = function(logits, labels)
        record(losses.contiguous())
        return losses

    draw, rows = torch.Generator().manual_seed(0), int(plan.model_config.get("vocab_size") or 64)
    logits = torch.randn(2, 4, rows, generator=draw, requires_grad=True)
    labels = torch.randint(rows, (2, 4), generator=draw)
    labels[0, :2] = -100
    try:
        losses = function(logits, labels)
    except Exception as error:
        raise row.failed(error) from error
    if not torch.is_tensor(losses) or losses.shape != labels.shape:
        kind = tuple(losses.shape) if torch.is_tensor(losses) else type(losses).__name__
        raise ConfigError(f"{row} returns {kind}, not the loss of each token, (2, 4)")
    if not losses.requires_grad:
        raise ConfigError(f"{row} returns losses without a gradient")
    if losses[labels == -100].any():
        raise ConfigError(f"{row} returns losses where there is no target (label -100), not 0")
    return recorded
