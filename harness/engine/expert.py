"""Expert parallelism: sends tokens to the ranks that hold their experts.

The modules remain transformers' own, with the same names and a share of the experts; only `forward`
is replaced. Routers, shared experts and the balancing loss are unchanged.
"""

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
    """The expert-parallel groups of a rank's model, and the tokens sent to each expert."""

    def __init__(self, plan: Plan) -> None:
        """Create the groups. Collective."""
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
        """Return `cut`, wrapped to mark the parameters of experts for DeepSpeed."""

        def cut_and_mark(name: str, whole: torch.Tensor) -> nn.Parameter:
            parameter = cut(name, whole)
            if self._plan.divides(name):
                mark_expert(parameter, self._stage, self.group.size(), self.replicas)
            return parameter

        return cut_and_mark

    def dispatch(self, model: PreTrainedModel, device: torch.device) -> None:
        """Make a model that holds this rank's experts compute the full model's outputs."""
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
        """Return (layers, experts) int64: tokens that all ranks sent to each expert since the last
        call. A recomputed layer counts twice. Collective.
        """
        total = torch.stack(self._tokens)
        for tokens in self._tokens:
            tokens.zero_()
        dist.all_reduce(total, group=self._data_group)
        return total


def dispatched(module: Any, group: dist.ProcessGroup, tokens: torch.Tensor) -> Forward:
    """Return a forward function over all experts for a module that holds this rank's experts.

    `tokens` (experts,) counts the training tokens sent to each. No token is dropped.
    """
    inner, places = module.forward, group.size()

    def forward(states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """states (tokens, hidden); index, weights (tokens, chosen experts)."""
        chosen = index.shape[1]
        flat = index.reshape(-1)
        order = flat.argsort(stable=True)  # by expert, and so by rank
        counts = torch.zeros_like(tokens).scatter_add_(0, flat, torch.ones_like(flat))
        if module.training:
            tokens.add_(counts)
        counts = counts.view(places, -1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        # The host waits for the device here, because it needs the message sizes.
        out, back = torch.stack([counts.sum(1), received.sum(1)]).tolist()
        rows = sent(states[order // chosen], back, out, group)
        local_index = torch.arange(counts.shape[1], device=flat.device).repeat(places)
        local_index = local_index.repeat_interleave(received.view(-1), output_size=sum(back))
        # One extra row of zeros: without any tokens, this rank's experts would get no gradient, and
        # other ranks would wait for it.
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        local_index = torch.cat([local_index, local_index.new_zeros(1)])[:, None]
        outputs = inner(rows, local_index, torch.ones_like(local_index, dtype=weights.dtype))[:-1]
        outputs = sent(outputs, out, back, group)
        outputs = reordered(outputs, order).view(*index.shape, -1) * weights[..., None]
        return outputs.sum(1).to(states.dtype)

    return forward
