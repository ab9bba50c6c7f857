"""One run, interrupted again and again in random ways, each time going on in a random layout.

SOAK=40 sets how often (`make tables`); SEED=... another sequence.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from harness.runfolder import RunFolder
from tests.faults.checks import SAVE_EVERY, check_tidy, executed
from tests.faults.conftest import arguments
from tests.two_ranks import events
from tests.zygote import Zygote

INTERRUPTIONS = int(os.environ.get("SOAK", "5"))
SEED = int(os.environ.get("SEED", "0"))
LAYOUTS = [("zero1", 2), ("zero3", 2), ("zero2_offload", 2), ("pipeline2", 2), ("zero1", 1)]
PLACES = {  # how often a place is passed between two saves, at most
    "in a step": 5,
    "in an evaluation": 2,
    "before a save": 2,
    "inside a file": 3,
    "after a file": 3,
    "before the rename": 2,
    "after the rename": 2,
    "before retention": 2,
}
ENDLESS = ("optim.schedule=constant", "model.dropout=0.0", "ds.bf16.enabled=false")


@pytest.mark.slow
@pytest.mark.fault("interrupted at random, layout changed each time")
def test_a_run_survives_one_interruption_after_the_other(
    zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    draw, run = random.Random(SEED), RunFolder(tmp_path / "run")
    kills = 0
    for number in range(INTERRUPTIONS):
        json, ranks = draw.choice(LAYOUTS)
        place = draw.choice(list(PLACES))
        fault = {
            "rank": 0 if "file" not in place else draw.randrange(ranks),
            "at": place,
            "nth": draw.randint(1, PLACES[place]),
            "do": draw.choice(["kill", "kill", "term", "usr1"]),
        }
        words = arguments(run.path, data, *ENDLESS, "train.steps=100000", json=json)
        ended = zygote.run(words, tmp_path / f"attempt-{number}", fault, ranks)
        kills += fault["do"] == "kill"
        expected = -9 if fault["do"] == "kill" else 75
        assert ended.codes[fault["rank"]] == expected, f"{fault} {json}\n{ended.output}"
        assert None not in ended.codes, f"{fault} {json}: a rank hung\n{ended.output}"
    last = f"train.steps={max([*executed(run), 0]) + 2}"
    ended = zygote.run(arguments(run.path, data, *ENDLESS, last), tmp_path / "last")
    assert ended.codes == [0, 0], ended.output
    _compare_with_an_undisturbed_run(run, last, zygote, tmp_path, data)
    steps = executed(run)
    assert len(steps) - len(set(steps)) <= SAVE_EVERY * kills
    assert len(events(run, "resumed")) >= INTERRUPTIONS - kills  # signals always save
    check_tidy(run)


def _compare_with_an_undisturbed_run(
    run: RunFolder, last: str, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    whole = RunFolder(tmp_path / "whole")
    ended = zygote.run(arguments(whole.path, data, *ENDLESS, last), tmp_path / "whole-logs")
    assert ended.codes == [0, 0], ended.output
    pairs = zip(run.read_metrics(), whole.read_metrics(), strict=True)
    for line, expected in pairs:
        assert (line["step"], line["samples"]) == (expected["step"], expected["samples"])
        if "loss" in line:
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-6), line["step"]
            assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    shutil.rmtree(whole.path)
