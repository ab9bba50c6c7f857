"""Samples as contiguous streams, against one list of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.config.curriculum import Curriculum
from harness.config.data_section import DataConfig
from harness.data.build import build_data
from harness.data.contiguous import Contiguous
from harness.data.spec import DataSpec
from harness.errors import ConfigError
from tests.data.test_packing import SEQ_LEN, make

ROWS = 3


@pytest.mark.parametrize("stored", [True, False])
def test_each_row_reads_on_where_it_stopped(stored: bool, tmp_path: Path) -> None:
    case = make(tmp_path, stored=stored)
    packed, (ids, _, _, offsets) = case.packed(), case.stream()
    stream = Contiguous(packed, ROWS)
    length = packed.num_windows // ROWS
    assert length > 2
    assert stream.samples == ROWS * length
    begun = 0
    for step in range(2 * length):  # two epochs
        batch = stream.batch(step * ROWS, ROWS)
        assert batch.windows is not None
        assert batch.goes_on is not None
        for row in range(ROWS):
            window = row * length + step % length
            begin = window * SEQ_LEN
            assert batch.windows[row] == window
            assert batch.input_ids[row].tolist() == ids[begin : begin + SEQ_LEN]
            assert batch.labels[row].tolist() == ids[begin + 1 : begin + 1 + SEQ_LEN]
            assert bool(batch.goes_on[row]) == (offsets[begin] > 0)
            begun += offsets[begin] == 0
    assert 0 < begun < 2 * length * ROWS


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 2), (2, 3), (3, 1), (1, 6)])
def test_a_row_stays_on_its_rank_and_in_its_micro_batch(
    ranks: int, micro_batch: int, tmp_path: Path
) -> None:
    stream = Contiguous(make(tmp_path).packed(), 6)
    for rank in range(ranks):
        data = (stream.micro_batches(of, micro_batch, rank, ranks) for of in Curriculum(6).walk(0))
        before = next(data)
        for _ in range(1, stream.samples // 6):
            now = next(data)
            for one, other in zip(before, now, strict=True):
                assert one.windows is not None
                assert torch.equal(one.windows + 1, other.windows)
            before = now


def test_windows_of_any_samples(tmp_path: Path) -> None:
    stream = Contiguous(make(tmp_path).packed(), 2)
    whole = stream.batch(0, stream.samples).windows
    assert whole is not None
    assert sorted(whole.tolist()) == list(range(stream.samples))
    assert stream.targets_of(np.arange(stream.samples)) == stream.samples * SEQ_LEN


def test_data_that_cannot_be_streams_is_refused(tmp_path: Path, tokenizer_dir: str) -> None:
    path = tmp_path / "pairs.jsonl"
    pair = {"prompt": "what is it? ", "completion": "a word, or two of them"}
    path.write_text("\n".join([json.dumps(pair)] * 40))
    options = {"tokenizer": tokenizer_dir, "cache_dir": str(tmp_path)}
    config = DataConfig(path=str(path), seq_len=16, held_out=0.2, **options)
    with pytest.raises(ConfigError, match="but samples hold whole documents"):
        build_data(DataSpec(config, rows=2))
    streams = config.model_copy(update={"packing": "stream", "document_mask": False})
    with pytest.raises(ConfigError, match=r"samples are no 9999 streams of text \(train.global"):
        build_data(DataSpec(streams, rows=9999))
    assert isinstance(build_data(DataSpec(streams, rows=2)).train, Contiguous)
