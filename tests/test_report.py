"""tools/report.py: pages in a real browser, plots, a million lines."""

import json
import math
import re
import resource
import time
from pathlib import Path

import pytest

from harness.report.lines import WHOLE_BYTES, read_lines
from tests.browser import WIDTHS, needs_browser
from tests.report.runs import line_at, plan, write_run
from tests.report.test_page import HOSTILE, values_of
from tests.run_tools import run_tool
from tests.tiers import rest_in_gate

STEPS = 1_000_000
SPIKES = {"loss": (654_321, 55.5), "grad_norm": (123_456, 77.5), "step_time_s": (777_777, 99.5)}


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    """Return a run of a million lines, 340 MB; three are outliers, three have evaluations."""
    folder = write_run(tmp_path_factory.mktemp("long") / "run", [], step=STEPS)
    keys = ("learning_rate", "mfu", "loss_scale", "skipped_steps")
    values = {key: line_at(1)[key] for key in keys}
    rest = json.dumps(values | {"peak_allocated_gib": 61.25})[1:-1]
    # The last value of a key counts.
    rare = {step: f', "{key}": {value}' for key, (step, value) in SPIKES.items()}
    rare |= {n: f', "eval_loss": {3 - n / STEPS}' for n in range(300_000, STEPS, 300_000)}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            noise = math.sin(step * 12.9898)
            loss, norm, seconds = 2.5 + 0.05 * noise, 0.5 + 0.123 * noise, 1.2 + 0.011 * noise
            file.write(
                f'{{"attempt": 1, "unix_time_s": {1_790_000_000 + step}, "step": {step}, '
                f'"samples": {step * 512}, "tokens": {step * 1_048_576}, {rest}, '
                f'"loss": {loss}, "grad_norm": {norm}, "step_time_s": {seconds}'
                f"{rare.get(step, '')}}}\n"
            )
    return folder


@pytest.mark.gate("pages")
def test_report_of_a_million_lines_is_fast_and_keeps_spikes(long_run):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_tool("report", long_run)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Every line is decoded once; beside other tests, a core does half as much per second.
    lines = (long_run / "metrics.jsonl").read_bytes()[:20_000_000].splitlines()
    begin = time.process_time()
    for line in lines[: STEPS // 20]:
        json.loads(line)
    decoding_all = 20 * (time.process_time() - begin)
    assert seconds < 4 * decoding_all
    page = (long_run / "report.html").read_text()
    assert len(page) < 5_000_000
    values = values_of(page)
    assert [3 - n * 0.3 for n in (1, 2, 3)] == pytest.approx(values["loss"]["curves"][-1]["y"])
    assert "55.5" in page  # cut off from the plot, but named
    lines = read_lines(long_run / "metrics.jsonl")
    assert not lines.is_whole
    assert 2_000 < len(lines.lines) < 20_000
    by_step = {line["step"]: line for line in lines.lines}
    for key, (step, value) in SPIKES.items():
        assert by_step[step][key] == value
    assert all(step in by_step for step in (1, STEPS, 300_000, 600_000, 900_000))


@pytest.mark.parametrize("change", [{}, {"grad_norm": None}, {"loss": 1e-07}, {"loss/code": 2.0}])
def test_long_files_keep_extremes_whatever_their_lines_look_like(tmp_path, change):
    """Even if the fast search for plain numbers does not apply."""
    lines = [json.dumps(line_at(step, attempt=1, **change)) for step in range(1, 30_001)]
    rare = {9_001: "eval_loss", 12_345: "loss", 15_001: "grad_norm", 17_001: "step_time_s"}
    for step, key in rare.items():
        lines[step - 1] = json.dumps(line_at(step, **{key: 44.5}))
    lines[20_000] = json.dumps(line_at(20_001, loss="nan"))
    lines[25_000] = '{"step": 25001, "loss": 3.0, "grad_n'  # a write cut off, then continued
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines) + '\n{"step": 30001, "lo')
    assert path.stat().st_size > WHOLE_BYTES
    read = read_lines(path)
    by_step = {line["step"]: line for line in read.lines}
    assert all(by_step[step][key] == 44.5 for step, key in rare.items())
    assert by_step[20_001]["loss"] == "nan"
    assert 30_000 in by_step
    assert 30_001 not in by_step


def test_a_page_is_written_and_named(tmp_path):
    folder = write_run(tmp_path / "run")
    assert run_tool("report", folder).stdout.strip() == str(folder / "report.html")
    out = run_tool("report", folder, folder, "--out", tmp_path / "both.html").stdout.splitlines()
    assert Path(out[-1]).read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("named", [[], ["runs", "--price=2.5"]])
def test_all_runs_below_a_folder_are_listed(tmp_path, named):
    ada = plan() | {"owner": "ada"}
    write_run(tmp_path / "runs/team/a", the_plan=ada, gpu_hours=3, outcome="stopped", code=75)
    write_run(tmp_path / "runs/team/a/not-a-run-of-its-own")
    write_run(tmp_path / "runs/b", outcome="running", code=None)
    (tmp_path / "runs/empty").mkdir()
    (tmp_path / "runs/empty/again").symlink_to(tmp_path / "runs")
    *lines, _, path = run_tool("report", *named, cwd=tmp_path).stdout.splitlines()
    table = [re.split("  +", line) for line in lines]
    cost = (["cost"], ["-"], ["7.50"]) if named else ([], [], [])
    assert table[0] == ["run", "owner", "state", "steps", "held-out", "GPU hours", *cost[0]]
    assert re.fullmatch(r"\d\.\d{4}", loss := table[1][4])
    assert table[1][:2] + table[1][3:] == ["b", "-", "200 of 200", loss, "-", *cost[1]]
    assert re.fullmatch(r"no progress for \d+ d \d+ h", table[1][2])
    assert table[2] == ["team/a", "ada", "stopped", "200 of 200", loss, "3.00", *cost[2]]
    page = (tmp_path / path).read_text()
    assert path == "runs/report.html"
    assert "<td>team/a<td>ada<td class=warning>stopped<td>" in page
    assert "<td>3.00<td>7.50<td>" in page if named else "<th>cost" not in page


