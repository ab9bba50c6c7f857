"""One run, interrupted at random, resumes in random layouts. SOAK=200: how often; SEED=..."""

import contextlib
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.launch.fork_server import Zygote
from harness.runfolder import RunFolder
from tests.faults.conftest import check_tidy
from tests.faults.soak import KINDS, PLACES, REFERENCE, Happened, Story, drawn, metrics_lines
from tools.made_with import versions

TIMES = 5  # as between layouts in the checkpoint gate
LAST_PLACE = 2.0**-23  # of fp32
QUANTITIES = ("loss", "grad_norm", "eval_loss")
Line = dict[str, Any]


@dataclass(frozen=True)
class Apart:
    """The step at which a quantity comes closest to its bound, or exceeds it most."""

    quantity: str
    difference: float
    allowed: float
    step: int

    @property
    def share(self) -> float:
        """Difference relative to the bound."""
        return self.difference / self.allowed


def apart(run: RunFolder, undisturbed: dict[str, RunFolder]) -> list[Apart]:
    """Return, for each quantity, the step closest to its bound; violations are NaN or above 1.

    The bound at a step is TIMES the largest difference, up to that step, between the undisturbed
    runs of all layouts and the reference's, or the last place of fp32.
    """
    worst = []
    for name in QUANTITIES:
        curve, reference = _curve(run, name), _curve(undisturbed[REFERENCE], name)
        assert curve.keys() == reference.keys(), f"{name}: {curve.keys() ^ reference.keys()}"
        curves = [_curve(run_, name) for run_ in undisturbed.values()]
        spread, steps = 0.0, []
        for step, expected in reference.items():
            spread = max(spread, *(_relative(each[step], expected) for each in curves))
            allowed = TIMES * max(spread, LAST_PLACE)
            steps.append(Apart(name, _relative(curve[step], expected), allowed, step))
        worst.append(max(steps, key=lambda at: math.inf if math.isnan(at.share) else at.share))
    return worst


def redone(run: RunFolder, happened: list[Happened]) -> tuple[int, list[int]]:
    """Return the number of steps repeated in the same layout from the same state, and the list of
    those that differ in any bit.

    Two attempts have the same state at a step if they began from the same checkpoint, or if one
    began from a checkpoint that the other saved.
    """
    lines = [line for line in metrics_lines(run) if "loss" in line]
    done: list[tuple[Happened, dict[int, Line]]] = []
    count, differ = 0, []
    for latest in happened:
        mine = dict(zip(latest.steps, lines[latest.before :], strict=False))
        for earlier, theirs in done:
            same = latest.start and latest.start in (earlier.start, *earlier.made)
            if not same or latest.attempt.layout != earlier.attempt.layout:
                continue
            for step in mine.keys() & theirs.keys():
                pair = mine[step], theirs[step]
                if not all(isinstance(line["loss"], float) for line in pair):
                    continue  # NaN was planted
                count += 1
                if any(pair[0][name] != pair[1][name] for name in ("loss", "grad_norm")):
                    differ.append(step)
        done.append((latest, mine))
    return count, differ


def table(story: Story, steps: int, worst: list[Apart], again: int) -> str:
    """Return what happened; `steps` is the number that the run needs."""
    repeated = len(story.executed()) - steps
    kinds = {}
    for kind in KINDS:
        attempts = [happened for happened in story.happened if happened.attempt.kind == kind]
        codes = Counter(str(code) for happened in attempts for code in happened.codes)
        kinds[kind] = f"{len(attempts)} times, ended with {dict(codes.most_common())}"
    lines = [
        f"{len(story.happened)} interruptions, {steps} steps: {repeated} were done again,",
        f"{again} of them in the same layout from the same state, equal to the last bit",
        *(f"{kind}: {ends}" for kind, ends in kinds.items()),
        *(f"{each}, {each.share:.0%} of what is allowed" for each in worst),
        f"seed {story.seed}; fp32; {versions()}",
    ]
    return "\n".join(lines)


def _curve(run: RunFolder, name: str) -> dict[int, float]:
    return {m["step"]: m[name] for m in run.read_metrics() if m.get(name) is not None}


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


INTERRUPTIONS = int(os.environ.get("SOAK", "5"))
SEED = int(os.environ.get("SEED", "0"))


@pytest.mark.gate("faults")
def test_a_run_survives_many_interruptions(zygote: Zygote, tmp_path, data: list[str]) -> None:
    with contextlib.closing(Story(tmp_path, SEED, zygote, data)) as story:
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
        print(table(story, steps, worst, again))


def test_a_story_is_a_function_of_its_seed() -> None:
    """It has attempts of every kind, at every place, from the first one on."""
    disk = Path("/disk")
    story = [drawn(0, number, disk) for number in range(1000)]
    assert story[500:510] == [drawn(0, number, disk) for number in range(500, 510)]
    assert story != [drawn(1, number, disk) for number in range(1000)]
    assert {attempt.fault.get("at") for attempt in story} >= set(PLACES)
    assert len({attempt.layout for attempt in story}) == 12
    assert {attempt.kind for attempt in story} == {*KINDS}
    assert len(KINDS) == 11
    assert "full disk" not in {drawn(0, number, None).kind for number in range(200)}
