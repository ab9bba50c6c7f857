"""Folders of .bin/.idx pairs, against the same documents joined into one pair."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.config.batch import Curriculum
from harness.config.run_file import load_run_config
from harness.data import pair, token_files
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.mixture import Mixture
from harness.data.pair import IndexedTokens, join_indexed, write_indexed
from harness.data.spec import DataSpec
from harness.errors import ConfigError
from tests.data.number_tokenizer import write_number_tokenizer

SEQ_LEN, VOCAB = 16, 8192


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_number_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "BLOCK", 7)  # of documents: many in a shard
    monkeypatch.setattr(token_files, "_MOST_OPEN", 2)


def write(prefix: Path, seed: int, documents: int = 25, eos: int = 2) -> Path:
    """Documents of 0 to 40 tokens, some of several sequences, ending with the separator."""
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
    """A folder of five pairs, and JOINED.bin beside it."""
    folder = tmp_path / "shards"
    folder.mkdir()
    names = ["a", "b", "c", "d", "e"]
    prefixes = [write(folder / name, seed, 5 + 9 * seed) for seed, name in enumerate(names)]
    join_indexed(prefixes, tmp_path / "joined")
    return folder


def opened(path: Path, tokenizer: str, *words: str) -> Data:
    asked = [
        *(f"data.path={path}", f"data.tokenizer={tokenizer}", f"data.seq_len={SEQ_LEN}"),
        *(f"data.cache_dir={path.parent / 'cache'}", "data.held_out=0.1", *words),
    ]
    return build_data(DataSpec.of_run(load_run_config(None, asked), {}))


def of_ranks(data: Data, ranks: int = 2, steps: int = 3) -> list[torch.Tensor]:
    """The micro-batches of all ranks of a few steps."""
    read = []
    for rank in range(ranks):
        how = {"micro_batch": 2, "data_rank": rank, "data_ranks": ranks}
        steps_of = data.train.steps(12, curriculum=Curriculum(12), **how)
        for _, step in zip(range(steps), steps_of, strict=False):
            read += [batch.input_ids for batch in step.batches]
        steps_of.close()
    return read


@pytest.mark.parametrize("batching", ["packed", "length_grouped"])
def test_ranks_read_the_samples_of_the_joined_pair(
    shards: Path, tokenizer_dir: str, batching: str
) -> None:
    how = tokenizer_dir, f"data.batching={batching}"
    several, joined = (opened(path, *how) for path in (shards, shards.parent / "joined"))
    assert several.fingerprint == joined.fingerprint
    assert several.documents == joined.documents == 115
    pairs = zip(of_ranks(several), of_ranks(joined), strict=True)
    assert all(torch.equal(*both) for both in pairs)
    rows = torch.arange(several.held_out.samples)
    batches = [data.held_out.batch(0, len(rows)) for data in (several, joined)]
    assert torch.equal(batches[0].input_ids, batches[1].input_ids)
    assert ": 5 .bin/.idx pairs, 115 documents" in several.summary()[0]
    assert several.sources[0].pairs[1] == ("b.bin", 14, several.sources[0].pairs[1][2])


def test_contents_in_the_order_of_the_names_are_the_fingerprint(
    shards: Path, tokenizer_dir: str
) -> None:
    first = opened(shards, tokenizer_dir).fingerprint
    for suffix in (".bin", ".idx"):
        (shards / f"e{suffix}").rename(shards / f"f{suffix}")
    assert opened(shards, tokenizer_dir).fingerprint == first
    for suffix in (".bin", ".idx"):
        (shards / f"f{suffix}").rename(shards / f"0{suffix}")
    assert opened(shards, tokenizer_dir).fingerprint != first
    write(shards / "g", 9)
    assert opened(shards, tokenizer_dir).documents == 140


def test_problems_name_the_pair(shards: Path, tokenizer_dir: str) -> None:
    write_indexed(shards / "f", VOCAB, [([5, 2], True), ([6, 9000, 2], True)])
    with pytest.raises(ConfigError, match=r"shards/f\.bin: document 1 has token id 9000 at offset"):
        opened(shards, tokenizer_dir)
    write_indexed(shards / "f", 1 << 20, [([5, 2], True)])
    with pytest.raises(ConfigError, match=r"a\.bin holds uint16, .*f\.bin int32: all pairs of a"):
        opened(shards, tokenizer_dir)
    write(shards / "f", 3)
    data = opened(shards, tokenizer_dir)
    with (shards / "f.bin").open("ab") as file:
        file.write(b"12")
    with pytest.raises(ConfigError, match=r"f\.bin was changed while the run reads it"):
        data.train.batch(0, data.train.samples)


def test_blocks_are_those_of_the_whole_index(shards: Path) -> None:
    joined, several = (
        IndexedTokens(shards.parent / "joined"),
        IndexedTokens(*(shards / name for name in "abcde")),
    )
    assert (joined.document_starts() == several.document_starts()).all()
    assert len([*joined.starts()]) > 3
    for tokens in (joined, several):
        index = (shards.parent / "joined.idx").read_bytes()
        assert b"".join(tokens.index_blocks()) == index
    raw = np.frombuffer((shards.parent / "joined.bin").read_bytes(), np.uint16)
    assert (several.ids.block(0, len(several.ids)) == raw).all()


def test_shares_of_a_mixture_of_pairs(tmp_path: Path, tokenizer_dir: str) -> None:
    for seed, name in enumerate(("one", "two")):
        write(tmp_path / name, seed, 60)
    sources = [{"path": str(tmp_path / n), "share": s} for n, s in (("one", 0.75), ("two", 0.25))]
    mix = ", ".join(f"{{path={json.dumps(of['path'])}, share={of['share']}}}" for of in sources)
    asked = [
        *(f"data.mix=[{mix}]", f"data.tokenizer={tokenizer_dir}", f"data.seq_len={SEQ_LEN}"),
        *(f"data.cache_dir={tmp_path / 'cache'}", "data.held_out=0.1"),
    ]
    data = build_data(DataSpec.of_run(load_run_config(None, asked), {}))
    assert isinstance(data.train, Mixture)
    assert data.names == ["one", "two"]
    batch = data.train.batch(0, 40)
    assert batch.sources is not None
    assert batch.sources.bincount().tolist() == [30, 10]
    alone = {name: opened(tmp_path / name, tokenizer_dir) for name in ("one", "two")}
    for number, name in enumerate(("one", "two")):
        rows = batch.input_ids[batch.sources == number]
        assert torch.equal(rows, alone[name].train.batch(0, len(rows)).input_ids)
