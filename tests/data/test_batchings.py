"""Invariants that every batching keeps, checked against documents as plain lists."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.config.batch import Curriculum, Slice
from harness.data.batch import Batch
from harness.data.batches import Contiguous, HeldOutText, Stream, share_of_rank
from harness.data.packed_documents import TooLong
from harness.data.packing import IGNORED
from harness.data.padded import Padded, Pools
from tests.data import batchings
from tests.data.batchings import BATCHINGS, DOCUMENTS, PROPERTY, ROWS, SEQ_LEN, Corpus, Documents

every_batching = pytest.mark.parametrize("name", BATCHINGS)
TENSORS = ("input_ids", "labels", "position_ids", "sources", "windows", "goes_on")
# Ranks, samples per micro-batch, and micro-batches per rank.
LAYOUTS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
Layout = tuple[int, int, int]
Row = tuple[tuple[int, int], ...]


def corpus_of(folders: Iterator[Path], documents: Documents) -> Corpus:
    """Write documents that give both splits samples in every batching."""
    corpus = Corpus(next(folders), documents)
    for side in ("train", "held_out"):
        packed = corpus.packed(side)
        assume(packed.num_windows >= ROWS)
        assume(_has_whole_windows(packed.split.numbers[:-1].tolist(), documents))
    return corpus


def _has_whole_windows(numbers: list[int], documents: Documents) -> bool:
    tokens = ((n, at) for n in numbers for at in range(1, min(SEQ_LEN, len(documents.ids[n]))))
    return any(map(documents.is_learned, tokens))


def assert_same(ours: Batch, theirs: Batch, names: tuple[str, ...] = TENSORS) -> None:
    for name in names:
        own, other = getattr(ours, name), getattr(theirs, name)
        assert own is other is None or torch.equal(own, other), name


def rows(batch: Batch) -> list[Row]:
    """Return the (token, target) pairs of each row, without padding."""
    pairs = zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True)
    return [_unpadded([*zip(ids, labels, strict=True)]) for ids, labels in pairs]


def _unpadded(row: list[tuple[int, int]]) -> Row:
    while row and row[-1] == (batchings.EOS, IGNORED):
        row.pop()
    return tuple(row)


def learned_in(stream: Stream, index: int, documents: Documents) -> list[batchings.Token]:
    """Compare a sample with its documents; return the tokens learned in it."""
    sample = stream.sample(index)
    batch = sample.batch
    ids = batch.input_ids[0].tolist()
    parts = [(span.document, at) for span in sample.spans for at in range(span.first, span.last)]
    starts = np.cumsum([0, *(span.last - span.first for span in sample.spans)]).tolist()
    assert [span.column for span in sample.spans] == starts[:-1]
    assert ids[: len(parts)] == [documents.ids[n][at] for n, at in parts][:SEQ_LEN]
    # A packed window ends with the target of its last position.
    is_whole = len(parts) <= SEQ_LEN
    targets = {
        column - 1: token
        for column, token in enumerate(parts)
        if (token[1] if is_whole else column) and documents.is_learned(token)
    }
    labels = [IGNORED] * len(ids)
    for column, (number, place) in targets.items():
        labels[column] = documents.ids[number][place]
    assert batch.labels[0].tolist() == labels
    assert stream.targets_in(index, 1) == len(targets)
    assert stream.lengths(np.array([index])).tolist() == [min(len(parts), SEQ_LEN)]
    if batch.position_ids is not None:
        within = [at for span in sample.spans for at in range(span.last - span.first)][:SEQ_LEN]
        padding = range(1, len(ids) - len(within) + 1)
        assert batch.position_ids[0].tolist() == [*within, *padding]
    whole = [(documents.ids[s.document], documents.masked[s.document]) for s in sample.spans]
    kept = [
        (ids[span.first : span.last], masked[span.first : span.last])
        for span, (ids, masked) in zip(sample.spans, whole, strict=True)
    ]
    assert [(a.tolist(), (~b).tolist()) for a, b in stream.documents_of(index)] == kept
    return [*targets.values()]


@every_batching
@PROPERTY
@given(documents=DOCUMENTS)
def test_targets_are_learned_once(name: str, documents: Documents, folders: Iterator[Path]) -> None:
    stream = BATCHINGS[name](corpus_of(folders, documents))
    expected = Counter(batchings.tokens_learned(stream, documents))
    assert set(expected.values()) == {1}
    samples = stream.samples
    assert expected == Counter(
        token for index in range(samples) for token in learned_in(stream, index, documents)
    )
    epochs = [stream.batch(first, samples) for first in (0, samples)]
    assert sorted(rows(epochs[1])) == sorted(rows(epochs[0]))
    assert [stream.targets_in(first, samples) for first in (0, samples)] == [len(expected)] * 2
    assert [stream.sample(index).epoch for index in (0, samples - 1, samples)] == [0, 0, 1]


@every_batching
@PROPERTY
@given(documents=DOCUMENTS, first=st.integers(0, 60), count=st.integers(1, 12))
def test_a_sample_is_a_function_of_its_index(
    name: str, documents: Documents, first: int, count: int, folders: Iterator[Path]
) -> None:
    corpus = corpus_of(folders, documents)
    batch = BATCHINGS[name](corpus).batch(first, count)
    for tensor in (batch.input_ids, batch.labels):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    again = BATCHINGS[name](corpus)
    targets = np.zeros(1 + int(0 if batch.sources is None else batch.sources.max()), dtype=int)
    for row in reversed(range(count)):
        alone = again.batch(first + row, 1)
        width = alone.input_ids.shape[1]
        for tensor in TENSORS[:3]:
            whole, own = getattr(batch, tensor), getattr(alone, tensor)
            assert whole is own is None or torch.equal(whole[row : row + 1, :width], own)
        assert (batch.labels[row, width:] == IGNORED).all()
        source = 0 if batch.sources is None else int(batch.sources[row])
        sample = again.sample(first + row)
        assert sample.source == source
        assert_same(sample.batch, alone, TENSORS[:3])
        targets[source] += int((alone.labels != IGNORED).sum())
    if batch.sources is not None:
        by_source = again.targets_by_source(first + np.arange(count))
        assert by_source[: len(targets)] == targets.tolist()
    assert again.targets_in(first, count) == targets.sum()


@every_batching
@PROPERTY
@given(documents=DOCUMENTS, first=st.integers(0, 60), layout=LAYOUTS)
def test_ranks_share_a_step_without_overlap(
    name: str, documents: Documents, first: int, layout: Layout, folders: Iterator[Path]
) -> None:
    stream = BATCHINGS[name](corpus_of(folders, documents))
    (ranks, micro, accumulation), global_batch = layout, int(np.prod(layout))
    step = Slice(first, global_batch)
    of_ranks = [stream.step_data(step, micro, rank, ranks) for rank in range(ranks)]
    assert len({len(data.batches) for data in of_ranks}) == 1
    assert len(of_ranks[0].batches) <= accumulation
    rounds = zip(*(data.batches for data in of_ranks), strict=True)
    batches = [batch for of_round in rounds for batch in of_round]
    shared = [row for batch in batches for row in rows(batch)]
    whole = stream.batch(first, global_batch)
    if isinstance(stream, Padded) and stream.pools:  # a step is sorted before it is divided
        assert sorted(shared) == sorted(rows(whole))
        widths = [batch.input_ids.shape[1] for batch in batches]
        assert widths == sorted(widths, reverse=True)  # the longest documents first
    else:
        assert shared == rows(whole)
        assert {len(batch.labels) for batch in batches} == {micro}
    positions = sum(batch.input_ids.numel() for batch in batches)
    assert all(batch.input_ids.numel() <= micro * SEQ_LEN for batch in batches)
    tokens = stream.tokens_in(first, global_batch)
    assert {(data.tokens, data.positions) for data in of_ranks} == {(tokens, positions)}
    learned = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
    assert learned == stream.targets_in(first, global_batch)


@every_batching
@PROPERTY
@given(documents=DOCUMENTS, layout=LAYOUTS, rank=st.integers(0, 3), done=st.integers(0, 4))
def test_a_run_that_resumes_reads_the_rest(
    name: str, documents: Documents, layout: Layout, rank: int, done: int, folders: Iterator[Path]
) -> None:
    corpus, (ranks, micro, _) = corpus_of(folders, documents), layout
    how = {"curriculum": Curriculum(int(np.prod(layout))), "micro_batch": micro}
    how |= {"data_rank": rank % ranks, "data_ranks": ranks}
    undisturbed = BATCHINGS[name](corpus).steps(0, **how)
    resumed = BATCHINGS[name](corpus).steps(done * int(np.prod(layout)), **how)
    for ours, theirs in zip(itertools.islice(undisturbed, done, done + 2), resumed, strict=False):
        assert (ours.tokens, ours.positions) == (theirs.tokens, theirs.positions)
        for one, other in zip(ours.batches, theirs.batches, strict=True):
            assert_same(one, other)
    undisturbed.close()
    resumed.close()


@settings(PROPERTY, max_examples=30)
@given(documents=DOCUMENTS, alone=st.booleans(), too_long=st.sampled_from(["cut", "drop"]))
def test_documents_without_a_target_or_too_long_are_in_no_sample(
    documents: Documents, alone: bool, too_long: TooLong, folders: Iterator[Path]
) -> None:
    corpus = corpus_of(folders, documents)
    numbers = corpus.packed().split.numbers[:-1].tolist()
    if too_long == "drop":
        numbers = [number for number in numbers if len(documents.ids[number]) <= SEQ_LEN]
    learned = [number for number in numbers if _has_whole_windows([number], documents)]
    assume(learned)
    stream = corpus.whole(too_long=too_long, alone=alone)
    samples = [stream.sample(index) for index in range(stream.samples)]
    assert sorted(span.document for sample in samples for span in sample.spans) == learned


@every_batching
def test_the_seed_changes_the_order(name: str, folders: Iterator[Path]) -> None:
    documents = Documents.drawn([12] * 40, 0)
    corpora = [Corpus(next(folders), documents, seed) for seed in (0, 0, 1)]
    first, again, other = (BATCHINGS[name](corpus) for corpus in corpora)
    read = [[stream.sample(index).spans for index in range(20)] for stream in (first, again, other)]
    assert read[0] == read[1]
    assert (read[0] == read[2]) == (name == "contiguous")


@pytest.mark.parametrize("document_mask", [True, False])
@PROPERTY
@given(documents=DOCUMENTS, pieces=st.sampled_from([1, 2, 4]), first=st.integers(0, 30))
def test_a_sample_that_is_cut_is_what_shorter_samples_are(
    document_mask: bool, documents: Documents, pieces: int, first: int, folders: Iterator[Path]
) -> None:
    """Positions too, in documents that begin inside a piece or before it."""
    packed = corpus_of(folders, documents).packed()
    long = Stream(packed, 0, "f", document_mask=document_mask)
    (cut,) = long.micro_batches(Slice(first, 3, pieces), 3, 0, 1)
    short = packed.of_length(SEQ_LEN // pieces)
    windows = [long.sample(first + row).window * pieces for row in range(3)]
    read = short.read(np.add.outer(windows, np.arange(pieces)).ravel())
    assert cut.input_ids.tolist() == read.ids.tolist()
    assert cut.labels.tolist() == read.labels.tolist()
    assert (cut.position_ids is not None) == document_mask
    assert long.of_length(SEQ_LEN // pieces).document_mask == document_mask
    if cut.position_ids is not None:
        assert cut.position_ids.tolist() == read.positions.tolist()


def test_batch_share_of_a_rank_is_as_documented() -> None:
    assert share_of_rank(100, 12, 2, 1, 3).tolist() == [[102, 103], [108, 109]]
    with pytest.raises(AssertionError, match="global_batch 10 is not a multiple of 3 ranks x 2"):
        share_of_rank(0, 10, 2, 0, 3)


@PROPERTY
@given(documents=DOCUMENTS)
def test_rows_of_contiguous_streams_read_on(documents: Documents, folders: Iterator[Path]) -> None:
    corpus = corpus_of(folders, documents)
    stream = Contiguous(corpus.packed(), ROWS)
    length = stream.samples // ROWS
    assert length == corpus.packed().num_windows // ROWS
    for step in range(2 * length):  # two epochs
        batch = stream.batch(step * ROWS, ROWS)
        assert batch.windows.tolist() == [row * length + step % length for row in range(ROWS)]
        begins = [stream.sample(step * ROWS + row).spans[0].first for row in range(ROWS)]
        assert batch.goes_on.tolist() == [begin > 0 for begin in begins]


@PROPERTY
@given(documents=DOCUMENTS, asked=st.integers(1, 300))
def test_contiguous_evaluation_counts_targets_that_have_a_state(
    documents: Documents, asked: int, folders: Iterator[Path]
) -> None:
    packed = corpus_of(folders, documents).packed()
    with mock.patch("harness.data.batches.LEAST_LENGTH", 3):
        stream = HeldOutText(packed, asked)
    rows, length = stream.at_once, stream.samples // stream.at_once
    assert min(asked, packed.num_windows) - rows < rows * length <= asked
    assert rows == 1 or length >= 3
    counted, last = 0, [-9] * rows
    for step in range(length):
        batch = stream.batch(step * rows, rows)
        plain = packed.read(batch.windows.numpy()).labels
        for row, window in enumerate(batch.windows.tolist()):
            within = not packed.begin_documents(np.array([window]))[0]
            assert bool(batch.goes_on[row]) == (step > 0 and within)
            assert step == 0 or window == last[row] + 1
            unknown = step == 0 and within
            assert batch.labels[row].tolist() == ([-100] * SEQ_LEN if unknown else [*plain[row]])
        counted += int((batch.labels != -100).sum())
        last = batch.windows.tolist()
    assert stream.targets_in(0, stream.samples) == counted > 0
    first = stream.first(8)
    assert first.windows.tolist() == [*range(min(8, length))]


def test_pools_end_with_stream_epoch_and_change_of_shares() -> None:
    """A mixture of one and a half epochs, which changes its shares at sample 17."""
    read: list[int] = []

    def lengths(samples: np.ndarray) -> np.ndarray:
        read.extend(samples.tolist())
        return samples % 7

    pools = Pools(lengths, 12, 4, epoch=20, end=30, key="", changes=[17])
    places = pools.places(np.arange(30)).tolist()
    assert sorted(read) == [*range(30)]
    for first, last in ((0, 12), (12, 17), (17, 20), (20, 30)):
        assert sorted(places[first:last]) == [*range(first, last)]


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 2), (2, 3), (3, 1), (1, 6)])
def test_contiguous_rows_keep_ranks(ranks: int, micro_batch: int, folders: Iterator[Path]) -> None:
    stream = Contiguous(Corpus(next(folders), Documents.drawn([12] * 40, 0)).packed(), 6)
    for rank in range(ranks):
        steps = stream.steps(
            0, curriculum=Curriculum(6), micro_batch=micro_batch, data_rank=rank, data_ranks=ranks
        )
        read = [next(steps).batches for _ in range(stream.samples // 6)]
        steps.close()
        for before, now in itertools.pairwise(read):
            for one, other in zip(before, now, strict=True):
                assert one.windows is not None
                assert other.windows is not None
                assert torch.equal(one.windows + 1, other.windows)


@pytest.mark.parametrize("is_stored", [True, False])
def test_the_end_of_a_document_is_always_a_target(is_stored: bool, folders: Iterator[Path]) -> None:
    packed = Corpus(next(folders), Documents.drawn([5] * 40, 1, is_stored)).packed(seq_len=1)
    labels = packed.read(np.arange(packed.num_windows)).labels
    assert (labels == batchings.EOS).sum() == packed.split.num_documents
