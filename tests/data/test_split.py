from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.data.indexed import IndexedTokens, write_indexed
from harness.data.masks import NO_MASKS, Masks
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


def test_the_choice_does_not_depend_on_the_content_and_only_grows(tmp_path: Path) -> None:
    """More held out keeps what was held out before: results stay comparable."""
    tokens = indexed(tmp_path, [[n] * (1 + n % 7) for n in range(500)])
    small, large = (set(documents(split(tmp_path, tokens, f)[1])) for f in (0.05, 0.2))
    assert small < large
    (tmp_path / "other").mkdir()
    other = indexed(tmp_path / "other", [[1]] * 500)
    assert set(documents(split(tmp_path / "other", other, 0.05)[1])) == small


@pytest.mark.parametrize("held_out", [0.0, 1e-9, 0.5, 0.999999])
@pytest.mark.parametrize("documents", [2, 3, 10])
def test_each_side_has_a_document(tmp_path: Path, documents: int, held_out: float) -> None:
    tokens = indexed(tmp_path, [[n, EOS] for n in range(documents)])
    train, evaluated = split(tmp_path, tokens, held_out)
    assert train.num_documents >= 1
    assert evaluated.num_documents >= 1
    assert train.num_documents + evaluated.num_documents == documents


def test_a_lone_document_is_cut(tmp_path: Path) -> None:
    tokens = indexed(tmp_path, [list(range(100))])
    train, evaluated = split(
        tmp_path, tokens, 0.2, masks=Masks(*np.array([[0, 0], [0, 85], [0, 85]]))
    )
    assert (train.offsets[0], train.num_tokens) == (0, 80)
    assert (evaluated.offsets[0], evaluated.num_tokens) == (80, 20)
    assert (train.masked.tolist(), evaluated.masked.tolist()) == ([0, 80], [0, 5])
    assert split(tmp_path, tokens, 0.0)[1].num_tokens == 1


def test_stored_separators_are_found(tmp_path: Path) -> None:
    for name, documents, stored in (
        ("with", [[1, EOS], [], [EOS], [3, 4, EOS]], True),
        ("without", [[1], [], [EOS, 5]], False),
    ):
        (tmp_path / name).mkdir()
        tokens = indexed(tmp_path / name, documents)
        assert stores_separator(tokens, EOS) == stored
    (tmp_path / "mixed").mkdir()
    tokens = indexed(tmp_path / "mixed", [[1, EOS], [1], [], [4, EOS]])
    with pytest.raises(ConfigError, match=r"2 of 3 documents .* \(id 2\), the others do not"):
        stores_separator(tokens, EOS)


def test_a_side_without_documents_would_be_seen(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.npy cannot be read .*which is then built again"):
        load_split(tmp_path, "train")
