"""Pages of runs in every state, read as text; tests/test_report.py opens them in a browser."""

import json
import re
import time
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.report.chart import Chart, Curve, html_of
from harness.report.charts import smoothed
from harness.report.compare import compare_page_of, differences
from harness.report.events import spent
from harness.report.page import main, page_of
from harness.report.run_record import RunRecord, read
from harness.report.verdicts import ending
from tests.report.runs import line_at, plan, write_run
from tests.run_tools import printed
from tests.tables import beside

HOSTILE = '<script>window.hacked=1</script>"><img src=x onerror=window.hacked=1>'


class Elements(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def values_of(page: str) -> dict[str, Any]:
    """Return the numbers that the page's script shows, by chart."""
    found = re.findall(r"<figure class='chart[^']*' id=chart-(\S+) .*?data-values=\"(.*?)\"", page)
    return {name: json.loads(unescape(text)) for name, text in found}


def test_a_page_shows_what_was_measured(tmp_path):
    page = page_of(read(write_run(tmp_path / "run")))
    values = values_of(page)
    charts = {"loss", "perplexity", "learning-rate", "grad-norm", "tokens-per-s", "mfu"}
    assert charts <= values.keys()
    held_out = values["loss"]["curves"][1]
    assert held_out["label"] == "held-out"
    assert held_out["x"]["step"] == [50, 100, 150, 200]
    assert held_out["x"]["tokens"] == [1024 * step for step in (50, 100, 150, 200)]
    assert held_out["x"]["hours"] == pytest.approx([25, 50, 75, 100])
    assert held_out["y"][-1] == pytest.approx(line_at(200)["loss"] + 0.1, rel=1e-5)
    assert values["mfu"]["curves"][0]["y"][0] == pytest.approx(40)
    assert ">predicted 0.45</b>" in page
    assert re.search("<li [^>]*>held-out", page), "a legend"
    assert "<td>1.50 GiB</td>" in page, "of the forward phase"
    assert "8 x H100 \u00b7 ZeRO 1, tensor 2 \u00b7 bf16" in page


@pytest.mark.parametrize(
    ("seconds", "label"), [(7200, "2 h"), (6000, "100 min"), (120, "2 min"), (100, "100 s")]
)
def test_times_have_the_largest_unit_that_fits_twice(seconds, label):
    curve = Curve("", "", {"hours": [0.0, seconds]}, [0.0, 1.0])
    drawn = html_of(Chart("", "", "", [curve], axes={"hours": ""}))
    assert f'<span style="left:100.00%" class=last>{label}</span>' in drawn


def test_report_page_needs_no_network_and_styles_every_class(tmp_path):
    run = read(write_run(tmp_path / "run"))
    for page in (page_of(run), compare_page_of([run, run], "two")):
        elements = Elements(page)
        assert not {"link", "img", "iframe", "object"} & set(elements.tags)
        assert not {"src", "href"} & set(elements.attributes)
        assert "default-src 'none'" in page
        body = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL)
        named = re.findall(r"""\sclass=(?:"([^"]*)"|'([^']*)'|([\w-]+))""", body)
        used = {name for words in named for word in words for name in word.split()}
        used -= {"line"}  # the plain one of the styles of a curve
        assert [name for name in sorted(used) if f".{name}" not in page] == []


def test_nothing_in_a_record_becomes_html(tmp_path):
    bad = plan(name=HOSTILE)
    bad["run"]["model"]["name"] = bad["deepspeed_source"] = bad["world"]["gpu"] = HOSTILE
    bad["estimate"]["phases"] = {HOSTILE: {HOSTILE: 1.0}}
    events = [
        {"kind": HOSTILE, "step": 3, "message": HOSTILE},
        {"kind": "sample", "step": HOSTILE, "title": HOSTILE, "prompt": HOSTILE, "text": HOSTILE},
        {"kind": "saved", "step": 5, "path": HOSTILE, HOSTILE: HOSTILE},
        {"kind": "memory", "rows": [{"point": HOSTILE, "predicted": 1, "measured": 2}]},
    ]
    losses = {f"loss/{HOSTILE}": 3.0, f"eval_loss/{HOSTILE}": 3.0}
    lines = [line_at(step, **losses) for step in (1, 2)]
    folder, status = tmp_path / HOSTILE.replace("/", "-"), {"message": HOSTILE, "outcome": "failed"}
    run = read(write_run(folder, lines, events, bad, **status))
    clean = Elements(page_of(read(write_run(tmp_path / "clean"))))
    for page in (page_of(run), compare_page_of([run, run], HOSTILE)):
        elements = Elements(page)
        assert elements.tags.count("script") == clean.tags.count("script")
        assert not {"img", "onerror"} & {*elements.tags, *elements.attributes}


