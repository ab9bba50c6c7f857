"""Problems and remedies: how each problem shows, the events that report it, and its remedy."""

import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from harness.errors import ExitCode
from tools import studio_app
from tools.studio_app.figures import Figure, Note, Table, numbers
from tools.studio_app.page import Page, Typed, Values
from tools.studio_app.runs import names, read_run


class Problem(NamedTuple):
    """A problem, and what helps."""

    name: str
    sign: str
    events: Sequence[str]
    """Kinds of events in events.jsonl that report it."""
    remedy: str
    page: str = ""
    """The page of the studio that explains it."""


_TABLE = Path(studio_app.__file__).with_name("problems.toml")
PROBLEMS = [Problem(**row) for row in tomllib.loads(_TABLE.read_text("utf-8"))["problems"]]


def figures(values: Values) -> list[Figure]:
    """Return the problems that match a search, with the runs whose events report them."""
    counts = seen_in_runs()
    rows, links = [], []
    for problem in PROBLEMS:
        text = " ".join([*problem[:2], *problem.events, problem.remedy]).lower()
        if not all(word in text for word in values["search"].lower().split()):
            continue
        by_run: Counter[str] = Counter()
        for kind in problem.events:
            by_run.update(counts.get(kind, {}))
        where = ", ".join(f"{name} ({count} x)" for name, count in by_run.most_common(3))
        kinds = ", ".join(problem.events) or "none"
        rows.append((problem.name, problem.sign, kinds, problem.remedy, where))
        first = by_run.most_common(1)
        seen = f"/runs?run={quote(first[0][0], safe='')}" if first else None
        links.append(seen or (f"/{problem.page}" if problem.page else None))
    if not rows:
        return [Note(f"No problem matches {values['search']!r}.")]
    codes = ", ".join(f"{code.value} {code.name.lower().replace('_', ' ')}" for code in ExitCode)
    return [
        numbers(("Problems", str(len(rows)), f"of {len(PROBLEMS)}")),
        Table(
            "Problems and remedies; a name leads to a run in which it was seen, or to its page",
            "problem|how it shows|events|remedy|seen in",
            rows,
            links,
        ),
        Note(f"Exit codes: {codes}; any other is a crash."),
    ]


def seen_in_runs() -> dict[str, Counter[str]]:
    """Return how often each run has an event, by the event's kind."""
    counts: dict[str, Counter[str]] = {}
    for name in names()[:60]:
        run = read_run(name)
        for event in run.records.events if run else ():
            counts.setdefault(str(event["kind"]), Counter())[name] += 1
    return counts


SEARCH = Typed("search", "Search, as in: spike, memory, fp16, hang", "")
PAGE = Page("problems", (SEARCH,), figures)
