"""Folders of .bin/.idx pairs, against their documents joined into one; bounds of lengths."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.config.batch import Curriculum
from harness.config.data_section import DataConfig
from harness.config.run_file import load_run_config
from harness.data import pair, token_files
from harness.data.build import cached_fingerprint
from harness.data.data import Data
from harness.data.pair import IndexedTokens, join_indexed, write_indexed
from harness.data.spec import DataSpec
from harness.errors import ConfigError
from tests.data.conftest import Opened, Refused, Written
from tests.data.glancing import glances
from tests.data.number_tokenizer import write_number_tokenizer

SEQ_LEN, VOCAB = 16, 8192


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_number_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "BLOCK", 7)  # documents per block: many per shard
    monkeypatch.setattr(token_files, "_MOST_OPEN", 2)


def write(prefix: Path, seed: int, documents: int = 25, eos: int = 2) -> Path:
    """Write documents of 0 to 40 tokens, some with several sequences, ending with the separator."""
    draw = random.Random(seed)
    sequences = []
    for _ in range(documents):
        ids = [draw.randrange(3, 300) for _ in range(draw.randrange(40))]
        if draw.random() < 0.3:
            sequences += [(ids, False), ([], False)]
            ids = []
        sequences.append(([*ids, eos], True))
    write_indexed(prefix, VOCAB, sequences)
    return prefix


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return a folder of five pairs, with JOINED.bin beside it."""
    folder = tmp_path / "shards"
    folder.mkdir()
    names = ["a", "b", "c", "d", "e"]
    prefixes = [write(folder / name, seed, 5 + 9 * seed) for seed, name in enumerate(names)]
    join_indexed(prefixes, tmp_path / "joined")
    return folder


def of_ranks(data: Data, ranks: int = 2, steps: int = 3) -> list[torch.Tensor]:
    """Return the micro-batches of all ranks for a few steps."""
    read = []
    for rank in range(ranks):
        how = {"micro_batch": 2, "data_rank": rank, "data_ranks": ranks}
        steps_of = data.train.steps(12, curriculum=Curriculum(12), **how)
        for _, step in zip(range(steps), steps_of, strict=False):
            read += [batch.input_ids for batch in step.batches]
        steps_of.close()
    return read


@pytest.mark.parametrize("batching", ["packed", "length_grouped"])
def test_ranks_read_samples_of_the_joined_pair(opened: Opened, shards: Path, batching: str) -> None:
    paths = (shards, shards.parent / "joined")
    several, joined = (opened(path, batching=batching) for path in paths)
    assert several.fingerprint == joined.fingerprint
    assert several.documents == joined.documents == 115
    pairs = zip(of_ranks(several), of_ranks(joined), strict=True)
    assert all(torch.equal(*both) for both in pairs)
    rows = torch.arange(several.held_out.samples)
    batches = [data.held_out.batch(0, len(rows)) for data in (several, joined)]
    assert torch.equal(batches[0].input_ids, batches[1].input_ids)
    assert ": 5 .bin/.idx pairs, 115 documents" in several.summary()[0]
    assert several.sources[0].pairs[1] == ("b.bin", 14, several.sources[0].pairs[1][2])


def test_contents_in_order_of_names_are_the_fingerprint(opened: Opened, shards: Path) -> None:
    first = opened(shards).fingerprint
    for suffix in (".bin", ".idx"):
        (shards / f"e{suffix}").rename(shards / f"f{suffix}")
    assert opened(shards).fingerprint == first
    for suffix in (".bin", ".idx"):
        (shards / f"f{suffix}").rename(shards / f"0{suffix}")
    assert opened(shards).fingerprint != first
    write(shards / "g", 9)
    assert opened(shards).documents == 140


def test_problems_name_the_pair(opened: Opened, shards: Path) -> None:
    write_indexed(shards / "f", VOCAB, [([5, 2], True), ([6, 9000, 2], True)])
    with pytest.raises(ConfigError, match=r"shards/f\.bin: document 1 has token id 9000 at offset"):
        opened(shards)
    write_indexed(shards / "f", 1 << 20, [([5, 2], True)])
    with pytest.raises(ConfigError, match=r"a\.bin holds uint16, .*f\.bin int32: all pairs of a"):
        opened(shards)
    write(shards / "f", 3)
    data = opened(shards)
    with (shards / "f.bin").open("ab") as file:
        file.write(b"12")
    with pytest.raises(ConfigError, match=r"f\.bin changed while the run was reading it"):
        data.train.batch(0, data.train.samples)


def test_blocks_are_those_of_the_whole_index(shards: Path) -> None:
    joined = IndexedTokens(shards.parent / "joined")
    several = IndexedTokens(*(shards / name for name in "abcde"))
    ends = [np.concatenate([ends[1:] for ends in of.starts()]) for of in (joined, several)]
    assert np.array_equal(*ends)
    assert len([*joined.starts()]) > 3
    for tokens in (joined, several):
        index = (shards.parent / "joined.idx").read_bytes()
        assert b"".join(tokens.index_blocks()) == index
    raw = np.frombuffer((shards.parent / "joined.bin").read_bytes(), np.uint16)
    assert (several.ids.block(0, len(several.ids)) == raw).all()