@pytest.mark.parametrize("records", beside(__file__, "page.toml")["damaged"])
def test_report_is_written_for_any_folder(tmp_path, records):
    folder = tmp_path / "run"
    folder.mkdir()
    for name, text in records.items():
        (folder / name).write_text(text)
    run = read(folder)
    for page in (page_of(run), compare_page_of([run, run], "runs")):
        assert page.startswith("<!doctype html>")
        assert page.endswith("</html>\n")
        values_of(page)


def test_what_could_not_be_read_is_said(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "status.json").write_text("{")
    (folder / "metrics.jsonl").write_text('garbage\n{"step": 1, "loss": 2.0}\n')
    page = page_of(read(folder))
    assert "status.json" in page
    assert "1 damaged lines were left out" in page


def test_losses_that_are_not_finite_leave_gaps(tmp_path):
    lines = [line_at(step) for step in range(1, 101)]
    for line in lines[60:]:
        line |= {"loss": "nan", "grad_norm": "inf"}
    page = page_of(read(write_run(tmp_path / "run", lines, outcome="diverged", code=76)))
    (curve,) = values_of(page)["loss"]["curves"]
    assert curve["x"]["step"][-1] == 60
    assert "40 drawn steps have a non-finite loss" in page
    assert "nan" not in json.dumps(values_of(page))


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("is_whole", [True, False])
def test_steps_taken_again_replace_those_before(tmp_path, monkeypatch, every, is_whole):
    if not is_whole:  # as above 8 MiB, where only some lines of a range are kept
        monkeypatch.setattr("harness.report.lines.WHOLE_BYTES", 0)
        monkeypatch.setattr("harness.report.lines.RANGES", 3)
    lines = [line_at(step) for step in range(every, 801, every)]
    lines += [line_at(step, attempt=2, loss=1.0) for step in range(600 + every, 1001, every)]
    run = read(write_run(tmp_path / "run", lines, attempt=2))
    steps = [line["step"] for line in run.lines]
    assert steps == (list(range(every, 1001, every)) if is_whole else sorted(set(steps)))
    assert [line["loss"] == 1.0 for line in run.lines] == [step > 600 for step in steps]
    assert "2 attempts, 200 steps repeated" in page_of(run)
    training = next(part.seconds for part in spent(run) if part.name == "training steps")
    assert training == pytest.approx(1200 * 0.5, abs=0.5 * every)


def test_late_evaluation_completes_its_metrics_line(tmp_path):
    evaluated = {"attempt": 2, "step": 50, "eval_loss": 4.0}
    run = read(write_run(tmp_path / "stopped", [line_at(40), line_at(50), evaluated]))
    assert run.lines[-1]["loss"] == line_at(50)["loss"]
    assert run.evaluations() == [(50, 4.0)]
    lines = [line_at(step) for step in range(10, 81, 10)]
    killed = read(write_run(tmp_path / "killed", [*lines, evaluated, line_at(60, attempt=2)]))
    assert killed.metrics.repeated == 30


