"""Keeps report.html in the run folder up to date, in a separate process."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

from harness.errors import CannotSave
from harness.files.paths import REPOSITORY
from harness.runfolder import RunFolder

BETWEEN_S = 60.0
"""Minimum seconds between two pages while the run is in progress."""
PATIENCE_S = 60.0
"""Maximum seconds to wait for the last page at the end of a run."""


class Pages:
    """The report page of a run, on rank 0; does nothing on other ranks or with log.report=false.

    A page is written by a process of low priority, for which the loop does not wait. At most one
    runs, and it never outlives the run. A failure is recorded as an event.
    """

    def __init__(self, folder: RunFolder, enabled: bool) -> None:
        self._folder = folder
        self._enabled = enabled
        self._process: subprocess.Popen[str] | None = None
        self._last: float | None = None

    def update(self) -> None:
        """Start writing a page, unless one is in progress or recent."""
        if self._process is not None and self._process.poll() is not None:
            self._ended(PATIENCE_S)
        now = time.monotonic()
        if self._process is None and (self._last is None or now - self._last >= BETWEEN_S):
            self._begin()
            self._last = now

    def finish(self, patience_s: float = PATIENCE_S) -> Path | None:
        """Write the last page, waiting for at most this long. Return its path if it was written."""
        self._ended(patience_s)  # it started before the run ended
        self._begin()
        return self._folder.path / "report.html" if self._ended(patience_s) else None

    def _begin(self) -> None:
        if not self._enabled:
            return
        command = [sys.executable, "-m", "harness.report.page", str(self._folder.path.absolute())]
        try:
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C must only reach the run
            )
        except OSError as error:
            self._note(str(error))

    def _ended(self, patience_s: float) -> bool:
        """Wait for the page in progress and record a failure. Return True if it was written."""
        process, self._process = self._process, None
        if process is None:
            return False
        try:
            _, problem = process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self._note(f"it took longer than {patience_s:g} s")
            return False
        if process.returncode:
            last_line = problem.strip().rpartition("\n")[2]
            self._note(last_line or f"exit code {process.returncode}")
        return process.returncode == 0

    def _note(self, problem: str) -> None:
        with contextlib.suppress(CannotSave):  # a failed page must not end the run
            self._folder.append_event("no_report", message=f"report.html: {problem}")