LONG = 40


@pytest.fixture
def pair_path(tmp_path: Path) -> Path:
    """Return a pair; one in ten of its 200 documents has at least 40 tokens with its separator."""
    sizes = [3 + n % 20 if n % 10 else LONG + n % 7 for n in range(200)]
    documents = (([5 + n % 9] * (size - 1) + [2], True) for n, size in enumerate(sizes))
    write_indexed(tmp_path / "pair", 8192, documents)
    return tmp_path / "pair"


def numbers(data: Data, side: str, source: int = 0) -> set[int]:
    return {*data.sources[source].sides[side].split.numbers[:-1].tolist()}


def test_documents_of_other_lengths_are_on_neither_side(
    opened: Opened, pair_path: Path, spec_of_run: Callable[..., DataSpec]
) -> None:
    bounds = ({}, {"min_tokens": LONG}, {"max_tokens": 22})
    whole, long, rest = (opened(pair_path, **each) for each in bounds)
    every = {*range(0, 200, 10)}
    for side in ("train", "held_out"):  # held-out documents are the same whatever the bounds are
        assert numbers(long, side) == numbers(whole, side) & every
        assert numbers(rest, side) == numbers(whole, side) - every
        lengths = np.diff(long.sources[0].sides[side].split.starts)
        assert lengths.min() >= LONG
    assert len({whole.fingerprint, long.fingerprint, rest.fingerprint}) == 3
    spec = spec_of_run(f"data.path={pair_path}", f"data.min_tokens={LONG}")
    assert cached_fingerprint(spec) == long.fingerprint
    assert "; not read: 180 shorter than 40 tokens" in long.summary()[0]
    (event,) = (event for event in rest.events() if event["kind"] == "left_out_by_length")
    assert (event["documents"], event["shorter"], event["longer"]) == (200, 0, 20)
    assert not [event for event in whole.events() if event["kind"] == "left_out_by_length"]


@pytest.mark.parametrize("batching", ["packed", "length_grouped"])
def test_long_documents_are_sampled_more_often(
    opened_run: Opened, pair_path: Path, tokenizer_dir: str, batching: str
) -> None:
    path = json.dumps(str(pair_path))
    mix = f"data.mix=[{{path={path}, share=2}}, {{path={path}, share=2, min_tokens={LONG}}}]"
    data = opened_run(mix, f"data.batching={batching}")
    assert data.names == ["pair", f"pair-min-{LONG}"]
    assert data._ordered.order.drawn_before(100) == [50, 50]
    held_out = numbers(data, "held_out") | numbers(data, "held_out", 1)
    assert not held_out & (numbers(data, "train") | numbers(data, "train", 1))
    read = [span.document for sample in range(200) for span in data.train.sample(sample).spans]
    assert sum(not number % 10 for number in read) > 0.4 * len(read)
    words = [mix, f"data.tokenizer={tokenizer_dir}", "data.seq_len=16", "data.held_out=0.2"]
    text = glances(load_run_config(None, words).data).lines(100)
    assert text[0].endswith("; share 50.00%, roughly 0.25 epochs")  # of 3,199 tokens
    assert "; only those with min_tokens=40 are read; share 50.00%" in text[1]


def test_nothing_as_long_is_refused_with_the_counts(refused: Refused, pair_path: Path) -> None:
    train, held_out = refused(pair_path, min_tokens=99)
    assert "train split has 0 tokens in 0 documents" in train
    assert "; 200 shorter than 99 tokens were not read (data.min_tokens=99)" in held_out


def test_a_sample_that_a_run_kept_has_no_documents(refused: Refused, pair_path: Path) -> None:
    np.save(f"{pair_path}.masks.npy", np.zeros((3, 1), np.int64))
    (problem,) = refused(pair_path, min_tokens=9)
    assert problem.startswith(f"data.min_tokens=9: {pair_path} holds samples that a run")


def test_held_out_set_is_as_said(write_jsonl: Written, opened_run: Opened, pair_path: Path) -> None:
    """It accepts the keys of data itself, and its own bounds."""
    lines = [{"t": f"{n} " * (1 + n % 40), "kind": "ab"[n % 2]} for n in range(60)]
    text = write_jsonl(*lines).rename(pair_path.with_name("lines"))
    table = f'path="{text}", format="jsonl", columns={{text="t"}}, where={{kind="a"}}'
    sets = f'data.eval_path={{own={{{table}}}, pair="{pair_path}"}}'
    data = opened_run(f"data.path={pair_path}", f"data.min_tokens={LONG}", sets)
    own, pair = data.set_sources
    assert (own.facts.documents, own.facts.shorter) == (30, 0)
    assert (pair.facts.documents, pair.facts.shorter) == (200, 0)
    assert data.sources[0].facts.shorter == 180
    recorded = DataConfig(eval_path="e").model_dump(mode="json")["eval_path"]
    assert recorded == {"": "e"}
