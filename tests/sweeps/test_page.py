"""The page of a sweep whose trials never ran, with every state and hostile names."""

import csv
import io
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.report.chart import Scale
from tests.browser import WIDTHS, Browser, needs_browser
from tests.tables import beside
from tools.sweeps.cost import Record, Used
from tools.sweeps.page import write_sweep_page
from tools.sweeps.ranking import ranked, write_tables
from tools.sweeps.spec import read_sweep
from tools.sweeps.text import best_command, ranking

_FILE = """
[sweep]
name = "pages"
trials = 12
[search]
optim.lr = {from = 1e-4, to = 1e-1, log = true}
optim.name = ["adamw", "lion", "sgd"]
train.global_batch = {from = 4, to = 64}
model.name = ["<script>alert(1)</script>", "corpus & more"]
"""


def written(folder: Path) -> Path:
    """Write the page into runs/pages under `folder`; return it."""
    os.chdir(folder)
    Path("pages.toml").write_text(_FILE)
    sweep = read_sweep(Path("pages.toml"), [])
    sweep.folder.mkdir(parents=True)
    choices = [choice for choice in sweep.choices() if choice]
    states = ["done", "pruned", "diverged", "failed", "done", "pruned"] * 2
    records = [
        Record(
            number,
            state,
            choice,
            math.inf if state in ("diverged", "failed") else 3 + 2 * abs(math.sin(number)),
            Used(100 if state == "done" else 30, 1000, 0.1),
            "" if state == "done" else "a reason with <b>tags</b>",
        )
        for number, (choice, state) in enumerate(zip(choices, states, strict=True))
    ]
    for record in records:
        run = sweep.folder_of(record.number)
        run.mkdir()
        lines = [
            f'{{"step": {step}, "eval_loss": {record.value + 5 / step}}}\n'
            for step in range(5, record.used.steps + 1, 5)
            if math.isfinite(record.value)
        ]
        (run / "metrics.jsonl").write_text("".join(lines))
    return write_sweep_page(sweep, records).resolve()


def test_sweep_page_ranks_no_losses_of_different_held_out_sets(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("carry.toml").write_text(
        '[sweep]\nmethod = "grid"\n[search]\ntrain.carry_state = [true, false]\n'
    )
    sweep = read_sweep(Path("carry.toml"), [])
    records = [
        Record(n, "done", choice, 5.7 + n, Used(2, 100, 0.1), "")
        for n, choice in enumerate(sweep.choices())
    ]
    for second, is_shown in (("a", False), ("b", True)):
        for record, held_out_set in zip(records, ("a", second), strict=True):
            folder = sweep.folder_of(record.number)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "plan.json").write_text(json.dumps({"held_out_set": held_out_set}))
        assert ("2 held-out sets, whose losses" in ranking(sweep, records)) == is_shown
    assert re.search(r"^ +1 +000 +5\.7000 +2 +true$", ranking(sweep, records), re.MULTILINE)


_RESULTS = {"a_b": [2.9, 3.1, 3.3], "c&d": [3.1, 3.15, 3.2], "e": [2.93, 3.17, 3.4]}


def test_seeds_are_repetitions_in_table_page_and_paper(tmp_path, monkeypatch) -> None:
    """Mean, standard deviation and n of a setting; whether others are tied."""
    monkeypatch.chdir(tmp_path)
    names = json.dumps([*_RESULTS])
    search = f"[search]\ntrain.seed = [0, 1, 2]\ndata.path = {names}\n"
    Path("seeds.toml").write_text(f"[sweep]\nmethod = 'grid'\n{search}")
    sweep = read_sweep(Path("seeds.toml"), [])
    losses = [loss for of_setting in _RESULTS.values() for loss in of_setting]
    records = [
        Record(n, "done", choice or {}, loss, Used(100, 1000, 0.1), "")
        for n, (choice, loss) in enumerate(zip(sweep.choices(), losses, strict=True))
    ]
    records[8] = replace(records[8], state="failed", reason="the disk was full", value=math.inf)
    for record in records[:3]:
        (folder := sweep.folder_of(record.number)).mkdir(parents=True)
        lines = [{"step": step, "eval_loss": record.value + 1 / step} for step in (10, 20)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table, ranks = ranking(sweep, records), ranked(sweep, records)
    assert [s.choice["data.path"] for s in ranks] == ["a_b", "c&d", "e"]
    assert re.search(r"^ +1 +000-002 +3\.1000 +0\.2000 +3 +300 +a_b$", table, re.MULTILINE)
    assert re.search(r"3 +006-008 +3\.0500 +0\.1697 +2 .* e +1 failed$", table, re.MULTILINE)
    assert "within twice the standard error: rank 2." in table
    assert "mean of 3 seeds, standard deviation 0.2000" in table
    assert re.match(r"python (?!.*seed)", best_command(sweep, ranks[0]))
    page = write_sweep_page(sweep, records).read_text()
    assert page.count("<path class=band ") == 1
    table, paper = (path.read_text() for path in write_tables(sweep, records))
    rows = [*csv.DictReader(io.StringIO(table))]
    assert [float(rows[0][f"eval_loss, train.seed={n}"]) for n in range(3)] == _RESULTS["a_b"]
    assert float(rows[0]["standard deviation"]) == pytest.approx(0.2)
    assert r"a\_b & $3.1000 \pm 0.2000$ & 3 \\" in paper
    assert r"c\&d & $3.1500 \pm 0.0500^\dagger$ & 3 \\" in paper


@pytest.mark.parametrize(("low", "high", "labels"), beside(__file__, "page.toml")["ticks"])
def test_a_logarithmic_axis_has_ticks(low: float, high: float, labels: str) -> None:
    ticks = Scale(low, high, log=True).ticks()
    assert [text for _, text in ticks] == labels.split()
    assert all(0 <= share <= 1 + 1e-9 for share, _ in ticks)


def test_values_and_reasons_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page, _, _ = written(tmp_path).read_text().rpartition("<script>")  # an empty one
    assert not re.search("<script|<b>", page)
    assert "<th>optim.name</th>" in page
    assert "diverged: a reason with &lt;b&gt;tags" in page


@needs_browser
def test_the_page_is_whole_at_every_width(browser: Browser, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = written(tmp_path)
    for width in WIDTHS:
        for dark in (False, True):
            tab = browser.open(page.as_uri(), width=width, dark=dark)
            assert tab.errors == []
            assert not tab.overflows
            assert tab.requests == [page.as_uri()]
            # For each trial with a finite metric: a curve, a line and a dot per key.
            count = "document.querySelectorAll('.area path:not(.mark) title').length"
            assert tab.evaluate(count) == 8 * (2 + 4)
