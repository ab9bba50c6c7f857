"""DeepSpeed's own reader and writer of the format are the oracle, in both directions."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
)

from harness.data.pair import IndexedTokens, write_indexed
from harness.errors import ConfigError

DOCUMENTS = [[5, 6, 7], [1], [], [8191, 0, 3, 4]]


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, vocab_size: int = 8192) -> Path:
    write_indexed(prefix, vocab_size, ((document, True) for document in documents))
    return prefix


def read(prefix: Path) -> list[list[int]]:
    tokens = IndexedTokens(prefix)
    starts = tokens.document_starts()
    return [tokens.ids.block(a, b - a).tolist() for a, b in itertools.pairwise(starts.tolist())]


@pytest.mark.parametrize(("vocab_size", "width"), [(8192, 2), (65_499, 2), (65_500, 4)])
def test_deepspeed_reads_what_we_write(tmp_path: Path, vocab_size: int, width: int) -> None:
    documents = [*DOCUMENTS, [vocab_size - 1]]
    prefix = write(tmp_path / "ours", documents, vocab_size)
    theirs = MMapIndexedDataset(str(prefix), skip_warmup=True)
    assert [theirs[i].tolist() for i in range(len(theirs))] == documents
    assert theirs.doc_idx.tolist() == [0, 1, 2, 3, 4, 5]
    assert np.dtype(theirs.dtype).itemsize == width
    assert read(prefix) == documents


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_we_read_what_deepspeed_writes(tmp_path: Path, dtype: type) -> None:
    """Two sequences in the second document, none in the third."""
    prefix = tmp_path / "theirs"
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in ([[1, 2, 3]], [[4], [5, 6]], [], [[7] * 9]):
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    assert read(prefix) == [[1, 2, 3], [4, 5, 6], [], [7] * 9]


def test_code_8_is_uint16_as_in_megatron_lm(tmp_path: Path) -> None:
    prefix = write(tmp_path / "ours")
    idx = bytearray(Path(f"{prefix}.idx").read_bytes())
    assert idx[17] == 6
    idx[17] = 8
    Path(f"{prefix}.idx").write_bytes(idx)
    assert read(prefix) == DOCUMENTS


def test_a_document_of_several_sequences(tmp_path: Path) -> None:
    """Sizes are int32 and memory is finite: a long document is written piece by piece."""
    sequences = [([1], True), ([1, 2, 3], False), ([], False), ([4], True), ([8], True)]
    write_indexed(tmp_path / "ours", 8192, sequences)
    theirs = MMapIndexedDataset(str(tmp_path / "ours"), skip_warmup=True)
    assert theirs.doc_idx.tolist() == [0, 1, 4, 5]
    assert read(tmp_path / "ours") == [[1], [1, 2, 3, 4], [8]]


def damage(path: Path, how: str) -> None:
    raw = path.read_bytes()
    edits = {
        "cut": raw[:-3],
        "longer": raw + b"12345",
        "empty": b"",
        "header cut": raw[:20],
        "magic": b"NOTINDEX!" + raw[9:],
        "version": raw[:9] + struct.pack("<Q", 2) + raw[17:],
        "type": raw[:17] + b"\x63" + raw[18:],
        "no documents": raw[:18] + struct.pack("<QQ", 0, 1) + raw[34:],
        "more sequences": raw[:18] + struct.pack("<Q", 7) + raw[26:],
        "offset": raw[:58] + struct.pack("<q", 4) + raw[66:],
        "negative size": raw[:38] + struct.pack("<i", -1) + raw[42:],
        "documents": raw[:-8] + struct.pack("<q", 3),
        "disordered": raw[:-24] + struct.pack("<qqq", 3, 1, 4),
    }
    path.write_bytes(edits[how])


@pytest.mark.parametrize(
    ("suffix", "how", "said"),
    [
        ("bin", "cut", "truncated: 13 bytes, where ours.idx describes 16"),
        ("bin", "longer", "too long: 21 bytes, where ours.idx describes 16"),
        ("bin", "empty", "truncated: 0 bytes"),
        ("idx", "cut", "truncated: 119 bytes, where ours.idx describes 122"),
        ("idx", "longer", "too long: 127 bytes"),
        ("idx", "empty", "truncated: 0 bytes"),
        ("idx", "header cut", "truncated: 20 bytes, its header has 34"),
        ("idx", "magic", "begins with b'NOTINDEX!"),
        ("idx", "version", "no Megatron index: .* version 1"),
        ("idx", "type", "a type from 1 to 8"),
        ("idx", "no documents", "empty: it describes no sequence"),
        ("idx", "more sequences", "truncated: 122 bytes, where ours.idx describes 158"),
        ("idx", "offset", "sequence 1 has 1 tokens at byte 4"),
        ("idx", "negative size", "sequence 1 has -1 tokens"),
        ("idx", "documents", "from sequence 0 to 3 of 4"),
        ("idx", "disordered", "out of order"),
    ],
)
def test_damage_is_named_with_the_sizes(tmp_path: Path, suffix: str, how: str, said: str) -> None:
    prefix = write(tmp_path / "ours")
    damage(Path(f"{prefix}.{suffix}"), how)
    with pytest.raises(ConfigError, match=said):
        read(prefix)


@pytest.mark.parametrize(("code", "width"), [(6, 4), (7, 8), (8, 8), (4, 2)])
def test_ids_of_another_width_than_the_index_says(tmp_path: Path, code: int, width: int) -> None:
    """Floats are type 6 and 7 in Megatron-LM and gpt-neox."""
    prefix = write(tmp_path / "ours")
    idx = bytearray(Path(f"{prefix}.idx").read_bytes())
    idx[17] = code
    offsets = np.frombuffer(bytes(idx[50:82]), "<i8") // 2 * width
    idx[50:82] = offsets.tobytes()
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(bytes(8 * width))
    with pytest.raises(ConfigError, match=rf"{width} bytes a token, but type {code} .* as int32"):
        read(prefix)


def test_documents_that_were_never_ended(tmp_path: Path) -> None:
    write_indexed(tmp_path / "ours", 8192, [([1, 2], False)] * 60)
    with pytest.raises(
        ConfigError, match=r"60 sequences and the end of no document: .*end_document"
    ):
        IndexedTokens(tmp_path / "ours")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.bin"):
        IndexedTokens(tmp_path / "gone")
