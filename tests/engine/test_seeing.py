"""Attention, loss by position and weight changes, compared with plain transformers."""

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch.nn import functional

from harness.data.batch import Batch
from harness.data.needles import Needles
from harness.models.attention_sums import COVERED
from harness.run import meter
from harness.run.attention import attention_sums
from harness.run.evaluation import by_context
from harness.run.meter import WeightChange
from harness.steps import Step
from tests.engine.engines import all_batches, cells, engine_of, share_of, written
from tests.engine.small import MODEL, SEQ_LEN
from tests.models.small import built
from tests.ranks import ranks
from tests.tables import beside

BUCKETS, FIRST = 5, 7  # buckets that do not divide the length; tokens of the first document
DOCUMENTS = torch.cat([torch.arange(FIRST), torch.arange(SEQ_LEN - FIRST)])
SHARP = {**MODEL, "initializer_range": 0.3}  # attention that is far from uniform
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = beside(__file__, "seeing.toml")


def step(number: int) -> Step:
    return cast(Step, SimpleNamespace(number=number))


def plain_model() -> Any:
    return built(SHARP, attention="eager").eval()


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of the global batch."""
    batches = all_batches()
    return torch.cat([b.input_ids for b in batches]), torch.cat([b.labels for b in batches])


def direct(documents: bool) -> tuple[list[list[float]], list[list[float]]]:
    """Return each layer's attention and each bucket's loss, by plain eager transformers."""
    ids, labels = tokens()
    place = torch.arange(SEQ_LEN)
    seen, positions = place <= place[:, None], place
    if documents:
        seen &= (place >= FIRST) == (place >= FIRST)[:, None]
        positions = torch.where(place < FIRST, place, place - FIRST)
        labels[:, FIRST - 1] = -100
    mask = torch.zeros(SEQ_LEN, SEQ_LEN).masked_fill(~seen, torch.finfo(torch.float32).min)
    inputs = {"input_ids": ids, "position_ids": positions.expand_as(ids)}
    inputs |= {"attention_mask": mask.expand(8, 1, -1, -1)}
    with torch.no_grad():
        outputs = plain_model()(**inputs, output_attentions=True, use_cache=False)
    layers = [mean_of_layer(weights[::2].double(), seen) for weights in outputs.attentions]
    logits = outputs.logits.transpose(1, 2)
    losses = functional.cross_entropy(logits, labels, reduction="none")
    counted, bucket = labels != -100, (positions * BUCKETS // SEQ_LEN).expand_as(labels)
    of_bucket = [counted & (bucket == number) for number in range(BUCKETS)]
    return layers, [[float(losses[own].sum()), float(own.sum())] for own in of_bucket]


def mean_of_layer(weights: torch.Tensor, seen: torch.Tensor) -> list[float]:
    """Return mean entropy and coverage of attention (samples, heads, queries, tokens)."""
    entropy = torch.special.entr(weights).sum(-1)
    totals = weights.sort(-1, descending=True).values.cumsum(-1)
    needed = 1 + (totals < COVERED).sum(-1)  # tokens, the heaviest first
    return [float(entropy.mean()), float((needed / seen.sum(-1)).mean())]


@pytest.fixture(scope="module")
def by_documents() -> dict[bool, Any]:
    return {documents: direct(documents) for documents in (False, True)}


def rows_of_documents(batches: list[Batch]) -> list[Batch]:
    """Return the micro-batches with each row as two documents; no target at the boundary."""
    result = []
    for batch in batches:
        labels = batch.labels.clone()
        labels[:, FIRST - 1] = -100
        result.append(Batch(batch.input_ids, labels, DOCUMENTS.expand(2, -1).clone()))
    return result


def needles(batches: list[Batch]) -> list[Batch]:
    """Return pairs of rows as one whose last 5 tokens are targets; odd ones are deeper."""
    result = []
    for batch in batches:
        ids, labels = batch.input_ids.reshape(1, -1), batch.labels.reshape(1, -1).clone()
        labels[:, :-5] = -100
        result.append(Needles(ids, labels, None, depths=ids[:, 0] % 2))
    return result


def expected_needles() -> list[list[float]]:
    """Return the loss and the number of targets at each depth."""
    ids, labels = (tensor.reshape(4, 2 * SEQ_LEN) for tensor in tokens())
    with torch.no_grad():
        logits = plain_model()(input_ids=ids, use_cache=False).logits[:, -5:]
    losses = functional.cross_entropy(logits.transpose(1, 2), labels[:, -5:], reduction="none")
    rows_by_depth = [ids[:, 0] % 2 == depth for depth in (0, 1)]
    return [[float(losses[rows].sum()), 5 * int(rows.sum())] for rows in rows_by_depth]


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors.values()]).norm())


@pytest.mark.parametrize("layout", cells(LAYOUTS, ("pipeline",)))
@ranks(2)
def test_measurements_are_those_of_transformers(layout: str, by_documents: dict[bool, Any]) -> None:
    ds, settings = LAYOUTS[layout]
    engine = engine_of(ds, model={"name": written("sharp", SHARP), **settings})
    own, targets = share_of(engine)
    documents = layout in ("documents", "varlen")
    layers, buckets = by_documents[documents]
    batches = rows_of_documents(own) if documents else own

    # The loss by position comes from each token.
    by_position = torch.zeros(BUCKETS, 2, dtype=torch.float64)
    sums = torch.cat(
        [engine.eval_batch(batches, by_context(engine.plan, by_position)), by_position.flatten()]
    )
    loss, count, *by_bucket = engine.sum_over_ranks(sums).tolist()
    assert by_bucket == pytest.approx([n for bucket in buckets for n in bucket], rel=1e-4)
    assert sum(by_bucket[::2]) == pytest.approx(loss, rel=1e-6)
    assert sum(by_bucket[1::2]) == count

    # Rows longer than the training rows are distinguished by depth.
    longer = torch.zeros(2, 2, dtype=torch.float64)
    engine.eval_batch(needles(own), by_context(engine.plan, longer))
    expected = expected_needles()
    assert all(targets for _, targets in expected)
    for measured, wanted in zip(engine.sum_over_ranks(longer).tolist(), expected, strict=True):
        assert measured == pytest.approx(wanted, rel=1e-4)

    # Entropy and coverage equal those of eager attention.
    first = torch.tensor([True, False])  # of two samples in each micro-batch
    attention = attention_sums(engine, [(batch, first) for batch in batches])
    means = [[row[0] / row[2], row[1] / row[2]] for row in attention.tolist()]
    assert len({round(entropy, 3) for entropy, _ in layers}) == MODEL["num_hidden_layers"]
    assert torch.tensor(means) == pytest.approx(torch.tensor(layers), rel=1e-4)

    # Norm and change of the weights equal those of whole weights.
    before = dict(engine.masters())
    change, sampled = WeightChange(engine), WeightChange(engine)
    change.before(step(10))
    with mock.patch.object(meter, "SAMPLED", 1000):  # of more weights on each rank
        sampled.before(step(10))
    engine.train_batch(batches, targets, 1e-2)
    taken = {name: float(value) for name, value in change.values(step(10)).items()}
    with mock.patch.object(meter, "SAMPLED", 1000):
        of_some = float(sampled.values(step(10))["update_ratio"])
    after = dict(engine.masters())
    assert change.values(step(11)) == {}
    ratio = norm({n: after[n] - before[n] for n in after}) / norm(before)
    assert taken["param_norm"] == pytest.approx(norm(after), rel=1e-5)
    assert taken["update_ratio"] == pytest.approx(ratio, rel=1e-3)
    assert of_some == pytest.approx(ratio, rel=0.3)
    assert 1e-3 < ratio < 1
