"""Measurements beside the loss, in the real engine on two ranks: attention, loss by position
and the weights' change equal direct computations with plain transformers and whole weights.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional

from harness.models.attention_sums import COVERED
from harness.models.initialize import materialize
from harness.models.skeleton import hf_config, skeleton
from tests.engine.results import Result, results_of
from tests.engine.small import MODEL, SEQ_LEN, VOCAB_SIZE
from tests.two_ranks import run_ranks

pytestmark = pytest.mark.slow

LAYOUTS = "zero0 zero1 zero3 pipeline tensor documents varlen eager chunked".split()  # noqa: SIM905
BUCKETS, FIRST = 5, 7
SHARP = {**MODEL, "initializer_range": 0.3}  # attention that is far from even


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("seeing")
    (folder / "config.json").write_text(json.dumps(SHARP))
    command = [sys.executable, "-m", "tests.engine.seeing_checks", folder]
    return results_of(run_ranks(command, folder), folder)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of tests/engine/rank.py."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 24, (8, SEQ_LEN + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:].clone()


def direct(documents: bool) -> tuple[list[list[float]], list[list[float]]]:
    """(layers, 2) mean entropy and coverage; (buckets, 2) loss and targets, of plain transformers
    with eager attention and a mask that is written out.
    """
    model = skeleton(hf_config(SHARP), torch.float32, "eager")
    materialize(model, 0, torch.device("cpu"))
    ids, labels = tokens()
    place = torch.arange(SEQ_LEN)
    seen = place <= place[:, None]
    positions = place
    if documents:
        seen &= (place >= FIRST) == (place >= FIRST)[:, None]
        positions = torch.where(place < FIRST, place, place - FIRST)
        labels[:, FIRST - 1] = -100
    mask = torch.zeros(SEQ_LEN, SEQ_LEN).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        outputs = model.eval()(
            input_ids=ids,
            position_ids=positions.expand_as(ids),
            attention_mask=mask.expand(8, 1, -1, -1),
            output_attentions=True,
            use_cache=False,
        )
    of_layers = []
    for weights in outputs.attentions:  # (samples, heads, queries, tokens)
        own = weights[::2].double()  # the first sample of each micro-batch
        entropies, coverages = [], []
        for sample in own:
            for head in sample:
                for query, attention in enumerate(head):
                    entropies.append(float(torch.special.entr(attention).sum()))
                    total, needed = 0.0, 0
                    for weight in sorted(attention.tolist(), reverse=True):
                        needed += 1
                        total += weight
                        if total >= COVERED:
                            break
                    coverages.append(needed / int(seen[query].sum()))
        count = len(entropies)
        of_layers.append([sum(entropies) / count, sum(coverages) / count])
    losses = functional.cross_entropy(
        outputs.logits.view(-1, VOCAB_SIZE), labels.flatten(), reduction="none"
    ).view_as(labels)
    buckets = [[0.0, 0.0] for _ in range(BUCKETS)]
    for loss, label in zip(losses, labels, strict=True):
        for at in range(SEQ_LEN):
            if label[at] != -100:
                bucket = buckets[int(positions[at]) * BUCKETS // SEQ_LEN]
                bucket[0] += float(loss[at])
                bucket[1] += 1
    return of_layers, buckets


@pytest.fixture(scope="module")
def expected() -> dict[bool, Any]:
    return {documents: direct(documents) for documents in (False, True)}


def of(measured: Result, layout: str) -> list[dict[str, Any]]:
    return [rank[layout] for rank in measured("seen_in_all_layouts")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_entropy_and_coverage_are_those_of_eager_attention(
    layout: str, measured: Result, expected: dict[bool, Any]
) -> None:
    layers, _ = expected[layout in ("documents", "varlen")]
    assert len({round(entropy, 3) for entropy, _ in layers}) == MODEL["num_hidden_layers"]
    for rank in of(measured, layout):
        means = [[row[0] / row[2], row[1] / row[2]] for row in rank["attention"]]
        assert torch.tensor(means) == pytest.approx(torch.tensor(layers), rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_by_position_is_that_of_each_token(
    layout: str, measured: Result, expected: dict[bool, Any]
) -> None:
    _, buckets = expected[layout in ("documents", "varlen")]
    for rank in of(measured, layout):
        loss, targets, *by_position = rank["sums"]
        assert by_position == pytest.approx([n for bucket in buckets for n in bucket], rel=1e-4)
        assert sum(by_position[::2]) == pytest.approx(loss, rel=1e-6)
        assert sum(by_position[1::2]) == targets


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_are_longer_than_those_trained_on_are_told_apart(
    layout: str, measured: Result
) -> None:
    model = skeleton(hf_config(SHARP), torch.float32, "eager")
    materialize(model, 0, torch.device("cpu"))
    ids, labels = (tensor.reshape(4, 2 * SEQ_LEN) for tensor in tokens())
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits[:, -5:]
    losses = functional.cross_entropy(logits.transpose(1, 2), labels[:, -5:], reduction="none")
    of_depth = [ids[:, 0] % 2 == depth for depth in (0, 1)]
    expected = [[float(losses[rows].sum()), 5 * int(rows.sum())] for rows in of_depth]
    assert all(targets for _, targets in expected)
    for rank in of(measured, layout):
        for sums, (loss, targets) in zip(rank["longer"], expected, strict=True):
            assert sums == pytest.approx([loss, targets], rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_and_change_of_the_weights_are_those_of_whole_ones(
    layout: str, measured: Result
) -> None:
    for rank in of(measured, layout):
        assert rank["weights"]["param_norm"] == pytest.approx(rank["param_norm"], rel=1e-5)
        assert rank["weights"]["update_ratio"] == pytest.approx(rank["update_ratio"], rel=1e-3)
        assert 1e-3 < rank["update_ratio"] < 1
