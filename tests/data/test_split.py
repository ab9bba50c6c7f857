"""The train and held-out splits of documents, and the masks of their tokens."""

import random
from pathlib import Path

import numpy as np
import pytest

from harness.data.pair import NO_MASKS, IndexedTokens, Masks, MaskWriter, load_masks, write_indexed
from harness.data.split import SIDES, Split, load_split, stores_separator, write_splits
from harness.errors import ConfigError

EOS = 2


def indexed(folder: Path, documents: list[list[int]]) -> IndexedTokens:
    write_indexed(folder / "tokens", 1000, ((document, True) for document in documents))
    return IndexedTokens(folder / "tokens")


def split(
    folder: Path, tokens: IndexedTokens, held_out: float, masks: Masks = NO_MASKS
) -> tuple[Split, Split]:
    write_splits(folder, tokens, masks, held_out, add_separator=False)
    return load_split(folder, SIDES[0]), load_split(folder, SIDES[1])


def documents(side: Split) -> list[int]:
    return side.numbers[:-1].tolist()


def test_every_document_is_on_one_side(tmp_path: Path) -> None:
    tokens = indexed(tmp_path, [[n, n] for n in range(500)])
    train, held_out = split(tmp_path, tokens, 0.1)
    numbers = sorted([*documents(train), *documents(held_out)])
    assert numbers == list(range(500))
    assert 30 < held_out.num_documents < 70
    assert train.num_tokens + held_out.num_tokens == 1000
    assert (held_out.offsets == 2 * held_out.numbers)[:-1].all()


def test_held_out_choice_ignores_content_and_only_grows(tmp_path: Path) -> None:
    """A larger held-out share keeps the documents held out before, so results stay comparable."""
    tokens = indexed(tmp_path, [[n] * (1 + n % 7) for n in range(500)])
    small, large = (set(documents(split(tmp_path, tokens, f)[1])) for f in (0.05, 0.2))
    assert small < large
    (tmp_path / "other").mkdir()
    other = indexed(tmp_path / "other", [[1]] * 500)
    assert set(documents(split(tmp_path / "other", other, 0.05)[1])) == small


@pytest.mark.parametrize("documents", [2, 3, 10])
def test_each_side_has_a_document(tmp_path: Path, documents: int) -> None:
    tokens = indexed(tmp_path, [[n, EOS] for n in range(documents)])
    for held_out in (0.0, 1e-9, 0.5, 0.999999):
        sides = split(tmp_path, tokens, held_out)
        assert min(side.num_documents for side in sides) >= 1
        assert sum(side.num_documents for side in sides) == documents


def test_a_lone_document_is_cut(tmp_path: Path) -> None:
    tokens = indexed(tmp_path, [list(range(100))])
    masks = Masks(*np.array([[0, 0], [0, 85], [0, 85]]))
    train, evaluated = split(tmp_path, tokens, 0.2, masks=masks)
    assert (train.offsets[0], train.num_tokens) == (0, 80)
    assert (evaluated.offsets[0], evaluated.num_tokens) == (80, 20)
    assert (train.masked.tolist(), evaluated.masked.tolist()) == ([0, 80], [0, 5])
    assert split(tmp_path, tokens, 0.0)[1].num_tokens == 1


def test_stored_separators_are_found(tmp_path: Path) -> None:
    with_ends, without = [[1, EOS], [], [EOS], [3, 4, EOS]], [[1], [], [EOS, 5]]
    for name, documents, stored in (("with", with_ends, True), ("without", without, False)):
        (tmp_path / name).mkdir()
        tokens = indexed(tmp_path / name, documents)
        assert stores_separator(tokens, EOS) == stored
    (tmp_path / "mixed").mkdir()
    tokens = indexed(tmp_path / "mixed", [[1, EOS], [1], [], [4, EOS]])
    with pytest.raises(ConfigError, match=r"2 of 3 sampled .* \(id 2\), the others do not"):
        stores_separator(tokens, EOS)


@pytest.mark.parametrize("share", [0, 0.1, 0.9, 1])
def test_split_runs_hold_a_value_per_token(tmp_path: Path, share: float) -> None:
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
    bounds = np.arange(len(tokens) + 3)  # also beyond the last one
    assert masks.before(bounds).tolist() == [sum(tokens[:bound]) for bound in bounds]
    assert not NO_MASKS.at(places).any()
    assert not NO_MASKS.before(bounds).any()
    # Runs are maximal, and a document without any takes no space.
    changes = sum(a != b for a, b in zip([False, *tokens], [*tokens, False], strict=True))
    assert len(masks.starts) == 1 + changes // 2


def test_files_that_are_not_there_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.npy cannot be read .*will then be rebuilt"):
        load_split(tmp_path, "train")
    np.save(tmp_path / "masks.npy", np.zeros((3, 0), dtype=np.int64))  # without the first run
    contents = [(tmp_path / "masks.npy").read_bytes(), b"", b"\x93NUMPY\1\0v\0{'descr'", b"{}"]
    for content in contents:
        (tmp_path / "masks.npy").write_bytes(content)
        with pytest.raises(ConfigError, match=r"data.cache_dir: .*masks.npy cannot be read \("):
            load_masks(tmp_path / "masks.npy")
