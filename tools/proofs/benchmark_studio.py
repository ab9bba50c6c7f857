"""Count the CPU time that each page of the studio takes to follow a slider.

    python tools/proofs/benchmark_studio.py
    python tools/proofs/benchmark_studio.py plan memory --markdown

Each slider and choice of a page is moved from its default to its other values, once to warm up
(what is trained is kept) and then measured: CPU seconds of this process, the least of three, so
that other load hardly counts. Models whose tensors are in no table are left out: each setting of
theirs is traced once. Exit code 0, or 1 if an update takes more than 200 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from harness.layout.families import FAMILIES
from harness.plan.model_config import find_model_config
from tools.studio_app.catalogue import PAGES
from tools.studio_app.drawn import html_of
from tools.studio_app.page import Chart, Choice, Page, Slider, read_values
from tools.studio_app.plans import MODELS, name_of
from tools.studio_app.view import figures_of

LIMIT_S = 0.2
_VALUES = 4  # of each control, evenly taken


def main(argv: list[str]) -> int:
    """argv -> a table -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", help="default: all")
    parser.add_argument("--markdown", action="store_true", help="as a table of Markdown")
    args = parser.parse_args(argv)
    slowest = 0.0
    row = "| {} | {} | {} | {} |" if args.markdown else "{:<15}{:>9}{:>12}{:>10}"
    print(row.format("page", "updates", "median, ms", "most, ms"))
    if args.markdown:
        print("|---|---:|---:|---:|")
    for page in PAGES:
        if args.pages and page.slug not in args.pages:
            continue
        seconds = list(costs(page))
        slowest = max(slowest, *seconds)
        figures = (f"{1000 * statistics.median(seconds):.0f}", f"{1000 * max(seconds):.0f}")
        print(row.format(page.slug, len(seconds), *figures), flush=True)
    return int(slowest > LIMIT_S)


def costs(page: Page, repeats: int = 3) -> Iterator[float]:
    """Yield the CPU seconds of each update of a page, the least of some repeats."""
    defaults = read_values(page.controls, {})
    update(page, defaults)
    yield min(update(page, defaults) for _ in range(repeats))
    for control in page.controls:
        if not isinstance(control, Slider | Choice):
            continue
        options: list[Any] = list(
            control.values if isinstance(control, Slider) else control.options
        )
        options = [value for value in options if value not in _traced()]
        for value in options[:: max(1, len(options) // _VALUES)]:
            values = {**defaults, control.name: value}
            update(page, values)  # trains or traces what it keeps
            yield min(update(page, values) for _ in range(repeats))


@cache
def _traced() -> frozenset[str]:
    """Return models whose tensors are in no table: each setting of theirs is traced once."""
    return frozenset(
        model
        for model in MODELS
        if find_model_config(name_of(model))[0]["model_type"] not in FAMILIES
    )


def update(page: Page, values: dict[str, Any]) -> float:
    """Return the CPU seconds in which a page's figures are computed and made to be sent."""
    begin = time.process_time()
    for figure in figures_of(page, values):
        json.dumps(figure.options) if isinstance(figure, Chart) else html_of(figure)
    return time.process_time() - begin


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
