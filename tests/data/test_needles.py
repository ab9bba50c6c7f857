"""eval.needle_lengths: texts contain the answer to their question at the stated depth."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.config.data_section import DataConfig
from harness.config.run_file import load_run_config
from harness.data.batch import Batch
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.needles import DEPTHS, NEEDLE_TEXTS, needles
from harness.data.packing import IGNORED
from harness.data.spec import DataSpec
from harness.engine.api import ByGroup
from harness.layout.grid import Grid, Share
from harness.run.evaluation import evaluate_needles

LENGTH = 160


@pytest.fixture(scope="module")
def built(data: list[str]) -> Data:
    words = dict(word.removeprefix("data.").split("=") for word in data)
    return build_data(DataSpec(DataConfig(seq_len=32, **words)))


def answer_in(ids: list[int], asked: list[int], length: int) -> list[int]:
    """Return the ids after the first occurrence of the question: all that retrieval needs."""
    places = range(len(ids) - len(asked) - length)
    at = next(place for place in places if ids[place : place + len(asked)] == asked)
    return ids[at + len(asked) : at + len(asked) + length]


def test_a_text_holds_its_answer_at_its_depth(built: Data) -> None:
    batch = needles(built.held_out, built.tokenizer, LENGTH, 0, len(DEPTHS))
    assert batch.input_ids.shape == batch.labels.shape == (len(DEPTHS), LENGTH)
    asked, end = (
        built.tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in ("\nThe number of", ".\n")
    )
    rows = zip(batch.input_ids.tolist(), batch.labels.tolist(), DEPTHS, strict=True)
    for ids, labels, depth in rows:
        needle, question = (at for at in range(LENGTH) if ids[at : at + len(asked)] == asked)
        answered = [label for label in labels if label != IGNORED]
        around = question - (LENGTH + 1 - question) - len(end)  # without needle and question
        assert needle == around * depth // 100
        text = built.tokenizer.decode([*ids, labels[-1]])
        key, number = text.rpartition("The number of ")[2].split(" is ")
        assert f"The number of {key} is {number}.\n" in text
        assert built.tokenizer.decode(answered).strip() == number


def test_texts_are_a_function_of_their_number(built: Data) -> None:
    whole = needles(built.held_out, built.tokenizer, LENGTH, 0, 8)
    part = needles(built.held_out, built.tokenizer, LENGTH, 6, 2)
    assert torch.equal(whole.input_ids[6:], part.input_ids)
    assert len({tuple(row) for row in whole.input_ids.tolist()}) == 8
    beyond = needles(built.held_out, built.tokenizer, LENGTH, NEEDLE_TEXTS - 1, 2)
    assert (beyond.labels[1] == IGNORED).all()
    assert (beyond.labels[0] != IGNORED).any()


class Planted:
    """An engine whose model has a chosen loss for each target of a text."""

    def __init__(self, nats: Callable[[list[int], int], list[float]]) -> None:
        self.device, self._nats = torch.device("cpu"), nats

    def eval_batch(self, batches: list[Batch], by_group: ByGroup) -> torch.Tensor:
        for batch in batches:
            buckets = by_group.of(batch)
            for row, labels in enumerate(batch.labels.tolist()):
                wanted = [label for label in labels if label != IGNORED]
                if not wanted:
                    continue
                ids = [*batch.input_ids[row].tolist(), labels[-1]]
                for nats in self._nats(ids, len(wanted)):
                    by_group.sums[buckets[row, 0]] += torch.tensor([nats, 1.0])
        return torch.zeros(2, dtype=torch.float64)


def probabilities(built: Data, nats: Callable[[list[int], int], list[float]]) -> Any:
    config = load_run_config(None, [f"eval.needle_lengths=[{LENGTH}, 256]", "data.seq_len=160"])
    run = SimpleNamespace(
        plan=SimpleNamespace(
            config=config, grid=Grid(1), share=Share(Grid(1), 0), micro_batch=3, seq_len=160
        ),
        data=built,
        engine=Planted(nats),
        state=SimpleNamespace(step=1),
        meter=SimpleNamespace(restart=lambda: None),
        pulse=lambda *_: None,
        stop_asked=lambda: (False, False),
        sum=lambda values, over: values.tolist(),
    )
    return evaluate_needles(run)  # type: ignore[arg-type]


def test_needle_score_is_one_if_found_and_chance_otherwise(built: Data) -> None:
    asked = len(built.tokenizer("\nThe number of abcdef is", add_special_tokens=False)["input_ids"])

    def finds(ids: list[int], length: int) -> list[float]:
        question = ids[-length - asked // 2 : -length]  # with the key, which occurs once before
        right = answer_in(ids, question, length) == ids[-length:]
        return [0.0 if right else 9.0] * length

    perfect = probabilities(built, finds)
    assert perfect == {f"needle/{LENGTH}": [1.0] * 5, "needle/256": [1.0] * 5}
    chance = probabilities(built, lambda ids, length: [math.log(512)] * length)
    assert chance["needle/256"] == pytest.approx([1 / 512] * 5)
