"""Token ids on disk, against DeepSpeed's reader and writer and a memory map; changing files."""

import itertools
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
)

from harness.data import prepare, token_files
from harness.data.pair import IndexedTokens, write_indexed
from harness.data.prepare import first_outside, survey
from harness.data.token_files import TokenFile
from harness.errors import ConfigError
from tests.tables import beside

DOCUMENTS = [[5, 6, 7], [1], [], [8191, 0, 3, 4]]


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, vocab_size: int = 8192) -> Path:
    write_indexed(prefix, vocab_size, ((document, True) for document in documents))
    return prefix


def read(prefix: Path) -> list[list[int]]:
    tokens = IndexedTokens(prefix)
    (starts,) = tokens.starts()
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
    """The second document has two sequences, the third none."""
    prefix = tmp_path / "theirs"
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in ([[1, 2, 3]], [[4], [5, 6]], [], [[7] * 9]):
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    assert read(prefix) == [[1, 2, 3], [4, 5, 6], [], [7] * 9]


def test_indexed_dtype_code_8_is_uint16_as_in_megatron_lm(tmp_path: Path) -> None:
    prefix = write(tmp_path / "ours")
    idx = bytearray(Path(f"{prefix}.idx").read_bytes())
    assert idx[17] == 6
    idx[17] = 8
    Path(f"{prefix}.idx").write_bytes(idx)
    assert read(prefix) == DOCUMENTS


def test_a_document_of_several_sequences(tmp_path: Path) -> None:
    """Sizes are int32 and memory is limited: a long document is written in pieces."""
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


@pytest.mark.parametrize(("suffix", "how", "said"), beside(__file__, "indexed.toml")["damages"])
def test_damage_is_named_with_the_sizes(tmp_path: Path, suffix: str, how: str, said: str) -> None:
    prefix = write(tmp_path / "ours")
    damage(Path(f"{prefix}.{suffix}"), how)
    with pytest.raises(ConfigError, match=said):
        read(prefix)


@pytest.mark.parametrize(("code", "width"), [(6, 4), (7, 8), (8, 8), (4, 2)])
def test_ids_of_another_width_than_the_index_says(tmp_path: Path, code: int, width: int) -> None:
    """Types 6 and 7 are floats in Megatron-LM and gpt-neox."""
    prefix = write(tmp_path / "ours")
    idx = bytearray(Path(f"{prefix}.idx").read_bytes())
    idx[17] = code
    offsets = np.frombuffer(bytes(idx[50:82]), "<i8") // 2 * width
    idx[50:82] = offsets.tobytes()
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(bytes(8 * width))
    with pytest.raises(ConfigError, match=rf"{width} bytes per token, but type {code} .* as int32"):
        read(prefix)


def test_documents_that_were_never_ended(tmp_path: Path) -> None:
    write_indexed(tmp_path / "ours", 8192, [([1, 2], False)] * 60)
    with pytest.raises(ConfigError, match=r"60 sequences, but no document ends: .*end_document"):
        IndexedTokens(tmp_path / "ours")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.bin"):
        IndexedTokens(tmp_path / "gone")


IDS = np.random.default_rng(0).integers(0, 60_000, 50_000, dtype=np.uint16)
ANYWHERE = np.random.default_rng(1).integers(0, len(IDS), (4, 300))


def file_of(tmp_path: Path, ids: np.ndarray = IDS) -> TokenFile:
    path = tmp_path / "tokens.bin"
    path.write_bytes(ids.tobytes())
    return TokenFile(path, ids.dtype, ids.nbytes)


@pytest.mark.parametrize(
    "places",
    [
        [[5]],
        [[0, 1, 2], [49_997, 49_998, 49_999]],
        [[3, 4, 4, 5, 7, 8]],  # a separator that is not stored, and a skipped document
        [[10, 11, 40_000, 40_001], [2, 3, 4, 5]],
        [[9, 8, 7, 0]],
        ANYWHERE,
        np.sort(ANYWHERE),
    ],
)
def test_indexed_tokens_are_read_at_any_offsets(tmp_path: Path, places: list[list[int]]) -> None:
    wanted = np.array(places)
    ids = file_of(tmp_path).read(wanted)
    assert ids.dtype == np.int64
    assert ids.tolist() == IDS[wanted].tolist()


@pytest.mark.parametrize("num_bytes", [0, 50_000, 200_000])
def test_indexed_file_of_changed_size_names_both_sizes(tmp_path: Path, num_bytes: int) -> None:
    """Even if the position to read still exists, so that all ranks end at the same step."""
    file = file_of(tmp_path)
    os.truncate(file.path, num_bytes)
    said = rf"tokens\.bin changed .* it has {num_bytes} bytes, but had 100000 when it was opened"
    with pytest.raises(ConfigError, match=said):
        file.read(np.array([[1, 2, 3]]))


def test_a_file_that_is_cut_within_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path)
    os.truncate(file.path, 50_001)
    with pytest.raises(ConfigError, match="it has 50001 bytes, but had 100000"):
        file.block(24_999, 3)
    monkeypatch.setattr(TokenFile, "_require_size", lambda self: None)  # checked just before
    with pytest.raises(ConfigError, match=r"has no byte 50001"):
        file.read(np.array([[24_999, 25_000, 25_001]]))


def test_indexed_digest_covers_every_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "BLOCK_BYTES", 1 << 12)
    before = survey(file_of(tmp_path), 1, print)
    assert (before.lowest, before.highest) == (0, int(IDS.max()))
    for place in (0, 2048, 31_111, len(IDS) - 1):
        changed = IDS.copy()
        changed[place] ^= 1
        assert survey(file_of(tmp_path, changed), 1, print).digest != before.digest
    assert survey(file_of(tmp_path), None, print) == survey(file_of(tmp_path), 2, print) == before


def test_large_file_is_sampled_in_one_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "WHOLE_BYTES", 10_000)
    monkeypatch.setattr(prepare, "SAMPLED_BYTES", 400)

    def digest(ids: np.ndarray = IDS, modified_ns: int | None = 1) -> str:
        return survey(file_of(tmp_path, ids), modified_ns, print).digest

    before = digest()
    assert digest() == before
    assert digest(modified_ns=2) != before
    for place in (0, 199, len(IDS) - 200, len(IDS) - 1):
        changed = IDS.copy()
        changed[place] ^= 1
        assert digest(changed) != before
    # Every sixteenth contains blocks that are checked; our own files are hashed.
    for part in range(16):
        changed = IDS.copy()
        changed[part * len(IDS) // 16 : (part + 1) * len(IDS) // 16] ^= 1
        assert digest(changed) != before
    assert digest(modified_ns=None) != before


def test_the_first_id_outside_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "BLOCK_BYTES", 1 << 12)
    ids = np.zeros(9000, np.int32)
    assert first_outside(file_of(tmp_path, ids), 100) is None
    ids[[4000, 8000]] = (-1, 100)
    assert first_outside(file_of(tmp_path, ids), 100) == (4000, -1)