def test_the_best_loss_is_that_of_weights_that_exist(tmp_path):
    before = {"attempt": 1, "step": 0, "eval_loss": 1.1641}
    pages = [page_of(read(write_run(tmp_path / "a", [before, line_at(1)])))]
    losses = {10: 1.16, 20: 1.18, 30: 1.19}
    lines = [before, *(line_at(step, eval_loss=loss) for step, loss in losses.items())]
    exported = read(write_run(tmp_path / "b", lines))
    assert (exported.best(), exported.has_improved()) == ((30, 1.19), False)
    for step in (20, 30):
        (tmp_path / f"b/checkpoints/step-{step:08d}").mkdir(parents=True)
    assert read(tmp_path / "b").best() == (20, 1.18)
    (tmp_path / "b/checkpoints/step-00000010").mkdir()
    assert read(tmp_path / "b").best() == (10, 1.16)
    assert read(tmp_path / "b").has_improved()
    assert exported.lowest() == (10, 1.16)
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    running = read(write_run(tmp_path / "c", [*lines, line_at(40, eval_loss=1.155)], time=now))
    running.status["outcome"], running.saved = "running", [10]
    assert running.best() == (40, 1.155), "whose weights are in training"
    assert "hardly improved" not in page_of(running), "so far"
    untrained = read(write_run(tmp_path / "d", [before]))
    assert (untrained.best(), untrained.lowest()) == (None, None)
    pages += [page_of(untrained), page_of(exported)]
    assert ["before training; none since" in page for page in pages] == [True, True, False]
    page = compare_page_of([untrained, exported], "two")
    assert "http-equiv=refresh" not in page
    assert "<td>1.1641<td>0, before training" in page
    assert page.count("did not improve (1.1641 before training)") == 2  # headline and table
    assert re.findall(r"<b>(.)</b> has the lowest held-out loss, (.*?),", page) == [
        ("b", "1.1900 at step 30")
    ]
    assert values_of(pages[2])["perplexity"]["curves"][0]["x"]["step"] == [10, 20, 30]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_layers_have_whole_numbers(tmp_path, layers):
    probe = {f"attention_entropy/{layer}": 1.0 for layer in range(layers)}
    page = page_of(read(write_run(tmp_path / "run", [line_at(10, **probe)])))
    (chart,) = re.findall("<figure[^>]*id=chart-attention-entropy .*?</figure>", page, re.S)
    (axis,) = re.findall("<div class='x '>(.*?)</div>", chart)
    ticks = re.findall('%"[^>]*>([^<]*)<', axis)
    assert ticks == [str(layer) for layer in range(layers)]


def test_a_sample_shows_the_answer_and_the_end_of_a_prompt(tmp_path):
    prompt = "\n".join(f"line {n} of the prompt" for n in range(99))
    samples = [{"kind": "sample", "step": 1, "prompt": p, "text": "42"} for p in ("Hi", prompt)]
    page = page_of(read(write_run(tmp_path / "run", events=samples)))
    short, long = re.findall(r"<pre class=sample>(.*?)</pre>(<details>.*?</details>)?", page, re.S)
    assert short == ("<span>Hi</span>42", "")
    assert long[0].endswith("line 98 of the prompt</span>42")
    assert long[0].count("\n") == 3
    assert "line 0 of the prompt" in long[1]


def test_report_places_events_on_the_axis(tmp_path):
    events = [
        {"kind": "spike", "step": 77, "loss": 9.0},
        {"kind": "rollback", "from_step": 80, "to_step": 60},
        {"kind": "saved", "step": 60, "seconds": 65, "bytes": 2**30, "stall_s": 2.5, "path": "p"},
        {"kind": "memory", "rows": [{"point": "peak", "predicted": 2**31, "measured": 2**30}]},
    ]
    page = page_of(read(write_run(tmp_path / "run", events=events)))
    for title in ("spike, step 77", "rollback, step 80"):
        assert page.count(f"<title>{title}</title>") > 5  # in each chart, on each axis
    assert page.count("<title>checkpoint, step 60</title>") == 3  # in the first one alone
    assert "1.00 GiB in 1 min 5 s, 2.5 s of them waited for: p" in page
    assert "<b>1.00 GiB</b><small>at most, predicted 2.00 GiB" in page


