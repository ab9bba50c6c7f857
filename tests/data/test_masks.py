"""Against the plainest mask there is: a list with a value per token."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from harness.data.masks import NO_MASKS, Masks, MaskWriter, load_masks
from harness.errors import ConfigError


@pytest.mark.parametrize("share", [0, 0.1, 0.9, 1])
def test_runs_are_a_value_per_token(tmp_path: Path, share: float) -> None:
    chooser = random.Random(0)
    writer, tokens = MaskWriter(), []
    for _ in range(200):
        count, masked = chooser.choice([0, 1, 2, 9]), chooser.random() < share
        writer.add(count, masked=masked)
        tokens += [masked] * count
    writer.save(tmp_path / "masks.npy")
    masks = load_masks(tmp_path / "masks.npy")
    places = np.arange(len(tokens)).reshape(2, -1) if len(tokens) % 2 == 0 else np.arange(9)
    assert masks.at(places).ravel().tolist() == tokens[: places.size]
    bounds = np.arange(len(tokens) + 1)
    assert masks.before(bounds).tolist() == [sum(tokens[:bound]) for bound in bounds]
    # Runs are maximal, and a document without any takes no room.
    changes = sum(a != b for a, b in zip([False, *tokens], [*tokens, False], strict=True))
    assert len(masks.starts) == 1 + changes // 2


def test_nothing_is_masked_without_runs() -> None:
    assert not NO_MASKS.at(np.arange(5)).any()
    assert not NO_MASKS.before(np.arange(5)).any()


def test_a_file_without_the_first_run_is_damaged(tmp_path: Path) -> None:
    np.save(tmp_path / "masks.npy", np.zeros((3, 0), dtype=np.int64))
    with pytest.raises(ConfigError, match="which is then built again"):
        load_masks(tmp_path / "masks.npy")


def test_masks_are_plain_arrays() -> None:
    masks = Masks(*np.array([[0, 3, 9], [0, 5, 12], [0, 2, 5]]))
    assert masks.at(np.array([2, 3, 4, 5, 9, 11, 12])).tolist() == [0, 1, 1, 0, 1, 1, 0]
    assert masks.before(np.array([3, 4, 9, 11, 50])).tolist() == [0, 1, 2, 4, 5]
