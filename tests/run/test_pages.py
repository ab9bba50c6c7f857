"""report.html of real runs: written during training, and never the cause of a failure."""

import contextlib
import sys
from pathlib import Path

import pytest

from harness.run import pages
from harness.run.pages import Pages
from harness.runfolder import RunFolder
from tests.real_runs import REPOSITORY, events, run_ranks, train_command
from tests.report.runs import write_run


@pytest.fixture
def opened(tmp_path):
    folder = RunFolder(write_run(tmp_path / "run"))
    with contextlib.closing(folder):
        folder.open()
        yield folder


def test_a_young_page_is_not_written_again(opened, monkeypatch):
    report = opened.path / "report.html"
    kept = Pages(opened, True)
    kept.update()
    kept._ended(60)
    report.unlink()
    kept.update()
    kept._ended(60)
    assert not report.exists()
    monkeypatch.setattr(pages, "BETWEEN_S", 0.0)
    kept.update()
    kept._ended(60)
    assert report.exists()


def test_the_loop_does_not_wait_for_a_page(opened, monkeypatch):
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    popen = pages.subprocess.Popen
    monkeypatch.setattr(pages, "BETWEEN_S", 0.0)
    monkeypatch.setattr(pages.subprocess, "Popen", lambda command, **how: popen(sleeping, **how))
    kept = Pages(opened, True)
    kept.update()
    process = kept._process
    kept.update()  # one at a time
    assert kept._process is process
    monkeypatch.setattr(pages.subprocess, "Popen", popen)
    kept.finish(2.0)  # the current one is killed, the last one is written
    assert process.returncode == -9
    (event,) = events(opened, "no_report")
    assert "longer than 2 s" in event["message"]


def test_a_page_that_cannot_be_written_is_an_event(opened):
    (opened.path / "report.html").mkdir()
    Pages(opened, True).finish()
    (event,) = events(opened, "no_report")
    assert "report.html cannot be written" in event["message"]


def test_a_process_that_cannot_start_is_an_event(opened, monkeypatch):
    monkeypatch.setattr(pages.sys, "executable", "/nowhere/python")
    Pages(opened, True).finish()
    assert "/nowhere/python" in events(opened, "no_report")[0]["message"]


def test_other_ranks_and_runs_without_a_report_write_nothing(opened):
    kept = Pages(opened, False)
    kept.update()
    kept.finish()
    assert not (opened.path / "report.html").exists()


def test_a_real_run_leaves_its_page(tmp_path: Path, data: list[str]) -> None:
    json = f"--deepspeed={REPOSITORY / 'ds_configs' / 'zero1.json'}"
    more = ["log.report=true", "eval.every=2", "sample.tokens=4", f"run.dir={tmp_path / 'run'}"]
    command = train_command(*data, json, *more, f"run.notify=echo $RUN_EVENT >> {tmp_path}/told")
    ended = run_ranks(command, tmp_path).succeeded()
    assert f"report {tmp_path / 'run' / 'report.html'}" in ended.output
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Done at step 4 of 4." in page
    for chart in ("loss", "perplexity", "learning-rate", "grad-norm", "tokens-per-s"):
        assert f"id=chart-{chart} " in page
    assert "What it writes" in page
    assert "a unigram model" in page
    assert "Where the time went" in page
    run = RunFolder(tmp_path / "run")
    assert (tmp_path / "told").read_text().split() == ["started", "done"]
    assert (run.read_plan() or {})["run"]["run"]["notify"] == "echo ..."
    (sample,) = events(run, "sample")
    assert sample["text"]
    (baselines,) = events(run, "baselines")
    assert 0 < baselines["bigram_nats"] < baselines["unigram_nats"]
    assert not events(run, "no_report")
