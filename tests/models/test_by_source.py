"""Losses by source: the sums of the samples' own losses."""

from __future__ import annotations

import pytest
import torch

from harness.models.by_source import is_recording, recording
from harness.models.loss import token_losses


def test_sums_are_those_of_each_sources_samples() -> None:
    logits, labels = torch.randn(5, 7, 11, requires_grad=True), torch.randint(0, 11, (5, 7))
    labels[2, 3:] = -100
    sums, sources = torch.zeros(3, dtype=torch.float64), torch.tensor([2, 0, 2, 2, 0])
    with recording(sums, sources):
        loss = token_losses(logits, labels, 0.1)
        token_losses(logits, labels, 0.1)
    assert not is_recording()
    apart = [float(token_losses(logits[n : n + 1], labels[n : n + 1], 0.1)) for n in range(5)]
    expected = [2 * (apart[1] + apart[4]), 0, 2 * (apart[0] + apart[2] + apart[3])]
    assert sums.tolist() == pytest.approx(expected, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    (plain,) = torch.autograd.grad(token_losses(logits, labels, 0.1), logits)
    assert torch.allclose(gradient, plain)


def test_nothing_is_recorded_without_sources() -> None:
    sums = torch.zeros(2)
    with recording(sums, None):
        assert not is_recording()
    with recording(None, torch.zeros(1)):
        assert not is_recording()
    assert sums.tolist() == [0, 0]


def test_a_loss_that_records_nothing_is_no_number() -> None:
    sums = torch.zeros(2)
    with recording(sums, torch.zeros(1, dtype=torch.int64)):
        pass
    assert sums.isnan().all()
