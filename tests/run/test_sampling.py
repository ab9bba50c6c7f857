"""The short text that a run shows: when, how long, and where it ends."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from harness.run.sampling import continued
from harness.runfolder import RunFolder
from tests.two_ranks import REPOSITORY, SHORT_RUN, events
from tools.proofs.zygote import Zygote


def _counting(ids: torch.Tensor) -> torch.Tensor:
    """Logits that leave no choice: after 3 comes 4."""
    logits = torch.full((12,), -math.inf)
    logits[int(ids[0, -1]) + 1] = 0.0
    return logits.where(logits == 0.0, -1e9)


def _text(stops: set[int], tokens: int = 8, up_after: int = 99) -> list[int]:
    asked = itertools.count(1)
    return continued(_counting, [1], 10, stops, tokens, 4, 0, lambda: next(asked) >= up_after)


def test_a_sample_ends_at_its_length_at_a_stop_and_when_its_time_is_up() -> None:
    assert _text(set()) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert _text(set(), tokens=2) == [2, 3]
    assert _text({5}) == [2, 3, 4]
    assert _text(set(), up_after=3) == [2, 3, 4]


def test_a_model_that_is_ruined_says_nothing() -> None:
    nothing = torch.full((12,), math.nan)
    assert continued(lambda _: nothing, [1], 10, set(), 8, 4, 0, lambda: False) == []


@pytest.mark.slow
def test_given_weights_are_sampled_before_training_only_where_they_are_asked(
    zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    """Under ZeRO 3 each token gathers all weights: a start does not wait for an idle text."""

    def titles(name: str, *words: str) -> list[str]:
        run = RunFolder(tmp_path / name)
        arguments = [f"--deepspeed={REPOSITORY / 'ds_configs' / 'zero3.json'}", *SHORT_RUN, *data]
        arguments += ["sample.tokens=2", "train.steps=1", f"run.dir={run.path}", *words]
        ended = zygote.run(arguments, tmp_path / f"{name}-logs", ranks=2)
        assert ended.codes == [0, 0], ended.output
        return [event["title"] for event in events(run, "sample")]

    assert titles("first", "save.export=true") == ["sample"]
    weights = f"model.init_from={tmp_path / 'first' / 'export'}"
    assert titles("text", weights) == ["sample after training"]
    both = ["sample before training", "sample after training"]
    assert titles("asked", weights, "sample.prompt=the text") == both
