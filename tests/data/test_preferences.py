"""Windows of preference pairs: both sides of each in one window, apart from each other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.data.batch import Batch
from tests.data.chat_tokenizers import tokenizer_of
from tests.data.conftest import Opened
from tests.run.features import write_lines


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Return 40 pairs, of which every tenth is long, and one row that is none."""
    long = "a word or two " * 12
    pairs = [
        {"prompt": f"question {n}?", "chosen": "a" * (1 + n % 7), "rejected": long * (n % 10 == 0)}
        for n in range(40)
    ]
    filled = [{**pair, "rejected": pair["rejected"] or "b"} for pair in pairs]
    return write_lines(tmp_path / "pairs.jsonl", [*filled, {"prompt": "alone", "chosen": "a"}])


def learned(batch: Batch, row: int, segment: int) -> str:
    """Return the targets of a side as text."""
    own = (batch.segments[row] == segment) & (batch.labels[row] != -100)  # type: ignore[index]
    return str(tokenizer_of("chatml").decode(batch.labels[row][own].tolist()))


@pytest.mark.parametrize("batching", ["packed", "length_grouped"])
def test_sides_of_a_pair_stand_together_and_apart(
    batching: str, opened: Opened, rows: Path, chatml_dir: str
) -> None:
    ways: dict[str, Any] = {"too_long": "drop", "bad_rows": "skip", "batching": batching}
    ways |= {"document_mask": True, "pool_samples": 16, "group_samples": 4}
    data = opened(rows, tokenizer=chatml_dir, seq_len=128, preferences="dpo", **ways)
    assert "4 of 40 pairs (10.0%) are longer" in " ".join(data.warnings())
    assert "data.columns.rejected=NAME" in " ".join(data.summary())  # of the row that is none
    batch = data.train.batch(0, min(8, data.train.samples))
    assert batch.segments is not None
    assert batch.reference is not None
    pairs = len(batch.reference)
    assert batch.num_pairs == pairs == data.train.targets_in(0, len(batch.labels))
    assert batch.reference.isnan().all()  # until it is computed
    for row, segments in enumerate(batch.segments):
        for segment in segments[segments >= 0].unique().tolist():
            at = torch.nonzero(segments == segment)[:, 0]
            assert batch.position_ids[row][at].tolist() == [*range(len(at))]  # type: ignore[index]
            assert batch.labels[row][at[-1]] == -100
            assert set(learned(batch, row, segment).partition("<")[0]) == {"ab"[segment % 2]}
    assert data.held_out.samples > 0
    assert pairs % 2 == 0 or batching == "packed"


def test_pairs_of_a_mix_keep_their_reference(opened: Opened, rows: Path, chatml_dir: str) -> None:
    other = rows.with_name("other.jsonl")
    other.write_bytes(rows.read_bytes())
    mix = [{"path": str(path), "share": 0.5} for path in (rows, other)]
    ways: dict[str, Any] = {"too_long": "drop", "bad_rows": "skip", "document_mask": True}
    data = opened(None, tokenizer=chatml_dir, seq_len=128, preferences="dpo", mix=mix, **ways)
    for number, stream in enumerate(data.train.streams):
        rows_of = np.arange(stream.packed.split.num_documents, dtype=float)
        stream.packed.reference = np.stack([1000 * number + rows_of, -rows_of], 1)
    batch = data.train.batch(0, 6)
    assert sorted({*batch.sources.tolist()}) == [0, 1]
    for row, source in enumerate(batch.sources.tolist()):
        own = batch.segments[row][batch.segments[row] >= 0].unique() // 2
        assert {float(value) // 1000 for value in batch.reference[own, 0]} == {float(source)}
