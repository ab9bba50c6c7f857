"""One run, interrupted again and again in random ways, each time going on in a random layout.

SOAK=200 sets how often (`make tables`), SEED=... another sequence. SOAK_FOLDER=... keeps it, to go
on there; SOAK_MARKDOWN=... writes the table there.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import cast

import pytest

from harness.launch.fork_server import Zygote
from tests.faults.checks import check_tidy
from tests.faults.soak import Happened, Story
from tests.faults.soak_attempts import PLACES, drawn
from tests.faults.soak_report import apart, markdown, redone

INTERRUPTIONS = int(os.environ.get("SOAK", "5"))
SEED = int(os.environ.get("SEED", "0"))


@pytest.mark.gate("faults")
@pytest.mark.fault("interrupted at random, layout changed each time")
def test_a_run_survives_one_interruption_after_the_other(zygote: Zygote, tmp_path: Path) -> None:
    folder = Path(os.environ.get("SOAK_FOLDER", tmp_path)).absolute()
    with contextlib.closing(Story(folder, SEED, zygote)) as story:
        story.interrupt(INTERRUPTIONS)
        steps = story.end()
        lines = {line["step"]: line for line in story.run.read_metrics()}
        assert [*lines] == [*range(steps + 1)]
        assert all(line["samples"] == 8 * step for step, line in lines.items())
        worst = apart(story.run, story.undisturbed(steps))
        assert [row for row in worst if not row.share <= 1] == []
        again, differ = redone(story.run, story.happened)
        assert differ == []
        check_tidy(story.run)
        text = markdown(story, steps, worst, again)
    print(text)
    if path := os.environ.get("SOAK_MARKDOWN"):
        Path(path).write_text(text)


def test_a_story_counts_how_often_it_was_broken_off(tmp_path: Path) -> None:
    attempt = Happened(0, "zero1 x2", "kill", None, [1, -9], 0, "", [], 0, [1, 2], 3.0)
    unused = cast(Zygote, None)
    with contextlib.closing(Story(tmp_path, 0, unused)) as story:
        story.happened.append(attempt)
        assert "broken off 0 times;" in markdown(story, 4, [], 0)
    with contextlib.closing(Story(tmp_path, 0, unused)) as story:  # before its first attempt
        story.happened.append(attempt)
        assert "broken off 1 time;" in markdown(story, 4, [], 0)


def test_a_story_is_a_function_of_its_seed() -> None:
    """Of every kind some, at every place, from any attempt on."""
    disk = Path("/disk")
    story = [drawn(0, number, disk) for number in range(1000)]
    assert story[500:510] == [drawn(0, number, disk) for number in range(500, 510)]
    assert story != [drawn(1, number, disk) for number in range(1000)]
    assert {attempt.fault.get("at") for attempt in story} >= set(PLACES)
    assert len({attempt.layout for attempt in story}) == 12
    assert {attempt.kind for attempt in story} == {
        *("kill", "term", "usr1", "hup", "int", "starting", "raise"),
        *("full disk", "damage", "nan", "hang"),
    }
    assert "full disk" not in {drawn(0, number, None).kind for number in range(200)}