def test_time_is_accounted_for(tmp_path):
    lines = [line_at(step) for step in range(1, 101)]
    lines += [line_at(step, attempt=2) for step in range(101, 201)]
    for line in lines[100:]:
        line["unix_time_s"] += 1000
    began = "2026-09-21T14:13:10+00:00"  # 10 s before the line of step 0 would have been written
    events = [{"kind": "engine", "time": began}, {"kind": "saved", "step": 100, "stall_s": 3.0}]
    events.append({"kind": "a", "attempt": 2, "time": began.replace("13:10", "30:45")})
    run = read(write_run(tmp_path / "run", lines, events, outcome="running", attempt=2))
    run.events[1]["time"] = "2026-09-21T14:14:20+00:00"  # 10 s after line 100
    parts = {part.name: part.seconds for part in spent(run)}
    assert parts["training steps"] == pytest.approx(99 * 0.5 + 50 - 0.5, abs=1)
    assert parts["not running, between attempts"] == pytest.approx(985)
    assert (parts["saving"], parts["starting"]) == (3.0, 16)  # an event is the first sign
    assert (parts["evaluation, samples, export"], run.seconds[-1]) == pytest.approx((6, 100))


def test_losses_of_pairs_are_not_per_token(tmp_path):
    lines = [line_at(step, preference_accuracy=0.5) for step in range(1, 9)]
    page = page_of(read(write_run(tmp_path / "run", lines)))
    assert ("nats per token" in page, "mean over pairs" in page) == (False, True)


def test_report_of_running_run_reloads_and_notes_silence(tmp_path):
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    running = read(write_run(tmp_path / "running", outcome="running", time=now))
    assert "http-equiv=refresh" in page_of(running)
    run = read(write_run(tmp_path / "run", outcome="running"))
    assert run.last_sign is not None
    assert run.is_silent(run.last_sign + 3600)
    assert not run.is_silent(run.last_sign + 60)
    assert "may have died" in ending(run).text
    assert "refresh" not in page_of(run)
    run.plan["run"]["log"]["every"] = 10_000
    assert not run.is_silent(run.last_sign + 3600)  # the next line takes longer


def test_the_plan_says_examples_windows_and_warm_up(tmp_path):
    record = plan(warmup_ratio=0.03)
    record["data"] = {"trained_examples": 294, "trained_windows": 28}
    page = page_of(read(write_run(tmp_path / "run", the_plan=record)))
    assert "294 examples in 28 windows to train on, 200 steps" in page
    assert "8 windows per step = micro-batch 1" in page
    assert "0.03 of all steps of warm-up" in page


def test_probes_are_drawn_where_they_were_made(tmp_path):
    lines = [line_at(step) for step in range(1, 201)]
    for line in lines[9::10]:
        line |= {f"attention_entropy/{layer}": 3.0 - layer / 10 for layer in range(12)}
        line |= {"param_norm": 10.0 + line["step"], "update_ratio": 1e-3 / line["step"]}
    lines[-1]["loss_by_position"] = [4.0, 3.5, 3.2]
    values = values_of(page_of(read(write_run(tmp_path / "run", lines))))
    entropy = values["attention-entropy"]["curves"][-1]
    assert entropy["x"]["layer"] == list(range(12))
    assert entropy["y"][11] == pytest.approx(1.9)
    assert values["loss-by-position"]["curves"][0]["y"] == [4.0, 3.5, 3.2]
    assert {"param-norm", "update-ratio"} <= set(values)


def test_needles_are_a_heat_map_of_lengths_and_depths(tmp_path):
    lines = [line_at(step) for step in range(1, 51)]
    assert "id=needles" not in page_of(read(write_run(tmp_path / "none", lines)))
    lines[-1] |= {"needle/4096": [0.5, None, 0.5, 0.25, 1.0], "needle/512": [1.0] * 5}
    lines[-1]["needle/<b>"] = [1.0]
    page = page_of(read(write_run(tmp_path / "run", lines)))
    (card,) = re.findall(r"<section id=needles>.*?</section>", page, re.S)
    assert "<th></th><th>512</th><th>4,096</th>" in card
    assert re.findall(r">([\d.]*)</td>", card) == (
        ["1.00", "0.50", "1.00", "", "1.00", "0.50", "1.00", "0.25", "1.00", "1.00"]
    )
    assert "var(--good) 25%" in card
    assert [*re.findall(r"<th>(\d+) %", card)] == ["0", "25", "50", "75", "100"]


