"""The model without stages on one rank, for a pipelined run to be compared with."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from harness.data.batch import Batch
from harness.engine.reading import PieceReader, config_of_files, read_weights
from harness.layout.recompute import REVERSIBLE
from harness.models.initialize import materialize
from harness.models.loss import forward
from harness.models.recompute import checkpoint_layers
from harness.models.reversible import reverse_layers
from harness.plan.model_values import DROPOUT_ENDINGS
from harness.plan.plan import Plan


def unsplit_loss_and_norm(
    plan: Plan,
    empty: PreTrainedModel,
    device: torch.device,
    batches: Sequence[Batch],
    targets: int,
    loss_scale: float,
) -> tuple[float, float | None]:
    """Loss in nats and gradient norm of a global batch before the first step, without randomness;
    None is the norm of a model whose training steps are random.

    Layers are recomputed and gradients summed in fp32: it takes about `bytes_needed` bytes.
    """
    reads = plan.config.model.init_from is not None
    if not reads or config_of_files(plan, empty) is not None:
        model = copy.deepcopy(empty)
        reader = PieceReader(plan, empty, trust_remote_code=False) if reads else None
        materialize(model, plan.config.train.seed, device, read=reader)
    else:
        model = read_weights(type(empty), plan, empty, trust_remote_code=False)[0]
        model = nn.Module.to(model, device)
        model.gets_padding = getattr(empty, "gets_padding", False)  # type: ignore[assignment]
    compares_norm = not (is_random(model) or plan.config.model.stochastic_depth)
    model.train(compares_norm)
    if plan.checkpointing == REVERSIBLE:
        reverse_layers(model)
    else:
        checkpoint_layers(model, "full")
    parameters = trained(model) if compares_norm else []
    sums = {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}
    loss = torch.zeros((), device=device)
    for batch in batches:
        keywords = batch.keywords(plan.config.model.attention, device)
        smoothing = plan.config.train.label_smoothing
        if smoothing or not compares_norm:  # the loss that is compared is an evaluation's
            with torch.no_grad():
                token_loss, _ = forward(model, *batch.on(device), keywords=keywords)
            loss += token_loss / max(targets, 1)
        if not compares_norm:
            continue
        token_loss, auxiliary = forward(model, *batch.on(device), smoothing, keywords=keywords)
        share = token_loss / max(targets, 1)
        if not smoothing:
            loss += share.detach()
        if auxiliary is not None:
            share = share + auxiliary / len(batches)
        (share * loss_scale).backward()
        for parameter, total in sums.items():
            if parameter.grad is not None:
                total += parameter.grad.float() / loss_scale
            parameter.grad = None
    if not compares_norm:
        return float(loss), None
    # In fp64 as DeepSpeed's: on CPUs torch's own norm of a large fp32 tensor is off by 2e-5.
    norms = [torch.linalg.vector_norm(total, dtype=torch.float64) for total in sums.values()]
    return float(loss), float(torch.linalg.vector_norm(torch.stack(norms)))


def is_random(model: nn.Module) -> bool:
    """Return True if a training step draws random numbers: dropout, or noise in a router."""
    endings = (*DROPOUT_ENDINGS, "jitter_noise")
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or any(
            isinstance(v, float) and v > 0 and k.endswith(endings) for k, v in vars(module).items()
        )
        for module in model.modules()
    )


def bytes_needed(plan: Plan, empty: PreTrainedModel) -> int:
    """Weights, gradients and their fp32 sums; each layer's input, one layer at work (some 32 hidden
    states), and the logits as the loss needs them (docs/memory.md).
    """
    states = sum(p.numel() * (2 * p.element_size() + 4) for p in trained(empty))
    embedding = empty.get_input_embeddings().get_parameter("weight")
    vocab_size, hidden_size = embedding.shape
    layers = int(empty.config.get_text_config(decoder=True).num_hidden_layers)
    per_token = (layers + 32) * hidden_size * empty.dtype.itemsize + 16 * vocab_size
    return states + plan.micro_batch * plan.config.data.seq_len * per_token


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that get a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
