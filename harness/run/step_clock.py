"""Measured time of a run's steps, compared with the estimate."""

from __future__ import annotations

from harness.data.batches import Stream
from harness.data.padded import Padded
from harness.estimate.step_time.step import TERMS, StepTime
from harness.plan.duration import step_time
from harness.plan.plan import Plan

TOLERANCE = 0.1
_STARTING = 1
"""Metrics lines of a process that are left out: memory is allocated, kernels are loaded."""
_LARGE = 0.1
"""Share of a step from which on a term is named."""


_LOOKED_AT = 32
"""Samples whose documents are looked at."""


def seen_tokens(stream: Stream) -> float | None:
    """Return the tokens that one attends to on average within its document, itself among them, in
    the first samples; None where rows are not divided into documents, or steps differ.
    """
    if not stream.document_mask or isinstance(stream, Padded):
        return None
    count = _LOOKED_AT if stream.length is None else min(_LOOKED_AT, stream.length)
    positions = stream.batch(0, count).position_ids
    return None if positions is None else round(float(positions.double().mean()) + 1, 1)


class StepClock:
    """Compares the second metrics line of a process with the plan's estimate: once."""

    def __init__(self, plan: Plan, seen_tokens: float | None = None) -> None:
        self.predicted: StepTime | None = step_time(plan, seen_tokens=seen_tokens)
        self._lines = 0

    def count_line(self) -> None:
        """Count a metrics line."""
        self._lines += 1

    @property
    def compares(self) -> bool:
        """True for the metrics line to compare, if there is an estimate."""
        return self.predicted is not None and self._lines == _STARTING + 1

    def text(self, seconds: float, data_seconds: float) -> str:
        """Return both times in one line, and which terms may be off if they differ."""
        assert self.predicted is not None, "there is an estimate"
        step = self.predicted
        error = step.seconds / seconds - 1
        text = f"{seconds:.3g} s a step, predicted {error:+z.1%} ({step.machine.evidence} rates)"
        if abs(error) <= TOLERANCE:
            return text
        terms = sorted(step.terms.items(), key=lambda term: -term[1])
        large = [
            f"{TERMS[name]} {value:.3g} s"
            for name, value in terms
            if value >= _LARGE * step.seconds
        ]
        why = f"{text} (!): predicted were {', '.join(large)}"
        if error < 0 and data_seconds >= _LARGE * seconds:
            why += f"; {data_seconds:.3g} s waited for data, which is not predicted"
        return why