def test_training_length_is_marked_if_longer_are_evaluated(tmp_path):
    lines = [line_at(step) for step in range(1, 51)]
    lines[-1]["loss_by_position"] = [4.0, 3.5, 3.2, 6.0]
    record = plan()
    record["run"]["eval"] = {"seq_len": 256}
    page = page_of(read(write_run(tmp_path / "run", lines, the_plan=record)))
    (curve,) = values_of(page)["loss-by-position"]["curves"]
    assert curve["x"] == {"position in a window of 256 tokens": [64, 128, 192, 256]}
    assert "<title>length of the training samples</title>" in page
    assert "It falls to the right" in page
    record["run"]["train"]["carry_state"] = True
    page = page_of(read(write_run(tmp_path / "carried", lines, the_plan=record)))
    assert "It is flat if the carried state" in page


def evaluated_at_50(folder: Path, loss: float, record: dict[str, Any]) -> RunRecord:
    lines = [*map(line_at, range(1, 50)), line_at(50, eval_loss=loss)]
    return read(write_run(folder, lines, the_plan=record))


def test_runs_are_ranked_and_their_differences_listed(tmp_path):
    losses = (("a", 1e-4, 4.0), ("b", 3e-4, 3.0))
    runs = [evaluated_at_50(tmp_path / name, loss, plan(lr=rate)) for name, rate, loss in losses]
    page = compare_page_of([*runs, read(write_run(tmp_path / "none", []))], "three")
    assert "b \u2605 best" in page
    places = [page.index(f'aria-label="show {name}"') for name in ("b", "a", "none")]
    assert places == sorted(places)
    assert differences(runs) == [("optim.lr", ["0.0001", "0.0003"])]
    assert "Their plans do not differ." not in compare_page_of(runs, "two")
    assert "Their plans do not differ." in compare_page_of(runs[:1] * 2, "one, twice")


def test_runs_of_one_name_have_a_checkbox_each(tmp_path):
    runs = [read(write_run(tmp_path / name / "run")) for name in "ab"]
    runs[1].plan["run"]["train"]["seed"] = 1
    page = compare_page_of(runs, "two")
    assert "<td>run<td>run run<td>" in page  # of both seeds
    assert re.findall(r'<input [^>]*data-run="(.*?)"', page) == ["0", "1"]
    assert {*re.findall(r'<path [^>]*data-run="(.*?)"', page)} == {"0", "1"}
    for chart in values_of(page).values():
        assert [curve["run"] for curve in chart["curves"]] == ["0", "1"]


def test_losses_on_different_held_out_sets_are_not_compared(tmp_path):
    losses = (("a", "x", 4.0), ("b", "y", 3.0), ("c", "x", 5.0), ("d", "z", 9.0))
    runs = [
        evaluated_at_50(tmp_path / name, loss, plan() | {"held_out_set": of_set})
        for name, of_set, loss in losses
    ]
    page = compare_page_of(runs, "four")
    assert "4 runs on 3 held-out sets, whose losses cannot be compared" in page
    lowest = re.findall(r"<b>(.)</b> has the lowest held-out loss of set (.)", page)
    assert lowest == [("b", "A"), ("a", "B"), ("d", "C")]
    assert re.findall(r"(.) \u2605 best of (.)", page) == [("a", "B")]  # the others are alone
    alike = compare_page_of([runs[0], runs[2]], "two")
    assert "a \u2605 best<" in alike
    assert "<th>set" not in alike


def test_the_page_comes_to_the_folder_at_once_or_not_at_all(tmp_path):
    folder = write_run(tmp_path / "run")
    assert main(str(folder)) == 0
    assert (folder / "report.html").read_text().endswith("</html>\n")
    assert not list(folder.glob(".report*"))
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    assert main(str(folder)) == 1
    assert not list(folder.glob(".report*"))


def test_reports_import_neither_torch_nor_what_needs_installing():
    code = "import sys, harness.report.page, harness.report.compare; print(*sys.modules)"
    heavy = {"torch", "numpy", "pydantic", "deepspeed", "matplotlib"}
    assert not heavy & {*printed(code).split()}


def test_means_follow_a_slope_and_are_calm_at_both_ends():
    slope = [3.0 * step for step in range(100)]
    assert smoothed(slope, 11)[5:95] == pytest.approx(slope[5:95])
    noisy = [5.0 + (-1) ** step for step in range(99)] + [9.0]
    assert max(smoothed(noisy, 41)) < 5.5
    assert smoothed([7.0], 5) == [7.0]
