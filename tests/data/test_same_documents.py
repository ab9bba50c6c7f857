"""Whole documents are learned alike: packed behind a mask, padded or grouped by length."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch

from harness.config.curriculum import Slice
from harness.config.data_section import DataConfig
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.packing import IGNORED
from harness.data.spec import DataSpec
from harness.models.initialize import materialize
from harness.models.loss import forward
from harness.models.skeleton import hf_config, skeleton
from tests.engine.small import MODEL

SEQ_LEN = 32
WORDS = "the model reads a long question and answers it in a word or two".split()  # noqa: SIM905


def test_an_epoch_has_the_same_gradient(
    tmp_path: Path, write_jsonl: Callable[..., Path], tokenizer_dir: str
) -> None:
    """Documents beyond data.seq_len are among them, and rows with several documents."""
    draw = random.Random(0)
    lengths = [int(draw.lognormvariate(1.5, 0.9)) + 1 for _ in range(61)] + [70, 40]
    path = write_jsonl(*({"text": " ".join(draw.choices(WORDS, k=k))} for k in lengths))
    common = {"path": str(path), "seq_len": SEQ_LEN, "held_out": 0.0, "tokenizer": tokenizer_dir}

    def opened(**options: object) -> Data:
        folder = str(tmp_path / "cache")
        config = DataConfig.model_validate({**common, "cache_dir": folder, **options})
        return build_data(DataSpec(config, 0))

    packed = _learned(opened(packing="whole", document_mask=True), 1)
    for batching in ("padded", "length_grouped"):
        batched = _learned(opened(batching=batching), 2)
        assert batched[0] == packed[0]
        torch.testing.assert_close(batched[1], packed[1], rtol=1e-5, atol=1e-5)


def _learned(data: Data, micro_batch: int) -> tuple[int, torch.Tensor]:
    """Return the targets of an epoch and the gradient of the sum of their losses."""
    torch.manual_seed(0)
    stream = data.train
    model = skeleton(hf_config({**MODEL, "vocab_size": data.vocab_size}), torch.float32)
    materialize(model, 0, torch.device("cpu"))
    targets = 0
    for batch in stream.micro_batches(Slice(0, stream.samples), micro_batch, 0, 1):
        losses, *_ = forward(model, batch.input_ids, batch.labels, batch.position_ids)
        losses.sum().backward()
        targets += int((batch.labels != IGNORED).sum())
    return targets, torch.cat([p.grad.flatten() for p in model.parameters()])
