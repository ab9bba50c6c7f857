"""Against a memory map, and on files that change under the reader."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from harness.data import fingerprint, token_files
from harness.data.fingerprint import first_outside, survey
from harness.data.token_files import TokenFile
from harness.errors import ConfigError

IDS = np.random.default_rng(0).integers(0, 60_000, 50_000, dtype=np.uint16)


def file_of(tmp_path: Path, ids: np.ndarray = IDS) -> TokenFile:
    path = tmp_path / "tokens.bin"
    path.write_bytes(ids.tobytes())
    return TokenFile(path, ids.dtype, ids.nbytes)


@pytest.mark.parametrize(
    "places",
    [
        [[5]],
        [[0, 1, 2], [49_997, 49_998, 49_999]],
        [[3, 4, 4, 5, 7, 8]],  # a separator that is not stored, and a document that is left out
        [[10, 11, 40_000, 40_001], [2, 3, 4, 5]],
        [[9, 8, 7, 0]],
    ],
)
def test_any_places_are_read(tmp_path: Path, places: list[list[int]]) -> None:
    wanted = np.array(places)
    ids = file_of(tmp_path).read(wanted)
    assert ids.dtype == np.int64
    assert ids.tolist() == IDS[wanted].tolist()


def test_random_places_are_read(tmp_path: Path) -> None:
    file, chooser = file_of(tmp_path), np.random.default_rng(1)
    for ascending in (True, False):
        places = chooser.integers(0, len(IDS), (4, 300))
        places = np.sort(places) if ascending else places
        assert (file.read(places) == IDS[places]).all()


@pytest.mark.parametrize("num_bytes", [0, 50_000, 200_000])
def test_a_file_that_changes_its_size_is_an_error_with_both_sizes(
    tmp_path: Path, num_bytes: int
) -> None:
    """Also where the place that is read is still there: all ranks end at the same step."""
    file = file_of(tmp_path)
    os.truncate(file.path, num_bytes)
    said = rf"tokens\.bin was changed .* it has {num_bytes} bytes, 100000 when it was opened"
    with pytest.raises(ConfigError, match=said):
        file.read(np.array([[1, 2, 3]]))


def test_a_file_that_is_cut_within_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path)
    monkeypatch.setattr(TokenFile, "_require_size", lambda self: None)  # looked just before
    os.truncate(file.path, 50_001)
    with pytest.raises(ConfigError, match=r"has no byte 50001"):
        file.read(np.array([[24_999, 25_000, 25_001]]))


def test_every_id_is_in_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "BLOCK_BYTES", 1 << 12)
    before = survey(file_of(tmp_path), 1, print)
    assert (before.lowest, before.highest) == (0, int(IDS.max()))
    for place in (0, 2048, 31_111, len(IDS) - 1):
        changed = IDS.copy()
        changed[place] ^= 1
        assert survey(file_of(tmp_path, changed), 1, print).digest != before.digest
    assert survey(file_of(tmp_path), None, print) == survey(file_of(tmp_path), 2, print) == before


def test_a_large_file_is_sampled_with_its_ends_and_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 10_000)
    monkeypatch.setattr(fingerprint, "SAMPLED_BYTES", 400)

    def digest(ids: np.ndarray = IDS, modified_ns: int | None = 1) -> str:
        return survey(file_of(tmp_path, ids), modified_ns, print).digest

    before = digest()
    assert digest() == before
    assert digest(modified_ns=2) != before
    for place in (0, 199, len(IDS) - 200, len(IDS) - 1):
        changed = IDS.copy()
        changed[place] ^= 1
        assert digest(changed) != before
    # Every stretch of a sixteenth holds blocks that are looked at; the files of ours are hashed.
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
