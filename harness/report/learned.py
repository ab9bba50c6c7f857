"""What a run's held-out loss came to, beside what it began with."""

from __future__ import annotations

LEAST_GAIN = 0.01
"""Share of the first held-out loss by which the last must be below it."""


def no_better(first: float, last: float) -> str | None:
    """Return the problem of a run whose held-out loss ended no better than it began; None without.

    Both in nats per token.
    """
    if last < first * (1 - LEAST_GAIN):
        return None
    rates = "optim.lr is too low, or its steps are too few (train.epochs, train.global_batch)"
    if last > first:
        rates = "optim.lr is too high, or its data differs from what is held out"
    return (
        f"the held-out loss ended no better than it began, {last:.3f} from {first:.3f} before "
        f"training: {rates}"
    )
