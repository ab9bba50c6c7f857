"""Published figures beside the estimate, as text and as the table of docs/memory_cards.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from harness.estimate.units import GIB
from tools.proofs.cards.runs import Card

_NAME = 72
_COLUMNS = (
    *("run", "GPUs", "shown", "published GiB", "interval GiB", "error", "verdict", "setting"),
    "source",
)
_HEAD = """\
# Published memory of GPUs, beside the estimate

Figures that others have measured, each run planned as `train.py` would plan it, from model, layout
and allocator alone. No constant belongs to one row, but the margins of the upper end were set
with these rows in view: others would be the fair check. *Shown* says which of three sizes it is
([memory.md](memory.md#allocated-reserved-shown)); *error* is that of the interval's middle, above
0 where too much was estimated; a device shows no more than it has. A setting is *whole* if its
source tells everything that decides the bytes.
Written by `python tools/proofs/memory_cards.py --markdown docs/memory_cards.md`.

"""
_DOUBTED = """\
## Figures in doubt

Left out of the first of the two sums above, each with its contradiction, or with what the estimate
does not explain. They were sorted out after the estimate was seen to differ.

"""


def line(card: Card) -> str:
    """One run in a line."""
    figure = "" if card.row.gib is None else f"{card.row.gib:7.2f}"
    ran = "" if card.row.ran is None else ("ran" if card.row.ran else "ran out")
    low, high = (f"{end / GIB:.2f}" for end in card.interval)
    error = "" if card.error is None else f"{card.error:+7.1%}"
    above = "  ABOVE" if card.is_above else ""
    return (
        f"{card.row.name:{_NAME}} {card.row.shows:9} {figure}{ran}  {low:>7} to {high:>7}  "
        f"{error}{above}  {card.verdict}"
    )


def summaries(cards: Sequence[Card]) -> str:
    """The sums without the figures in doubt, and with them."""
    trusted = [card for card in cards if not card.row.doubt]
    return f"{summary(trusted)}\n\nWith the figures in doubt: {summary(cards)}"


def summary(cards: Sequence[Card]) -> str:
    """The errors of rows, and of those of them whose setting is whole."""
    figures = [card for card in cards if card.error is not None]
    whole = [card for card in figures if card.row.complete]
    above = sum(card.is_above for card in figures)
    false_fits = sum(card.is_false_fit for card in cards)
    outcomes = len(cards) - len(figures)
    return (
        f"{len(figures)} figures, median error {_median(figures):.1%}, worst "
        f"{_worst(figures):.1%}; {len(whole)} of whole settings, median {_median(whole):.1%}, "
        f"worst {_worst(whole):.1%}. "
        f"{above} above the interval, {false_fits} of {outcomes} outcomes wrongly said to fit."
    )


def is_kept(cards: Sequence[Card]) -> bool:
    """Return whether no figure is above its interval and nothing is said to fit that did not."""
    trusted = [card for card in cards if not card.row.doubt]
    return not any(card.is_above or card.is_false_fit for card in trusted)


def markdown(cards: Sequence[Card]) -> str:
    """The page."""
    table = _table([card for card in cards if not card.row.doubt])
    doubted = _table([card for card in cards if card.row.doubt])
    return f"{_HEAD}{summaries(cards)}\n\n{table}\n{_DOUBTED}{doubted}"


def _table(cards: Sequence[Card]) -> str:
    lines = [
        f"| {' | '.join(_COLUMNS)} |",
        "|---|---|---|---:|---:|---:|---|---|---|",
        *(_row(card) for card in cards),
    ]
    return "\n".join(lines) + "\n"


def _row(card: Card) -> str:
    row = card.row
    figure = f"{row.gib:.2f}" if row.gib is not None else ("ran" if row.ran else "ran out of it")
    low, high = (f"{end / GIB:.2f}" for end in card.interval)
    error = "" if card.error is None else f"{card.error:+.1%}"
    why = "; ".join(filter(None, (row.but, row.doubt)))
    setting = ("whole" if row.complete else "in part") + (f"; {why}" if why else "")
    cells = (
        *(row.name, f"{row.gpus} x {row.gpu}", row.shows, figure, f"{low} to {high}", error),
        *(card.verdict, setting, row.source),
    )
    return "| " + " | ".join(cells) + " |"


def _median(cards: Sequence[Card]) -> float:
    return statistics.median(abs(card.error or 0) for card in cards) if cards else 0.0


def _worst(cards: Sequence[Card]) -> float:
    return max((abs(card.error or 0) for card in cards), default=0.0)
