"""Against the plainest packing there is: Python lists, joined and cut."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from harness.data.indexed import IndexedTokens, write_indexed
from harness.data.masks import NO_MASKS, Masks, MaskWriter, load_masks
from harness.data.packing import IGNORED, Packed
from harness.data.split import SIDES, Split, load_split, stores_separator, write_splits
from harness.errors import ConfigError

EOS = 2
SEQ_LEN = 8


@dataclass
class Case:
    documents: list[list[int]]
    masked: list[list[bool]]
    masks: Masks
    splits: dict[str, Split]
    tokens: IndexedTokens
    add_separator: bool

    def packed(self, side: str = "train", **changes: object) -> Packed:
        options = {
            "seq_len": SEQ_LEN,
            "eos_id": EOS,
            "vocab_size": 1000,
            "add_separator": self.add_separator,
        }
        return Packed(self.tokens.ids, self.splits[side], self.masks, **{**options, **changes})

    def stream(self, side: str = "train") -> tuple[list[int], list[bool], list[int], list[int]]:
        """Ids, whether masked, document number and offset in it, of every token of a side."""
        ids, masked, numbers, offsets = [], [], [], []
        for number in self.splits[side].numbers[:-1].tolist():
            with_eos = [*self.documents[number], EOS]
            ids += with_eos
            masked += [*self.masked[number], False]
            numbers += [number] * len(with_eos)
            offsets += range(len(with_eos))
        return ids, masked, numbers, offsets


def make(
    folder: Path, *, stored: bool = True, masked: bool = False, held_out: float = 0.3, seed: int = 0
) -> Case:
    """40 documents of 0 to 20 tokens, one in five of them empty."""
    chooser = random.Random(seed)
    documents = [
        [chooser.randrange(3, 1000) for _ in range(chooser.choice([0, 1, 5, 12, 20]))]
        for _ in range(40)
    ]
    if not stored:
        documents = [document or [7] for document in documents]
    write_indexed(folder / "tokens", 1000, ((d + [EOS] * stored, True) for d in documents))
    # Any token may be masked: runs of every length, at the start, inside and at the end.
    hidden = [[masked and chooser.random() < 0.5 for _ in document] for document in documents]
    masks = masks_of(folder, hidden)
    tokens = IndexedTokens(folder / "tokens")
    assert stores_separator(tokens, EOS) == stored
    write_splits(folder, tokens, masks, held_out, add_separator=not stored)
    splits = {side: load_split(folder, side) for side in SIDES}
    return Case(documents, hidden, masks, splits, tokens, not stored)


def masks_of(folder: Path, documents: list[list[bool]]) -> Masks:
    """Masks of documents, each with a separator, which is never masked."""
    writer = MaskWriter()
    for masked in documents:
        for token in masked:
            writer.add(1, masked=token)
        writer.add(1, masked=False)
    writer.save(folder / "masks.npy")
    return load_masks(folder / "masks.npy")


@pytest.mark.parametrize(("stored", "masked"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("side", SIDES)
def test_windows_are_the_joined_documents_cut(
    tmp_path: Path, stored: bool, masked: bool, side: str
) -> None:
    case = make(tmp_path, stored=stored, masked=masked)
    ids, hidden, numbers, offsets = case.stream(side)
    packed = case.packed(side)
    assert packed.num_windows == (len(ids) - 1) // SEQ_LEN >= 8
    assert packed.split.num_tokens == len(ids)
    shown = packed.read(np.arange(packed.num_windows))
    for window in range(packed.num_windows):
        here = range(window * SEQ_LEN, (window + 1) * SEQ_LEN)
        assert shown.ids[window].tolist() == [ids[i] for i in here]
        assert shown.labels[window].tolist() == [
            IGNORED if hidden[i + 1] else ids[i + 1] for i in here
        ]
        seen = [
            (span.document, offset)
            for span in packed.spans(window)
            for offset in range(span.first, span.last)
        ]
        assert seen == [(numbers[i], offsets[i]) for i in range(here.start, here.stop + 1)]
        restart = [
            offsets[i] - (offsets[here[0]] if numbers[i] == numbers[here[0]] else 0) for i in here
        ]
        assert shown.positions[window].tolist() == restart


def test_every_token_but_the_first_is_a_target_once(tmp_path: Path) -> None:
    case = make(tmp_path)
    ids, *_ = case.stream()
    packed = case.packed()
    labels = packed.read(np.arange(packed.num_windows)).labels
    assert labels.ravel().tolist() == ids[1 : 1 + packed.num_windows * SEQ_LEN]
    assert len(ids) - 1 - labels.size < SEQ_LEN


def test_targets_are_counted_without_reading(tmp_path: Path) -> None:
    case = make(tmp_path, masked=True)
    packed = case.packed()
    windows = np.arange(packed.num_windows)
    labels = packed.read(windows).labels
    counts = [packed.targets(windows[i : i + 1]) for i in range(len(windows))]
    assert counts == (labels != IGNORED).sum(axis=1).tolist()
    assert packed.targets(windows) == (labels != IGNORED).sum()
    assert len(set(counts)) > 3


def test_a_window_may_have_no_target(tmp_path: Path) -> None:
    write_indexed(tmp_path / "tokens", 1000, [([*range(3, 43), EOS], True)] * 2)
    tokens = IndexedTokens(tmp_path / "tokens")
    masks = masks_of(tmp_path, [[True] * 40] * 2)
    write_splits(tmp_path, tokens, masks, 0.5, add_separator=False)
    packed = Case([], [], masks, {"train": load_split(tmp_path, "train")}, tokens, False).packed()
    assert packed.targets(np.array([0])) == 0
    assert (packed.read(np.array([0])).labels == IGNORED).all()
    assert packed.targets(np.arange(packed.num_windows)) == 1


@pytest.mark.parametrize("stored", [True, False])
def test_the_end_of_a_document_is_always_a_target(tmp_path: Path, stored: bool) -> None:
    case = make(tmp_path, masked=stored, stored=stored)
    packed = case.packed(seq_len=1)
    labels = packed.read(np.arange(packed.num_windows)).labels.ravel()
    assert (labels == EOS).sum() == case.splits["train"].num_documents


@pytest.mark.parametrize("stored", [True, False])
def test_ids_outside_the_vocabulary_are_named(tmp_path: Path, stored: bool) -> None:
    case = make(tmp_path, stored=stored)
    worst = max(max(case.documents[n], default=0) for n in case.splits["train"].numbers[:-1])
    case.packed(vocab_size=worst + 1).read(np.arange(5))
    packed = case.packed(vocab_size=worst)
    document, offset = next(
        (n, case.documents[n].index(worst))
        for n in case.splits["train"].numbers[:-1]
        if worst in case.documents[n]
    )
    with pytest.raises(
        ConfigError,
        match=rf"document {document} has token id {worst} at offset {offset}, .* of {worst} ",
    ):
        packed.read(np.arange(packed.num_windows))


def test_negative_ids_are_named(tmp_path: Path) -> None:
    write_indexed(tmp_path / "tokens", 100_000, [([5, 6, -1, 7] * 5 + [EOS], True)] * 3)
    tokens = IndexedTokens(tmp_path / "tokens")
    write_splits(tmp_path, tokens, NO_MASKS, 0.3, add_separator=False)
    splits = {"train": load_split(tmp_path, "train")}
    packed = Case([], [], NO_MASKS, splits, tokens, False).packed()
    with pytest.raises(ConfigError, match="token id -1 at offset 2"):
        packed.read(np.array([0]))
