"""The load of a mixture's experts, by its routers."""

from __future__ import annotations

import math

import torch


def expert_load(tokens: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return scalars, on the device, of (layers, experts) tokens sent to each expert; none without
    any.

    `expert_load_max`: tokens of the busiest expert over the mean of its layer, of the worst layer:
    1 if all are equal, the number of experts if one has all. `expert_load_entropy`: of a layer's
    shares, over that of equal ones; the mean over layers: 1 if all are equal, 0 if one has all.
    """
    if tokens is None:
        return {}
    shares = tokens.double() / tokens.sum(1, keepdim=True).clamp(min=1)
    experts = tokens.shape[1]
    entropy = torch.special.entr(shares).sum(1).mean() / math.log(experts)
    return {"expert_load_max": shares.max() * experts, "expert_load_entropy": entropy}
