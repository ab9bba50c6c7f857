"""Output on a terminal: real commands in a pseudo-terminal with 80 or fewer columns."""

from __future__ import annotations

import ast
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.launch.ranks import free_port
from harness.run.progress import Progress
from harness.terminal import HelpFormatter, coloured, takes_colour, wrapped
from tests.real_runs import REPOSITORY, environment, train_command, write_corpus
from tests.run.test_meter import LINE
from tests.tables import beside
from tests.tiers import rest_in_gate

TABLES = beside(__file__, "terminal.toml")

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
TOOLS = {name: command.split() for name, command in TABLES["tools"].items()}


class Terminal:
    """A command whose terminal output is read as it appears; Ctrl-C can be pressed."""

    def __init__(
        self, command: Sequence[object], columns: int = 80, env: Mapping[str, str] | None = None
    ) -> None:
        """Start it as a shell does, in a session that owns this terminal."""
        self._end, theirs = pty.openpty()
        self.resize(columns)
        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=REPOSITORY,
            env=environment(**{"TERM": "xterm", **(env or {})}),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.text = ""

    def resize(self, columns: int) -> None:
        """Change the width of the terminal."""
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the foreground processes, as the terminal does."""
        os.write(self._end, b"\x03")

    def read(self, until: Callable[[str], bool], timeout_s: float = 900) -> None:
        """Read until a condition holds for the whole output, or the command has ended."""
        deadline = time.monotonic() + timeout_s
        while not until(self.text):
            assert time.monotonic() < deadline, self.text
            if not select.select([self._end], [], [], 1.0)[0]:
                continue
            try:
                read = os.read(self._end, 1 << 16)
            except OSError:  # the last process has closed the terminal
                break
            if not read:
                break
            self.text += read.decode(errors="replace").replace("\r\n", "\n")

    def ended(self) -> int:
        """Read the rest; return the exit code."""
        self.read(lambda text: False)
        return self.process.wait(60)

    def close(self) -> None:
        """End what is still running, and close the terminal."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._end)


def shown_in(
    command: Sequence[object], columns: int = 80, env: Mapping[str, str] | None = None
) -> str:
    """Return the text that a command writes to a terminal with `columns` columns."""
    terminal = Terminal(command, columns, env)
    try:
        terminal.ended()
        return terminal.text
    finally:
        terminal.close()


