"""Runs as the studio reads them: malicious names, links, damaged files."""

import json
import os
import re
from pathlib import Path
from unittest import mock
from urllib.parse import quote

import pytest

from harness.report.chart import Chart
from tests.browser import Browser, needs_browser
from tests.report import runs as runs_of_reports
from tests.report.runs import line_at
from tests.studio.served import Studio
from tests.studio.test_guard import ask
from tests.studio.test_pages import BY_SLUG, ROOT, figures_of, number
from tools.studio_app.figures import Code, Note, Table, html_of
from tools.studio_app.runs import logs, names, read_run
from tools.studio_pages.runs import _stable

HOSTILE = "<img src=x onerror=window.hacked=1>"


def write_run(path: Path, loss: float = 5.0) -> Path:
    changes = {"grad_norm": 1.0, "mfu": None, "peak_allocated_gib": 0.4, "attention_entropy/0": 2.0}
    lines = [line_at(step, loss=loss - 0.1 * step, **changes) for step in range(1, 13)]
    spike = {"kind": "spike", "step": 3, "loss": 9.0, "policy": "log"}
    return runs_of_reports.write_run(path, lines, [spike], outcome="stopped", code=75, step=12)


def test_folders_are_searched_up_to_a_limit(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in enumerate("abcd"):
        os.utime(write_run(runs / name) / "status.json", (0, 2e9 + place))
    monkeypatch.setattr("tools.studio_app.runs._MOST_FOLDERS", 3)
    assert names() == ["c", "b", "a"]


def test_missing_run_folder_lists_no_runs(runs: Path) -> None:
    runs.rmdir()
    assert names() == []
    (note,) = figures_of("runs")
    assert isinstance(note, Note)


def test_a_run_is_shown_with_its_targets(runs: Path) -> None:
    write_run(runs / "first")
    shown = figures_of("runs")
    assert number(shown, "Run") == "stopped"
    assert number(shown, "Step") == "12"
    assert number(shown, "Loss") == "3.8000"
    targets = ("loss falls", "norm stable", "entropy moderate")
    assert [number(shown, f"Target: {name}") for name in targets] == ["yes"] * 3
    assert sum(isinstance(figure, Chart) for figure in shown) == 3, "short on a phone"


def test_a_run_in_progress_tells_its_minutes_left(runs: Path) -> None:
    lines = [line_at(step, step_time_s=3.0) for step in range(1, 41)]
    run = runs_of_reports.write_run(runs / "first", lines, outcome="running", step=40)
    (run / "events.jsonl").unlink()
    assert read_run("first").age_s < 600  # type: ignore[union-attr]
    assert "of 200 8.0 minutes left" in "".join(map(html_of, figures_of("runs")))


def test_a_norm_that_jumps_is_a_warning_or_bad() -> None:
    assert [_stable([99, *[1] * 40, top])[3] for top in (2, 5, 20)] == ["good", "warning", "bad"]


def test_trials_below_a_sweep_are_runs(runs: Path) -> None:
    write_run(runs / "sweep/trial-1")
    assert names() == ["sweep/trial-1"]
    assert read_run("sweep/trial-1") is not None


OUTSIDE = ("..", "../secret", "/etc", "first/..", "first/../../secret", "")


@pytest.mark.parametrize("name", OUTSIDE)
def test_run_name_cannot_escape_the_root(runs: Path, name: str) -> None:
    for folder in (runs / "first", runs.parent / "secret"):
        write_run(folder)
    assert read_run(name) is None
    assert logs(name) == []
    assert number(figures_of("runs", run=name), "Run") == "stopped"  # the newest, first


def test_run_link_cannot_escape_the_root(runs: Path) -> None:
    write_run(runs / "first")
    secret = runs.parent / "secret"
    write_run(secret, loss=77.0)
    (secret / "key.txt").write_text("password")
    (runs / "linked").symlink_to(secret)
    assert names() == ["first"]
    for file in ("metrics.jsonl", "events.jsonl", "plan.json", "status.json"):
        (runs / "first" / file).unlink()
        (runs / "first" / file).symlink_to(secret / file)
    (runs / "first/key.txt").symlink_to(secret / "key.txt")
    (runs / "first/logs").symlink_to(secret)
    run = read_run("first")
    assert run is not None
    records = run.records
    assert (records.lines, records.events, records.plan, records.status) == ([], [], {}, {})
    assert len(records.problems) == 4
    text = "".join(html_of(f) for f in figures_of("runs"))
    assert "password" not in text
    assert str(runs.parent) not in text


def test_half_written_and_damaged_records_are_survived(runs: Path) -> None:
    write_run(runs / "first")
    folder = runs / "first"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": "x", "loss": 1}\n[1]\n{"step": 13, "loss": "nan"}\n{"st')
    (folder / "plan.json").write_text('{"steps": ')
    (folder / "status.json").write_text("[]")
    (folder / "events.jsonl").write_bytes(b"\xff\xfe\x00\n{}\n")
    (folder / "heartbeats").mkdir(exist_ok=True)
    (folder / "heartbeats/rank-0.json").write_bytes(b"\xff\x00half")
    run = read_run("first")
    assert run is not None
    assert run.records.lines[-1]["step"] == 13
    assert len(run.records.problems) == 3
    shown = figures_of("runs")
    assert number(shown, "Run") == "unknown"
    assert any(isinstance(figure, Code) and "half" in figure.text for figure in shown)
    assert str(runs) not in "".join(html_of(f) for f in shown)


def test_names_and_messages_are_text(runs: Path) -> None:
    write_run(runs / HOSTILE)
    with (runs / HOSTILE / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": HOSTILE, "step": HOSTILE, "message": HOSTILE}) + "\n")
    (runs / HOSTILE / "rank.log").write_text(HOSTILE)
    html = "".join(map(html_of, [*figures_of("runs"), *figures_of("problems")]))
    assert "&lt;img" in html
    assert "<img" not in html


def test_problems_are_found_by_words_and_linked_to_events(runs: Path) -> None:
    write_run(runs / "first")
    (_, table, _) = figures_of("problems", search="spike rollback")
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["Loss spike"]
    assert table.rows[0][4] == "first (1 x)"
    assert table.links == ["/runs?run=first"]
    (note,) = figures_of("problems", search="xyzzy")
    assert isinstance(note, Note)


def test_every_event_of_a_problem_is_one_that_train_py_writes() -> None:
    from tools.studio_pages.problems import PROBLEMS

    source = "".join(path.read_text() for path in (ROOT / "harness").rglob("*.py"))
    kinds = {kind for problem in PROBLEMS for kind in problem.events}
    assert [kind for kind in sorted(kinds) if f'"{kind}"' not in source] == []
    assert {problem.page for problem in PROBLEMS} - {""} <= set(BY_SLUG)


def test_a_log_that_cannot_be_read_is_left_out(runs: Path) -> None:
    write_run(runs / "first")
    (runs / "first/rank.log").write_text("started".rjust(9000))
    assert logs("first") == [("rank.log", "started".rjust(6000))]
    with mock.patch.object(Path, "open", side_effect=PermissionError):
        assert logs("first") == []


def test_records_that_are_no_files_are_survived(runs: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "plan.json"):
        (runs / "first" / name).mkdir(parents=True)
    assert figures_of("runs")


@needs_browser
def test_a_script_in_a_name_is_not_executed(studio: Studio, browser: Browser) -> None:
    """A run in progress is also followed."""
    folder = write_run(studio.runs / HOSTILE)
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": HOSTILE, "message": f"<script>{HOSTILE}</script>"}) + "\n")
    tab = browser.open(f"{studio.address}runs")
    tab.wait_for("document.querySelector('[data-figure=Step]')?.textContent === '12'")
    tab.wait_for("!!document.querySelector('figure.chart svg path')")
    tab.hover("#chart-loss .area")
    browser.listen(0.5)
    assert HOSTILE in tab.evaluate("document.body.innerText")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "loss": 3.5}\n')
    tab.wait_for("document.querySelector('[data-figure=Step]')?.textContent === '13'")
    assert tab.evaluate("window.hacked") is None
    assert tab.errors == []
    tab.close()
    for path in ("/runs?run=../../etc", "/runs?run=%2e%2e%2f%2e%2e%2fetc"):
        status, _, body = ask(studio.port, path)
        assert (status, "root:x:" in body) == (200, False)
        assert not re.search(r"<img src=x", body)
    name = quote(folder.name, safe="")
    status, _, body = ask(studio.port, f"/report?run={name}")
    assert (status, "Training loss" in body) == (200, True)
    assert "<img src=x" not in body
    for outside in ("..", "%2e%2e%2fsecret", "/etc", ""):
        assert ask(studio.port, f"/report?run={outside}")[0] == 404
    assert ask(studio.port, f"/runs/{quote(folder.name)}/metrics.jsonl")[0] == 404
