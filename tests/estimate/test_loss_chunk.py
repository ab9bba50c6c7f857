"""Predicted bytes of the loss in chunks against those of the real head and loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from harness.estimate.activations import activations, saved_for_backward
from harness.estimate.inputs import Inputs
from harness.models.logits import operations_on_logits
from harness.models.skeleton import DTYPES, hf_config, skeleton
from harness.models.vocabulary_loss import Vocabulary
from tests.estimate.test_activations import FAMILIES, inputs_of, saved_bytes
from tests.models.head_alone import HeadAlone, Peak
from tests.tiers import rest_in_gate

VOCAB, CHUNK = 5000, 1024


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def chunked(family: str, precision: str) -> Inputs:
    config = {**FAMILIES[family], "vocab_size": VOCAB}
    return replace(inputs_of(config, precision, "eager", "none", False), loss_chunk=CHUNK)


def predicted(run: Inputs, phase: str) -> int:
    parts = activations(run)
    return sum(p.bytes for p in parts if p.component == "logits and loss" and phase in p.phases)


def most(head: HeadAlone, trains: bool) -> int:
    with Peak() as peak:
        head.run(trains)
    return peak.most


def head_of(run: Inputs, family: str) -> HeadAlone:
    dtype = DTYPES[run.precision]
    operations = operations_on_logits(skeleton(hf_config(FAMILIES[family]), dtype, "eager"))
    sizes = (run.tokens, run.shape.hidden_size, run.shape.vocab_size)
    return HeadAlone(*sizes, CHUNK, dtype=dtype, operations=operations)


@pytest.mark.parametrize("precision", rest_in_gate("memory", ["bf16", "fp32"]))
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_peaks_in_training_and_evaluation(family: str, precision: str) -> None:
    run = chunked(family, precision)
    head = head_of(run, family)
    assert most(head, True) == pytest.approx(predicted(run, "loss"), rel=0.01)
    assert most(head, False) == pytest.approx(predicted(run, "evaluation"), rel=0.01)


def test_peaks_of_a_part_of_the_vocabulary(alone: dist.ProcessGroup) -> None:
    run = replace(chunked("llama", "bf16"), divides_vocabulary=True)
    head = head_of(run, "llama")
    head.model.vocabulary = Vocabulary(0, VOCAB, 2 * VOCAB, alone)
    assert most(head, True) == pytest.approx(predicted(run, "loss"), rel=0.01)
    assert most(head, False) == pytest.approx(predicted(run, "evaluation"), rel=0.01)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("precision", rest_in_gate("memory", ["fp32", "bf16"]))
def test_what_is_saved_of_the_real_model(family: str, precision: str) -> None:
    run, way = chunked(family, precision), (precision, "eager", "none", False)
    config = {**FAMILIES[family], "vocab_size": VOCAB}
    saved = saved_bytes(config, *way, chunk=CHUNK)
    assert saved == pytest.approx(saved_for_backward(run), rel=0.01)
    assert saved < saved_bytes(config, *way)