def test_report_of_a_folder_that_is_no_run_is_an_error(tmp_path):
    done = run_tool("report", tmp_path, tmp_path / "nothing", code=2)
    assert "2 problems" in done.stderr
    folder = write_run(tmp_path / "run")
    assert "no folder" in run_tool("report", folder, "--out", "/nowhere/a.html", code=2).stderr
    assert ".svg or .png" in run_tool("report", folder, "--plot", "a.gif", code=2).stderr


@pytest.mark.gate("pages")
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_pictures_of_one_run_and_of_several(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    lines = [line_at(step) for step in range(1, 30)]
    folders = [write_run(tmp_path / name) for name in "ab"]
    folders.append(write_run(tmp_path / "none", []))
    folders.append(write_run(tmp_path / "short", lines, the_plan=plan(lr=1.0)))
    for number, chosen in enumerate((folders[:1], folders[2:3], folders)):
        path = tmp_path / f"{number}.{suffix}"
        run_tool("report", *chosen, "--plot", path)
        assert path.stat().st_size > 5_000
    if suffix == "svg":
        assert "8 x H100" in (tmp_path / "0.svg").read_text()
        assert ">lr 0.0003" in (tmp_path / "2.svg").read_text()  # a and b are one setting


@needs_browser
@pytest.mark.parametrize("dark", rest_in_gate("pages", [False, True]))
def test_a_page_in_a_browser(browser, tmp_path, dark):
    events = [{"kind": "spike", "step": 77, "loss": 9.0}, {"kind": "saved", "step": 60}]
    folder = write_run(tmp_path / "run", events=events)
    run_tool("report", folder)
    for width in WIDTHS:
        page = browser.open((folder / "report.html").as_uri(), width, dark=dark)
        assert page.errors == []
        assert len(page.requests) == 1
        assert not page.overflows
        drawn = "document.querySelectorAll('figure.chart .on-step svg path:not(.grid)').length"
        assert page.evaluate(drawn) > 8
        background = page.evaluate("getComputedStyle(document.body.parentNode).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == dark


@needs_browser
def test_values_axes_and_keys_answer(browser, tmp_path):
    folder = write_run(tmp_path / "run")
    run_tool("report", folder)
    page = browser.open((folder / "report.html").as_uri())
    page.hover("#chart-loss .area")
    tip = page.evaluate("document.querySelector('#chart-loss .tip').innerText")
    assert re.search(r"step (99|100|101)\b", tip)
    assert f"{line_at(100)['loss']:.1f}" in tip
    shown = "getComputedStyle(document.querySelector('#chart-loss .on-{}')).display"
    shown = f"[{shown.format('step')}, {shown.format('hours')}]"
    assert page.evaluate(shown) == ["block", "none"]
    page.click("label:has(#by-hours)")
    assert page.evaluate(shown) == ["none", "block"]
    page.evaluate("document.querySelector('#chart-loss').focus()")
    page.press("ArrowLeft")
    assert "time at work" in page.evaluate("document.querySelector('#chart-loss .tip').innerText")
    assert page.errors == []


@pytest.mark.gate("pages")
@needs_browser
def test_runs_are_shown_and_hidden(browser, tmp_path):
    folders = [write_run(tmp_path / name / "run") for name in "ab"]
    run_tool("report", *folders, "--out", tmp_path / "both.html")
    page = browser.open((tmp_path / "both.html").as_uri())
    count = "document.querySelectorAll('#chart-loss .on-step path[data-run]:not(.hidden)').length"
    assert page.evaluate(count) == 2
    page.click('input[data-run="1"]')
    assert page.evaluate(count) == 1
    page.hover("#chart-loss .area")
    assert page.evaluate("document.querySelectorAll('#chart-loss .tip div').length") == 1
    assert page.errors == []


@pytest.mark.gate("pages")
@needs_browser
def test_report_escapes_hostile_text(browser, tmp_path):
    bad = plan(name=HOSTILE)
    bad["deepspeed_source"] = HOSTILE
    events = [{"kind": HOSTILE, "message": HOSTILE}, {"kind": "sample", "text": HOSTILE}]
    lines = [line_at(step, **{f"eval_loss/{HOSTILE}": 3.0, "eval_loss": 3.0}) for step in (1, 2)]
    name = "<script>window.hacked=1<&script>'\""
    folders = [write_run(tmp_path / (name + n), lines, events, bad, message=HOSTILE) for n in "ab"]
    run_tool("report", folders[0], "--out", tmp_path / "one.html")
    run_tool("report", *folders, "--out", tmp_path / "two.html")
    for html in ("one.html", "two.html"):
        page = browser.open((tmp_path / html).as_uri())
        page.hover(".chart .area")
        assert page.errors == []
        assert page.evaluate("window.hacked") is None
        assert len(page.requests) == 1
