"""The training loss, and losses by source: sums of the samples' individual losses."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from harness.models.loss import LossSetup, forward
from harness.models.preferences import Pairs, Preferences
from harness.models.sequence import DividedRows
from harness.models.skeleton import hf_config
from harness.models.stage import counted_tokens
from harness.models.token_losses import recording, token_losses
from tests.engine.small import MODEL
from tests.tables import beside

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
SIZES = {"intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 4}
MIXTRAL = {**MODEL, "model_type": "mixtral", **SIZES, **BALANCED}


def test_token_and_balancing_loss_sum_as_in_transformers() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(MIXTRAL)).eval()
    ids = torch.randint(0, 64, (2, 9))
    theirs = model(input_ids=ids, labels=ids, use_cache=False).loss
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    token_loss, auxiliary = forward(model, ids, shifted)
    assert auxiliary is not None
    assert float(token_loss / 16 + auxiliary) == pytest.approx(float(theirs), rel=1e-5)


@pytest.mark.parametrize(("objective", "row"), beside(__file__, "loss.toml")["pairs"].items())
def test_pair_without_targets_on_a_side_does_not_count(objective: str, row: list[float]) -> None:
    tallies = torch.zeros(2, 7, dtype=torch.float64)
    losses = torch.tensor([1.0, 2.0, 4.0, 3.0, 5.0], requires_grad=True)
    pairs = Pairs(torch.tensor([[0, 0, 1, 2, 3]]), torch.tensor([[-2.0, -1.0], [0.0, 0.0]]))
    loss = Preferences(objective, 0.5, 0.3, 0.25, tallies)(
        losses, torch.tensor([[5, 6, 7, 8, -100]]), pairs
    )
    assert float(loss) == pytest.approx(row[0] + 0.25 * 1.5)
    loss.backward()
    assert losses.grad is not None
    assert losses.grad[3:].tolist() == [0.0, 0.0]
    assert tallies.tolist() == [[0.0] * 7, [1, 1, row[1] - row[2], *row[1:], -3, -4]]


def test_padding_is_not_balanced() -> None:
    """Experts are balanced as if the padding of data/packed_documents.py did not exist."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(MIXTRAL)).eval()
    ids, labels = torch.randint(0, 64, (1, 9)), torch.randint(0, 64, (1, 9))
    positions = torch.tensor([[0, 1, 2, 0, 1, 1, 2, 3, 4]])  # documents of 3 and 2, padding of 4
    padded = labels.clone()
    padded[:, 5:] = -100
    short_loss, short = forward(model, ids[:, :5], labels[:, :5], positions[:, :5])
    assert float(forward(model, ids, padded, positions)[1]) != pytest.approx(float(short), rel=1e-4)
    loss, auxiliary = forward(model, ids, padded, positions, LossSetup(gets_padding=True))
    assert float(loss) == pytest.approx(float(short_loss), rel=1e-5)
    assert float(auxiliary) == pytest.approx(float(short), rel=1e-5)
    whole = torch.tensor([[0, 1, 0, 1, 2, 0, 1, 2, 3]])
    assert counted_tokens(whole, True).all()
    assert counted_tokens(positions, True).tolist() == [[True] * 5 + [False] * 4]
    rows = DividedRows.__new__(DividedRows)
    rows._model, rows.group = model, mock.Mock(size=lambda: 3)
    both = counted_tokens(torch.cat([positions, whole]), True)
    with mock.patch("harness.models.sequence.balancing_of") as balancing, rows.balancing(both):
        counted = balancing.call_args.args[1]  # each rank's columns of all rows
    assert counted.flatten(1).int().tolist() == [[1] * 6, [1, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]]


def test_documents_do_not_see_each_other_where_positions_restart() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config({**MIXTRAL, "model_type": "llama"})).eval()
    ids = torch.randint(0, 64, (1, 8))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    labels = torch.randint(0, 64, (1, 8))
    together, _ = forward(model, ids, labels, positions)
    halves = (slice(0, 4), slice(4, 8))
    apart = sum(forward(model, ids[:, half], labels[:, half])[0] for half in halves)
    assert float(together) == pytest.approx(float(apart), rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_are_of_targets_alone_or_mix_in_all_tokens(smoothing: float) -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, :2] = -100
    chances, targets = logits.log_softmax(-1), nn.functional.one_hot(labels.clamp(min=0), 7)
    mixed = (1 - smoothing) * targets + smoothing / 7
    expected = -(mixed * chances).sum(-1) * (labels != -100)
    losses = token_losses(logits, labels, smoothing)
    assert torch.allclose(losses, expected.flatten(), rtol=1e-6)
    assert token_losses(logits.bfloat16(), labels).dtype == torch.float32


def test_sums_are_those_of_each_sources_samples() -> None:
    logits, labels = torch.randn(5, 7, 11), torch.randint(0, 11, (5, 7))
    labels[2, 3:] = -100
    sums, sources = torch.zeros(3, dtype=torch.float64), torch.tensor([2, 0, 2, 2, 0])
    with recording(sums, sources):
        loss = token_losses(logits, labels, 0.1)
        token_losses(logits, labels, 0.1)
    token_losses(logits, labels)  # is not recorded
    apart = loss.detach().view(5, 7).sum(1).tolist()
    expected = [2 * (apart[1] + apart[4]), 0, 2 * (apart[0] + apart[2] + apart[3])]
    assert sums.tolist() == pytest.approx(expected, rel=1e-6)


def test_nothing_is_recorded_without_sources_or_a_loss() -> None:
    sums = torch.zeros(2)
    for none in ((sums, None), (None, torch.zeros(1))):
        with recording(*none):
            token_losses(torch.randn(1, 1, 7), torch.zeros(1, 1, dtype=torch.int64))
    assert sums.tolist() == [0, 0]
    with recording(sums, torch.zeros(1, dtype=torch.int64)):
        pass
    assert sums.isnan().all()


@pytest.mark.parametrize(("smoothing", "fused"), [(0.0, True), (0.1, False)])
def test_liger_is_not_asked_for_a_smoothed_loss(smoothing: float, fused: bool) -> None:
    asked: dict[str, object] = {}

    class Model(torch.nn.Module):
        def forward(self, **keywords: object) -> SimpleNamespace:
            asked.update(keywords)
            return SimpleNamespace(logits=torch.zeros(1, 4, 8), loss=torch.zeros(()))

    ids = torch.zeros(1, 4, dtype=torch.int64)
    forward(Model(), ids, ids, setup=LossSetup(fuses_loss=True), smoothing=smoothing)
    assert ("shift_labels" in asked) == fused
