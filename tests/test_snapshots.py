"""What commands print and pages show, held against snapshots.json.

After a change that is meant, `python -m tests.test_snapshots` writes it anew. Read its diff: lines
of commands, and for each figure of a page a hash of its form and a sum over its numbers.
"""

import hashlib
import io
import json
import re
import shlex
from contextlib import redirect_stdout
from importlib import import_module
from math import log1p
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock
from urllib.parse import parse_qsl

import pytest

from harness.report.compare import compare_page_of
from harness.report.page import page_of
from harness.report.run_record import read
from tests.report.runs import BEGIN_S, line_at, plan, write_run
from tests.tables import beside
from tools.studio_app.figures import html_of
from tools.studio_app.lessons import PAGES
from tools.studio_app.page import not_shown, read_values
from tools.studio_app.view import figures_of

KEPT = Path(__file__).with_name("snapshots.json")
SNAPSHOTS: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
BY_SLUG = {page.slug: page for page in PAGES}
# They train, or read Python's own library: another processor or release has other numbers.
NOT_HELD = {"batch", "cleaning", "experts", "precision", "rates", "tokenizers"}
COMMANDS, HELD = beside(__file__, "snapshots.toml").values()
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def parted(text: str) -> tuple[str, list[float]]:
    """Return a text without its numbers, and these."""
    return _NUMBER.sub("#", text), [*map(float, _NUMBER.findall(text))]


def printed(command: str) -> str:
    tool, *words = shlex.split(command)
    with redirect_stdout(io.StringIO()) as out:
        import_module(f"tools.{tool}").main(words)
    assert out.getvalue(), command
    return out.getvalue()


def reports() -> list[str]:
    """Return the pages of a run that is stopped, and of two runs beside each other."""
    lines = [line_at(step, expert_load=1 + step / 100) for step in range(1, 121)]
    lines[29]["needle/128"], lines[89]["needle/128"] = [0.1, 0.2], [0.3, 0.4]
    lines[59] |= {"eval_loss": 2.5, "peak_allocated_gib": 30.0}
    events = [{"kind": kind, "step": 60 + n} for n, kind in enumerate(("saved", "spike", "sample"))]
    status = {"outcome": "stopped", "code": 75, "step": 120, "gpu_hours": 1.5, "message": "USR1"}
    with TemporaryDirectory() as folder, mock.patch("time.time", return_value=BEGIN_S + 3600.0):
        one = read(write_run(Path(folder, "one"), lines, events, **status))
        other = read(write_run(Path(folder, "other"), the_plan=plan(lr=1e-3)))
        pages = [page_of(one), compare_page_of([one, other], "two")]
        return [page.replace(folder, "RUNS") for page in pages]


def shown(address: str) -> list[list[Any]]:
    slug, _, query = address.partition("?")
    page, figures, asked = BY_SLUG.get(slug), list[list[Any]](), dict(parse_qsl(query))
    assert not page or not_shown(page.controls, asked) == []
    with mock.patch("tools.studio_app.runs._roots", [Path("/nonexistent")]):
        parts = figures_of(page, read_values(page.controls, asked)) if page else []
    for text in map(html_of, parts) if page else reports():
        form, numbers = parted(text)
        total = sum(log1p(n) * (1 + place % 7) for place, n in enumerate(numbers))
        figures.append([hashlib.sha256(form.encode()).hexdigest()[:12], len(numbers), total])
    return figures


def test_every_command_and_page_has_a_snapshot() -> None:
    assert [[*kept] for kept in SNAPSHOTS.values()] == [COMMANDS, HELD]
    assert {page.partition("?")[0] for page in HELD} == {*BY_SLUG, "report"} - NOT_HELD


@pytest.mark.parametrize("command", SNAPSHOTS.get("commands", ()))
def test_a_command_prints_the_same_as_before(command: str) -> None:
    form, numbers = parted(printed(command))
    kept_form, kept_numbers = parted("\n".join(SNAPSHOTS["commands"][command]))
    assert form == kept_form
    assert numbers == pytest.approx(kept_numbers, rel=1e-6)


@pytest.mark.parametrize("page", SNAPSHOTS.get("pages", ()))
def test_a_page_shows_the_same_as_before(page: str) -> None:
    kept = [[*form, pytest.approx(total, abs=1e-3)] for *form, total in SNAPSHOTS["pages"][page]]
    assert shown(page) == kept


if __name__ == "__main__":
    made: dict[str, Any] = {"commands": {each: printed(each).split("\n") for each in COMMANDS}}
    made["pages"] = {page: shown(page) for page in HELD}
    KEPT.write_text(json.dumps(made, indent=1) + "\n")
