"""Traces a run's model class on fake tensors and counts the bytes that autograd saves."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from harness.estimate.inputs import Inputs
from harness.models.chunked_loss import ChunkedLoss
from harness.models.layer_changes import tile_mlps
from harness.models.logits import operations_on_logits
from harness.models.recompute import checkpoint_layers
from harness.models.tracing import Request, trace


def traced_saved(config: dict[str, Any], inputs: Inputs, source: str | None = None) -> int:
    """Return the bytes that the model saves for backward, tracing each kind of layer."""

    def as_the_run_does(model: PreTrainedModel) -> None:
        checkpoint_layers(model, inputs.checkpointing, inputs.activation_offload)
        if inputs.mlp_tiles > 1:
            tile_mlps(model, inputs.mlp_tiles)
        if inputs.chunk:
            chunked: Any = ChunkedLoss(model, inputs.chunk, operations_on_logits(model))
            model.chunked_loss = chunked

    batch = inputs.micro_batch, inputs.seq_len
    request = Request(config, source, inputs.precision, inputs.attention, *batch)
    return trace(request, as_the_run_does).bytes
