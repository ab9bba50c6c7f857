"""Changes within decoder layers: stochastic depth, fused kernels, tiled MLPs.

A tile keeps only its input and is recomputed in its backward pass, so the whole MLP needs the
memory of one tile. DeepSpeed's TiledMLP runs a separate backward pass per tile, after which ZeRO
must be told that a gradient is incomplete. Here the tiles are parts of one graph: autograd sums
their gradients before any ZeRO hook sees them.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from harness.models.flow import StandIn
from harness.models.keeping import keeping_none
from harness.models.units import decoder_layers


def drop_layers(model: PreTrainedModel, rate: float) -> None:
    """Skip layer l of L with probability `rate` * l / L, independently for each sample; in place. A
    layer's contribution is divided by its keep probability, so that evaluation needs no rescaling.
    Layers of other pipeline stages are left alone.
    """
    _, layers = decoder_layers(model)
    for number, layer in enumerate(layers, 1):
        if not isinstance(layer, StandIn):
            vars(layer)["depth_dropout"] = rate * number / len(layers)  # marks the model as random
            layer.register_forward_hook(_leave_out, with_kwargs=True)


def _leave_out(
    layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> Any:
    """Replace the output by the input, (micro_batch, seq_len, hidden_size), for skipped samples.

    Raises ValueError for a layer whose output shape differs from its input shape.
    """
    if not layer.training:
        return None
    before = args[0] if args else kwargs["hidden_states"]
    after = output[0] if isinstance(output, tuple) else output
    if after.shape != before.shape:
        raise ValueError(
            f"model.stochastic_depth: {type(layer).__name__} turns {tuple(before.shape)} into "
            f"{tuple(after.shape)}, so it cannot be skipped: set it to 0"
        )
    keep = 1.0 - float(vars(layer)["depth_dropout"])
    kept = torch.rand(len(before), 1, 1, device=before.device) < keep
    mixed = before + (after - before) * (kept / keep).to(after.dtype)
    return (mixed, *output[1:]) if isinstance(output, tuple) else mixed


def use_liger(model: PreTrainedModel) -> None:
    """Give this model Liger's RMSNorm and SwiGLU, and a head fused with the cross-entropy, which
    never holds all logits; with `fuses_loss`, `loss.forward` takes the summed loss from it.

    Liger also replaces the classes in transformers' module. That would affect every later model,
    such as an export, which is checked on the CPU, where Triton does not run. So the module is
    restored. For the same reason Liger's rotary embedding, a function of that module, is not used.
    """
    # Imports Triton, which requires a GPU.
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    module = vars(sys.modules[type(model).__module__])
    before = {**module}
    _apply_liger_kernel_to_instance(model, rope=False, fused_linear_cross_entropy=True)
    module.update(before)


MLP = "mlp"
"""Name of the MLP in a decoder layer, in most families."""


def tile_mlps(model: PreTrainedModel, tiles: int) -> set[type[nn.Module]]:
    """Make the MLP of every decoder layer process its tokens in `tiles` parts, in place. Return the
    classes of these MLPs.

    Raises ValueError for a layer whose MLP is not a separate module.
    """
    classes = set()
    for layer in decoder_layers(model)[1]:
        if isinstance(layer, StandIn):
            continue
        mlp = getattr(layer, MLP, None)
        if not isinstance(mlp, nn.Module):
            raise ValueError(f"the MLP of {type(layer).__name__} is not a module {MLP!r}")
        mlp.forward = _tiled(mlp, tiles)
        classes.add(type(mlp))
    return classes


def _tiled(mlp: nn.Module, tiles: int) -> Callable[..., torch.Tensor]:
    inner: Callable[..., torch.Tensor] = mlp.forward

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        """(micro_batch, seq_len, hidden_size) each; run as one row so that tiles are contiguous."""
        run = inner
        if mlp.training and torch.is_grad_enabled():
            run = partial(checkpoint, inner, use_reentrant=False)
        rows = [x.reshape(1, -1, x.shape[-1]).chunk(tiles, 1) for x in inputs]
        with keeping_none():
            output = torch.cat([run(*parts) for parts in zip(*rows, strict=True)], 1)
        return output.view(*inputs[0].shape[:-1], -1)

    return forward