def test_help_is_wrapped_and_its_commands_can_be_pasted() -> None:
    assert HelpFormatter("tool.py")._fill_text(TABLES["help"], 36, "") == TABLES["filled"]


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "tools").glob("*.py")), ids=lambda path: path.stem
)
def test_help_of_a_tool_fits_80_columns(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    lines = HelpFormatter("tool.py")._fill_text(text, 78, "").split("\n")
    assert [line for line in lines if len(line) > 78] == []


@pytest.mark.parametrize("columns", rest_in_gate("tools", [80, 60]))
@pytest.mark.parametrize("name", rest_in_gate("tools", TOOLS, ("plan", "mistakes", "sweep")))
def test_no_line_of_a_tool_is_wider_than_the_terminal(name: str, columns: int) -> None:
    text = ESCAPES.sub("", shown_in([sys.executable, *TOOLS[name]], columns))
    assert text.strip()
    wide = [line for line in text.split("\n") if len(line.rstrip("\r")) > columns]
    # Text without spaces is not wrapped, so that it can be copied.
    assert not [line for line in wide if len(max(line.split(), key=len)) < columns // 2], wide


def test_a_narrow_terminal_shows_fewer_ranks_and_ticks() -> None:
    lines = shown_in([sys.executable, *TOOLS["layout"]]).split("\n")
    stages = [line for line in lines if re.match(r"  stage \d +(on node|[F.])", line)]
    assert len(stages) == 8
    assert all("..." in line for line in stages)


def test_verdicts_have_colours_unless_no_color_says_otherwise() -> None:
    command = [sys.executable, *TOOLS["mistakes"]]
    assert "\x1b[31;1mcannot train\x1b[0m:" in shown_in(command)
    assert "\x1b" not in shown_in(command, env={"NO_COLOR": "1"})
    assert "\x1b" not in shown_in(command, env={"TERM": "dumb"})


@pytest.mark.parametrize("text", TABLES["verdicts"])
def test_a_verdict_is_coloured_and_nothing_else_changes(text: str) -> None:
    assert ESCAPES.sub("", coloured(text)) == text != coloured(text)


def test_ordinary_words_have_no_colour() -> None:
    for text in ("warn: it is ok to fail", "okapi  held-out", "it fits", "FAILURES.md"):
        assert coloured(text) == text


def test_pipes_get_no_colour_and_no_breaks() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        assert not takes_colour(stream, {})
    os.close(read)


def test_closed_output_pipe_does_not_end_a_command() -> None:
    said = "from harness.terminal import say; import sys; [say('a' * 9999) for _ in range(99)]"
    command = [sys.executable, "-c", f"{said}; say('went on', sys.stderr)"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "went on\n"
    assert process.returncode == 0


def test_a_broken_line_continues_below_its_text() -> None:
    row = "memory         " + "word " * 20
    first, *rest = wrapped(row.rstrip(), 50).split("\n")
    assert first.startswith("memory         word")
    assert rest
    assert all(line.startswith(" " * 15 + "word") and len(line) <= 50 for line in rest)
    numbered = wrapped("  1. " + "word " * 20, 50).split("\n")
    assert numbered[1].startswith("     word")
    assert wrapped("a/path/" + "x" * 90, 80) == "a/path/" + "x" * 90


class _Stream:
    """A terminal of a given width: a real pseudo-terminal."""

    def __init__(self, columns: int) -> None:
        self.terminal = Terminal(["sleep", "600"], columns)
        self.stream = os.fdopen(os.dup(self.terminal._end), "w")

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.terminal.close()


def live_lines(progress: Progress, monkeypatch: pytest.MonkeyPatch, lines: Any) -> list[str]:
    """Return the text that each metrics line writes."""
    written: list[str] = []
    monkeypatch.setattr(progress.stream, "write", lambda text: written.append(text))
    for line in lines:
        progress.step(line)
    return written


def test_terminal_width_is_read_at_each_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with _Stream(200) as wide:
        progress = Progress(True, wide.stream)
        progress.total_steps = 100
        (text,) = live_lines(progress, monkeypatch, [LINE])
        assert text.endswith("lr 1.00e-03")
        for columns in (80, 40):
            wide.terminal.resize(columns)
            (text,) = live_lines(progress, monkeypatch, [LINE])
            assert 1 < len(text.lstrip("\r")) < columns
        assert "loss 2.5000" in text
        assert "lr" not in text


def test_a_line_stays_every_five_percent_and_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("harness.run.progress.time.monotonic", lambda: now[0])
    with _Stream(80) as there:
        progress = Progress(True, there.stream)
        progress.total_steps = 100
        steps = [{**LINE, "step": step} for step in range(1, 22)]
        texts = live_lines(progress, monkeypatch, steps)
        assert [n for n, text in enumerate(texts, 1) if text.endswith("\n")] == [6, 11, 16, 21]
        now[0] = 601.0
        (text,) = live_lines(progress, monkeypatch, [{**LINE, "step": 22}])
        assert text.endswith("\n")


@pytest.mark.gate("tools")
def test_a_launched_run_at_80_columns_and_ctrl_c(tmp_path: Path) -> None:
    """The launcher turns Ctrl-C into a second signal for ranks that already have SIGINT."""
    corpus = write_corpus(tmp_path / "corpus")
    run = tmp_path / "run"
    words = train_command(f"data.path={corpus}", f"run.dir={run}", "train.steps=100000")
    launcher = [Path(sys.executable).parent / "deepspeed", "-q", "--num_accelerators", "1"]
    command = [*launcher, "--master_port", free_port(), *words[1:], "eval.every=0"]
    terminal = Terminal(command)
    try:
        terminal.read(lambda text: "step     40/" in text)
        terminal.press_ctrl_c()
        terminal.ended()
    finally:
        terminal.close()
    # The terminal echoes ^C after the current line, and DeepSpeed's launcher writes its own
    # KeyboardInterrupt.
    shown = re.sub(r"\^C|Traceback", r"\n\g<0>", terminal.text)
    live = re.findall(r"\r(step +\d+/[^\r\n]*)", shown)
    assert len(live) >= 30, terminal.text
    assert not [line for line in live[1:] if len(line) >= 80 or " left" not in line]
    assert re.search(r"stopped at step \d+: asked to stop by Ctrl-C;", terminal.text)
    assert "asked to stop by Ctrl-C" in (run / "status.json").read_text()
