"""Expert parallelism of a model's modules: tokens travel to the ranks that have their experts.

The modules stay transformers' own, with their names and a part of the experts; only `forward` is
another. Routers, shared experts and the balancing loss are what they are without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from harness.engine.deepspeed_0_19.experts import announce_experts, mark_expert
from harness.engine.groups import make_groups
from harness.layout.expert import ExpertPlan
from harness.layout.tensor import EXPERTS, TensorPlan
from harness.models.exchange import reordered, sent
from harness.models.initialize import Cut
from harness.plan.plan import Plan

Forward = Callable[..., torch.Tensor]


class Experts:
    """The divided experts of a rank's model: their groups, and how many tokens each was sent."""

    def __init__(self, plan: Plan) -> None:
        """Make the groups. Collective."""
        self._stage, self._share = plan.zero_stage, plan.share
        self._plan = ExpertPlan.of(plan.model_config)
        made = make_groups(plan.share, "experts", "expert_replicas", "replicas")
        self.group, self.replicas, self._data_group = made
        (self.parts,) = make_groups(plan.share, "expert_parts")
        self._narrowed = (
            plan.grid.tensor > 1 and EXPERTS in TensorPlan.of(plan.model_config).styles.values()
        )
        self._tokens: list[torch.Tensor] = []

    def marked(self, cut: Cut) -> Cut:
        """Return `cut` whose parameters DeepSpeed knows for experts."""

        def cut_and_mark(name: str, whole: torch.Tensor) -> nn.Parameter:
            parameter = cut(name, whole)
            if self._plan.divides(name):
                mark_expert(parameter, self._stage, self.group.size(), self.replicas)
            return parameter

        return cut_and_mark

    def dispatch(self, model: PreTrainedModel, device: torch.device) -> None:
        """Let a model with this rank's experts compute the whole model's outputs."""
        ends = tuple(f".{end}" for end in self._plan.modules)
        for name, module in model.named_modules():
            if name.endswith(ends):
                experts: Any = module
                tokens = torch.zeros(self._plan.num_experts, dtype=torch.int64, device=device)
                experts.num_experts //= self.group.size()
                experts.forward = dispatched(experts, self.group, tokens)
                self._tokens.append(tokens)
        announce_experts(
            model,
            self._stage,
            self.group,
            self.replicas,
            self.parts if self._narrowed else self.group,
        )

    def tokens(self) -> torch.Tensor:
        """Return (layers, experts) int64: tokens sent to each since the last call, of all data;
        those of a layer that is computed again count twice. Collective.
        """
        total = torch.stack(self._tokens)
        for tokens in self._tokens:
            tokens.zero_()
        dist.all_reduce(total, group=self._data_group)
        return total


def dispatched(module: Any, group: dist.ProcessGroup, tokens: torch.Tensor) -> Forward:
    """Return the forward function of all experts, of which the module has this rank's.

    `tokens` (experts,): counts those of the training batches. No token is dropped.
    """
    inner, places = module.forward, group.size()

    def forward(states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """states (tokens, hidden); index, weights (tokens, chosen experts)."""
        chosen = index.shape[1]
        flat = index.reshape(-1)
        order = flat.argsort(stable=True)  # by expert, that is by rank
        counts = torch.zeros_like(tokens).scatter_add_(0, flat, torch.ones_like(flat))
        if module.training:
            tokens.add_(counts)
        counts = counts.view(places, -1)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        # The host waits for the device here: it has to know how much it sends.
        out, back = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
        rows = sent(states[order // chosen], back, out, group)
        own = torch.arange(counts.shape[1], device=flat.device).repeat(places)
        own = own.repeat_interleave(theirs.view(-1), output_size=sum(back))
        # A row of zeros more: a rank without tokens would leave its parameters out, for which
        # others wait.
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        own = torch.cat([own, own.new_zeros(1)])[:, None]
        outputs = inner(rows, own, torch.ones_like(own, dtype=weights.dtype))[:-1]
        outputs = sent(outputs, out, back, group)
        outputs = reordered(outputs, order).view(*index.shape, -1) * weights[..., None]
        return outputs.sum(1).to(states.dtype)

    return forward
