"""A run's terminal lines, and its metrics for monitors."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.run.meter import monitor_events
from harness.run.progress import Progress
from tests.two_ranks import REPOSITORY

LINE: dict[str, Any] = {
    "step": 5,
    "samples": 40,
    "loss": 2.5,
    "grad_norm": 1.25,
    "learning_rate": 1e-3,
    "step_time_s": 2.0,
    "tokens_per_s": 1234.5,
    "mfu": None,
    "loss_scale": 1.0,
    "skipped_steps": 0,
}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, *lines: dict[str, Any]) -> str:
    progress = Progress(enabled=True, stream=stream)
    progress.total_steps = 100
    for line in lines:
        progress.step(line)
    return stream.getvalue()


def test_a_step_is_a_plain_line_where_nobody_watches() -> None:
    text = shown(io.StringIO(), LINE, {**LINE, "step": 6})
    assert text.count("\n") == 2
    assert "\r" not in text


def test_a_terminal_shows_one_line_that_changes() -> None:
    text = shown(_Terminal(), LINE, {**LINE, "step": 6})
    assert text.count("\r") == 2
    assert "\n" not in text


def test_an_evaluation_stays_on_the_terminal() -> None:
    assert shown(_Terminal(), {**LINE, "eval_loss": 2.25}).endswith("\n")


def test_a_shorter_line_covers_the_longer_one_before() -> None:
    first, second = shown(_Terminal(), {**LINE, "mfu": 0.4}, LINE).split("\r")[1:]
    assert len(second) >= len(first)


def test_a_line_tells_loss_rate_and_time_left() -> None:
    text = shown(io.StringIO(), LINE)
    for part in ("5/100", "loss 2.5000", "norm 1.250", "1,234 tokens/s", "3:10 left"):
        assert part in text


@pytest.mark.parametrize(("mfu", "expected"), [(None, False), (0.412, True)])
def test_mfu_is_shown_where_it_is_known(mfu: float | None, expected: bool) -> None:
    assert ("mfu 41.2%" in shown(io.StringIO(), {**LINE, "mfu": mfu})) is expected


def test_the_loss_scale_is_shown_in_fp16_only() -> None:
    assert "scale" not in shown(io.StringIO(), LINE)
    assert "scale 1024 skipped 3" in shown(
        io.StringIO(), {**LINE, "loss_scale": 1024.0, "skipped_steps": 3}
    )


def test_other_ranks_say_nothing() -> None:
    stream = io.StringIO()
    Progress(enabled=False, stream=stream).say("text")
    assert stream.getvalue() == ""


def test_monitors_get_what_is_known_by_samples() -> None:
    events = monitor_events({**LINE, "eval_loss": 2.25})
    assert ("train/loss", 2.5, 40) in events
    assert ("train/eval_loss", 2.25, 40) in events
    assert "train/mfu" not in [name for name, _, _ in events]


def test_a_console_that_is_gone_does_not_end_a_run() -> None:
    """A closed terminal, or a log on a full disk; nor does what is left in its buffer."""
    code = "from harness.run.progress import Progress\nprogress = Progress(True)\n"
    code += "for _ in range(3):\n    progress.say('x' * 10_000)\n"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, stdout=full, check=False
        )
    assert done.returncode == 0
