"""Tells people and monitors how a run goes (run.notify): a command, a webhook or Prometheus."""

import contextlib
import getpass
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.files.records import as_line
from harness.report.formatting import duration
from harness.report.page import write_page
from harness.report.run_record import SILENT_S
from harness.run.instrument import Instrument
from harness.runfolder import RunFolder
from harness.steps import Step

Notice = dict[str, Any]

LIMIT_S = 10.0
"""Maximum seconds for one notification, and for the last ones before a process ends."""
BETWEEN_S = 15.0
"""Seconds between two looks at the progress, and between two states for Prometheus."""
_SLOW = 3.0
"""Multiple of a phase's longest recent duration that counts as no progress, but see SILENT_S."""
_METRICS = ("up", "code", "step", "total_steps", "loss", "eval_loss", "tokens_per_s", "gpu_hours")
"""Numbers of a notice that become metrics of Prometheus, as does unix_time_s."""


class Notifier(Instrument):
    """Sends notices from a thread, so that no step waits; a failure is a line of the log.

    Silent until `open`, and without a target: rank 0 alone has one.
    """

    def __init__(
        self, target: str | None, owner: str, folder: RunFolder, say: Callable[[str], None]
    ) -> None:
        self._command, self._say, self._folder = target, say, folder
        self._target = os.path.expandvars(target or "")
        self._is_web = self._target.startswith(("http://", "https://"))
        self._is_file = self._target.endswith(".prom") and not self._is_web
        self._facts = {"run": folder.path.resolve().name, "path": str(folder.path.resolve())}
        self._facts |= {"owner": owner, "host": socket.gethostname()}
        self._notices: queue.Queue[Notice | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._line: Mapping[str, Any] = {}
        self._watches = self._is_broken = False
        self._told_count = -1  # of the beat whose silence was told
        self._shown_at = 0.0

    def open(self, run: Any) -> None:
        """Tell that the run starts, and watch its progress."""
        if self._command is None:
            return
        self._run, self._watches = run, True
        self._thread = threading.Thread(target=self._work, name="notifier", daemon=True)
        self._thread.start()
        self.tell("started")

    def after(self, step: Step, line: Mapping[str, Any] | None) -> None:
        """Keep the line; every few seconds, pass it to Prometheus."""
        if line is None:
            return
        self._line, now = {**self._line, **line}, time.monotonic()
        if self._is_file and now >= self._shown_at + BETWEEN_S and self._notices.empty():
            self._shown_at = now
            self.tell("running")

    def end(self, error: BaseException | None) -> None:
        """Stop watching the progress: an export takes as long as it takes."""
        self._watches = False

    def tell(self, event: str, code: int | None = None, message: str | None = None) -> None:
        """Send a notice, soon."""
        if self._thread is None:
            return
        run = self._run
        named = ("loss", "eval_loss", "tokens_per_s")
        notice = {
            **self._facts,
            "event": event,
            "up": int(code is None),
            "code": code,
            "step": run.state.step,
            "total_steps": run.progress.total_steps,
            **{name: self._line[name] for name in named if self._line.get(name) is not None},
            "gpu_hours": round(self._folder.gpu_hours, 3),
            "unix_time_s": round(time.time(), 3),
            "message": message,
        }
        text = f"{notice['run']} ({notice['owner']}): {event} at step {run.state.step:,}"
        notice["text"] = f"{text}: {message.splitlines()[0]}" if message else text
        self._notices.put(notice)

    def close(self) -> None:
        """Wait until all notices are sent, for a limited time."""
        if self._thread is not None:
            self._notices.put(None)
            self._thread.join(LIMIT_S)

    def _work(self) -> None:
        while True:
            try:
                notice = self._notices.get(timeout=BETWEEN_S)
            except queue.Empty:
                self._look()
                continue
            if notice is None:
                return
            self._send(notice)

    def _look(self) -> None:
        """Tell once if the run makes no progress."""
        pulse = self._run.pulse
        beat, now = pulse.beat, time.monotonic()
        slow_s = max(SILENT_S, _SLOW * (pulse.longest_s(beat.phase) or 0.0))
        if self._watches and beat.count != self._told_count and now - beat.since > slow_s:
            self._told_count = beat.count
            place = f"'{beat.phase}' of step {beat.step}"
            self.tell("no progress", message=f"for {duration(now - beat.since)} in {place}")

    def _send(self, notice: Notice) -> None:
        try:
            if self._is_web:
                _post(self._target, notice)
            elif self._is_file:
                write_page(Path(self._target), exposition(notice))
            else:
                _call(self._command or "", notice)  # the shell itself reads the environment
        except Exception as error:
            why = str(error) if isinstance(error, OSError) else type(error).__name__
            if not self._is_broken:  # until it works again, one line is enough
                self._say(f"could not notify {printable(self._target)}, the run goes on: {why}")
            self._is_broken = True
        else:
            self._is_broken = False


def _post(address: str, notice: Notice) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, as_line(notice).encode(), headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        answer.read(1)


def _call(command: str, notice: Notice) -> None:
    """Run a shell command, with the notice as JSON on standard input; end it after LIMIT_S."""
    with subprocess.Popen(
        ["/bin/sh", "-uc", command],
        env={**os.environ, "RUN_EVENT": notice["event"], "RUN_TEXT": notice["text"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C must only reach the run
    ) as process:
        try:
            process.communicate(as_line(notice).encode(), LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise OSError(f"it took longer than {LIMIT_S:g} s") from None
    if process.returncode:
        raise OSError(f"exit code {process.returncode}")


def exposition(notice: Notice) -> str:
    """Return a notice as metrics in Prometheus' text format."""
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    labels = ",".join(
        f'{name}="{str(notice[name]).translate(escapes)}"' for name in ("run", "owner", "path")
    )
    values = {f"{name}{{{labels}}}": notice.get(name) for name in (*_METRICS, "unix_time_s")}
    values |= {f'state{{{labels},state="{notice["event"].replace(" ", "_")}"}}': 1}
    lines = (f"decoder_run_{name} {v}\n" for name, v in values.items() if v is not None)
    return "".join(lines)


def printable(target: str) -> str:
    """Return a target without what may be secret: an address's path and user, a command's words."""
    if target.startswith(("http://", "https://")):
        parts = urlsplit(target)
        short, rest = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", "/..."
    else:  # of TOKEN=x a command, or a mistyped address, no more than the first name
        begin = re.match(r"[\w./~$+-]*", target)
        short, rest = begin[0] if begin else "", " ..."
    return short if short == target else short + rest


def user_name() -> str:
    """Return the name of this process's user; "" in a container that has none."""
    with contextlib.suppress(OSError, KeyError, ImportError):
        return getpass.getuser()
    return ""
