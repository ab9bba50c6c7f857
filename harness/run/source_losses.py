"""The training loss of each source of a mixture."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SourceLosses:
    """Target tokens of each source since the last metrics line, and their mean loss."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._targets = [0] * len(names)

    def step_taken(self, targets: Sequence[int]) -> None:
        """Count the targets of an optimizer step, also of one that is then skipped."""
        self._targets = [sum(both) for both in zip(self._targets, targets, strict=True)]

    def taken(self, sums: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return loss/NAME, in nats and on the device, of the steps since the last call.

        `sums`: the summed losses of the same steps, of all ranks; None: of a run without sources. A
        source without a target in these steps has no loss.
        """
        if sums is None:
            return {}
        means = {
            f"loss/{name}": sums[number] / targets
            for number, (name, targets) in enumerate(zip(self.names, self._targets, strict=True))
            if targets
        }
        self._targets = [0] * len(self.names)
        return means
