"""Notifications (run.notify): a real HTTP server, real commands, Prometheus' text format."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.guard.watchdog import Pulse
from harness.run import notify
from harness.run.notify import Notifier, exposition, printable
from harness.runfolder import RunFolder
from tests.real_runs import wait_for
from tests.tables import beside

SECRET = "T0/B1/s3cret"
TABLES = beside(__file__, "notify.toml")


@contextlib.contextmanager
def webhook(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Return the address of a local server, and the notices that it gets."""
    notices: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            notices.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{SECRET}", notices
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def notifying(target: str, folder: Path) -> Iterator[tuple[Notifier, Pulse, list[str]]]:
    """Return the notifier of a run at step 7, its pulse, and the lines of its log."""
    lines: list[str] = []
    notifier = Notifier(target, "ada", RunFolder(folder / "first"), lines.append)
    pulse = Pulse(floor_s=300, factor=10, first_s=3600)
    state, progress = SimpleNamespace(step=7), SimpleNamespace(total_steps=9)
    notifier.open(SimpleNamespace(pulse=pulse, state=state, progress=progress))
    yield notifier, pulse, lines
    notifier.close()


LINE: dict[str, Any] = {"loss": float("nan"), "eval_loss": 2.5, "step": 7}


def test_a_webhook_gets_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with webhook() as (address, notices):
        monkeypatch.setenv("HOOK", address)
        with notifying("$HOOK", tmp_path) as (notifier, _, lines):
            notifier.after(None, LINE)  # type: ignore[arg-type]
            notifier.after(None, {"step": 8})  # type: ignore[arg-type]
            notifier.tell("diverged", 76, "10 steps were skipped\nand more")
    assert [notice["event"] for notice in notices] == ["started", "diverged"]
    assert notices[1].items() >= TABLES["diverged"].items()
    assert lines == []


def test_no_progress_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "BETWEEN_S", 0.01)
    monkeypatch.setattr(notify, "SILENT_S", 0.2)
    with webhook() as (address, notices), notifying(address, tmp_path) as (notifier, pulse, _):
        pulse("step", 8)
        wait_for(lambda: len(notices) > 1, "a notice", 30)
        time.sleep(0.3)
        assert [notice["event"] for notice in notices] == ["started", "no progress"]
        assert notices[1]["message"].endswith("in 'step' of step 8")
        notifier.end(None)
        pulse("sample", 8)  # and an export, which have no limit
        time.sleep(0.3)
        assert len(notices) == 2


@pytest.mark.parametrize("what", TABLES["failures"])
def test_a_failure_is_one_line_without_secrets(what: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(notify, "LIMIT_S", 0.5 if what == "slow" else 10.0)
    with webhook(500) as (address, _):
        pass
    target, text = TABLES["failures"][what]
    words = {"gone": address, "gone_host": address.partition("//")[2], "secret": SECRET}
    words["hook"] = "$NO_SUCH_HOOK"  # in TOML it would name a part
    with webhook(500) as (broken, _):
        target, begin = target.format(broken=broken, folder=tmp_path, **words), time.monotonic()
        with notifying(target, tmp_path) as (notifier, _, lines):
            notifier.tell("done", 0)
            wait_for(lambda: lines, "the line", 30)
        assert time.monotonic() - begin < 10
    (line,) = lines
    assert line.startswith("could not notify ")
    assert text in line
    assert "s3cret" not in line


def test_a_command_reads_the_notice(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with notifying(f'cat >> {out}; echo "$RUN_EVENT: $RUN_TEXT" >> {out}', tmp_path):
        pass
    notice, text = out.read_text().splitlines()
    assert json.loads(notice)["event"] == "started"
    assert text == "started: first (ada): started at step 7"


def test_prometheus_reads_the_newest_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "BETWEEN_S", 0.0)
    file = tmp_path / "run.prom"
    with notifying(str(file), tmp_path) as (notifier, _, lines):
        wait_for(lambda: file.exists() and notifier._notices.empty(), "the first state", 30)
        notifier.after(None, LINE)  # type: ignore[arg-type]
        wait_for(lambda: 'state="running"' in file.read_text(), "the next state", 30)
        assert "decoder_run_eval_loss{" in file.read_text()
        notifier.tell("stopped", 79, "the budget is used up")
    text = file.read_text()
    labels = f'run="first",owner="ada",path="{tmp_path / "first"}"'
    assert f"decoder_run_up{{{labels}}} 0\n" in text
    assert f"decoder_run_code{{{labels}}} 79\n" in text
    assert f'decoder_run_state{{{labels},state="stopped"}} 1\n' in text
    assert [*tmp_path.iterdir()] == [file]
    hostile = {"run": 'a"b\n\\', "owner": "", "path": "", "event": "done", "step": 1}
    assert 'decoder_run_step{run="a\\"b\\n\\\\",owner="",path=""} 1\n' in exposition(hostile)
    assert lines == []


@pytest.mark.parametrize(("target", "shown"), [*TABLES["shown"], ("$HOOK", "$HOOK")])
def test_a_target_is_shown_without_secrets(target: str, shown: str) -> None:
    assert printable(target) == shown
