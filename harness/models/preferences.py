"""Losses of preference pairs, from the log-probabilities of their two sides.

A pair is one document: the chosen conversation, then the rejected one, each attended to by itself.
The reference model is not a model but two numbers a pair: the log-probabilities of its sides under
the initial weights, computed once at the start (run/preferences.py).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid

from harness.models.exchange import added

TALLIED = (
    *("preference_accuracy", "reward_margin", "reward_chosen", "reward_rejected"),
    *("logprob_chosen", "logprob_rejected"),
)
"""Means over the pairs of a global batch. A reward is beta times the log-probability of a side
relative to the reference; without one, beta times the mean over its tokens."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of one micro-batch, on its device."""

    segments: torch.Tensor
    """(micro_batch, seq_len) int64: 2 * pair for tokens of the chosen side, 2 * pair + 1 for those
    of the rejected one, -1 for padding."""
    reference: torch.Tensor
    """(pairs, 2) fp32: log-probabilities under the initial weights, of chosen and rejected."""


@dataclass(frozen=True)
class Preferences:
    """train.objective with its settings, and what it has seen since it was last asked."""

    objective: str
    beta: float
    margin: float
    sft_weight: float
    tallies: torch.Tensor
    """(2, 1 + len(TALLIED)) fp64 on the device: pairs and sums, of evaluation and of training."""
    group: dist.ProcessGroup | None = None
    """Ranks that share each row; None if this rank has whole rows."""

    def __call__(self, losses: torch.Tensor, labels: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        """Return the loss summed over the pairs of a micro-batch, of which ranks that share rows
        each return an equal part. Collective among them.

        losses (micro_batch * seq_len,): cross-entropy of each token; labels (micro_batch, seq_len),
        -100 where there is no target. Pairs of which a side has no target do not count.
        """
        count = len(pairs.reference)
        places = pairs.segments.reshape(-1) + 1  # padding comes first
        each = torch.stack([losses.double(), (labels.reshape(-1) != -100).double()], 1)
        sums = each.new_zeros(1 + 2 * count, 2).index_add(0, places, each)[1:]
        if self.group is not None:
            sums = added(sums, self.group)
        logprobs, targets = -sums[:, 0].view(count, 2), sums[:, 1].view(count, 2)
        counts = (targets > 0).all(1)
        loss, rewards = self._of(logprobs, targets.clamp(min=1), pairs.reference.double())
        total = torch.where(counts, loss, 0.0).sum()
        parts = 1 if self.group is None else dist.get_world_size(self.group)
        self._tally(logprobs.detach(), rewards.detach(), counts, parts)
        # Each rank's tokens get the whole gradient, but the ranks' losses add up to one.
        return (total + (total / parts - total).detach()).to(losses.dtype)

    def _of(
        self, logprobs: torch.Tensor, tokens: torch.Tensor, reference: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss (pairs,) and the rewards (pairs, 2); parameters (pairs, 2), fp64."""
        means, ratios = logprobs / tokens, logprobs - reference
        has_reference = self.objective in ("dpo", "ipo")
        rewards = self.beta * (ratios if has_reference else means)
        if self.objective == "dpo":  # arXiv 2305.18290, equation 7
            loss = -logsigmoid(rewards[:, 0] - rewards[:, 1])
        elif self.objective == "ipo":  # arXiv 2310.12036, equation 17, with means over tokens
            ratios = ratios / tokens
            loss = (ratios[:, 0] - ratios[:, 1] - 1 / (2 * self.beta)) ** 2
        elif self.objective == "simpo":  # arXiv 2405.14734, equation 6
            loss = -logsigmoid(rewards[:, 0] - rewards[:, 1] - self.margin)
        else:  # orpo: arXiv 2403.07691, equations 6 and 7
            # Odds need a probability below 1.
            odds = means - torch.log1p(-means.clamp(max=-1e-9).exp())
            loss = -self.beta * logsigmoid(odds[:, 0] - odds[:, 1]) - means[:, 0]
        return loss - self.sft_weight * means[:, 0], rewards

    def _tally(
        self, logprobs: torch.Tensor, rewards: torch.Tensor, counts: torch.Tensor, parts: int
    ) -> None:
        """Add a micro-batch. Never waits for the device."""
        (chosen, rejected), (first, second) = rewards.unbind(1), logprobs.unbind(1)
        seen = (torch.ones_like(chosen), (chosen > rejected).double(), chosen - rejected)
        values = torch.stack([*seen, chosen, rejected, first, second], 1)
        values = torch.where(counts[:, None], values, 0.0).sum(0) / parts
        self.tallies[int(torch.is_grad_enabled())] += values


def means_of(tally: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return TALLIED by name from a tally summed over all ranks: scalars, NaN without pairs."""
    return dict(zip(TALLIED, tally[1:] / tally[0], strict=True))
