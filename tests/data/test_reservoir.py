"""Samples that a run has kept: read as the run read them, mixed into other data, held out."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.config.run_config import RunConfig
from harness.data.data import Data
from harness.data.pair import IndexedTokens, load_masks, write_documents, write_indexed
from harness.data.tokenizer import tokenizer_hash
from harness.errors import ConfigError
from harness.files.kept_sample import FACTS, HELD_OUT, TRAIN, masks_of
from harness.run import saving
from harness.run.saving import _write
from tests.data.conftest import Opened, Written


@pytest.fixture
def pairs(opened: Opened, write_jsonl: Written) -> Opened:
    path = write_jsonl(
        *({"prompt": f"what is {n}?", "completion": f"it is {n}, in words"} for n in range(200))
    )
    return partial(opened, path=path, seq_len=48)


@pytest.fixture
def new(tmp_path: Path) -> str:
    """Return a file of other text."""
    path = tmp_path / "new.jsonl"
    path.write_text("\n".join(f'{{"text": "word {n} of a text"}}' for n in range(300)))
    return str(path)


@pytest.mark.parametrize("packing", ["stream", "whole", None])
def test_kept_samples_equal_the_data(pairs: Opened, packing: str | None, tmp_path: Path) -> None:
    options = {"packing": packing} if packing else {"batching": "length_grouped"}
    stream = pairs(**options).train
    kept = [stream.documents_of(index) for index in range(stream.samples)]
    prefix = tmp_path / "kept"
    count = write_documents(prefix, 8192, [document for sample in kept for document in sample])
    tokens, masks = IndexedTokens(prefix), load_masks(masks_of(prefix))
    assert tokens.documents == count
    learned = ~masks.at(np.arange(len(tokens.ids)))
    flat = np.concatenate([ids for documents in kept for ids, _ in documents])
    assert (tokens.ids.read(np.arange(len(flat))[None])[0] == flat).all()
    assert (learned == np.concatenate([mask for documents in kept for _, mask in documents])).all()
    # Every target is a learned token of a kept document, and not its first.
    targets = stream.targets_in(0, stream.samples)
    firsts = sum(int(mask[0]) for documents in kept for _, mask in documents)
    across = 0 if packing != "stream" else sum(len(documents) - 1 for documents in kept)
    assert int(learned.sum()) - firsts <= targets <= int(learned.sum()) - firsts + across


def write_run(folder: Path, data: Data, samples: int, tokens: int | None = None) -> Path:
    """Write a run folder with a sample of some data."""
    (folder / "reservoir").mkdir(parents=True)
    for side, stream in ((TRAIN, data.train), (HELD_OUT, data.held_out)):
        documents = [document for n in range(samples) for document in stream.documents_of(n)]
        write_documents(folder / "reservoir" / side, data.vocab_size, documents)
    facts = {"tokenizer": tokenizer_hash(data.tokenizer)}
    facts |= {"train_tokens": tokens, "held_out_tokens": tokens}
    (folder / "reservoir" / FACTS).write_text(json.dumps(facts))
    return folder


def test_samples_are_read_as_the_run_read_them(pairs: Opened, tmp_path: Path, new: str) -> None:
    """Windows that were not neighbours stay apart: no token of one is in another."""
    first = pairs(packing="stream")
    run = write_run(tmp_path / "run", first, 20, first.train.seq_len + 1)
    again = pairs(path=new, rehearse=str(run))
    old = again.train.streams[1]
    assert old.samples == 20
    as_read = {bytes(first.train.batch(n, 1).input_ids.numpy()) for n in range(20)}
    assert {bytes(old.batch(n, 1).input_ids.numpy()) for n in range(20)} == as_read
    labels = {bytes(first.train.batch(n, 1).labels.numpy()) for n in range(20)}
    assert {bytes(old.batch(n, 1).labels.numpy()) for n in range(20)} == labels
    # A separate held-out set, as in the third run of a chain.
    both = {"new": new, "first": str(run / "reservoir" / HELD_OUT)}
    chained = pairs(path=new, eval_path=both, held_out=0.02)
    documents = sum(len(first.held_out.documents_of(index)) for index in range(20))
    kept = chained.eval_sets["first"]
    assert kept.packed.split.num_documents == documents
    as_held_out = {bytes(first.held_out.batch(n, 1).input_ids.numpy()) for n in range(20)}
    assert {bytes(kept.batch(n, 1).input_ids.numpy()) for n in range(kept.samples)} == as_held_out
    # At another length, samples are whole parts of documents: nothing unrelated continues them.
    longer = pairs(path=new, rehearse=str(run), eval_path=both, held_out=0.02, seq_len=64)
    assert longer.train.streams[1].holds_whole_documents
    assert longer.eval_sets["first"].holds_whole_documents


@pytest.mark.parametrize("batching", ["packed", "length_grouped"])
def test_runs_sample_is_mixed_in(pairs: Opened, batching: str, tmp_path: Path, new: str) -> None:
    run = write_run(tmp_path / "run", pairs(), 20)
    mix: Any = {"path": None, "mix": [{"path": new, "share": 3}]}
    own = mix if batching == "packed" else {"path": new}
    data = pairs(**own, rehearse=str(run), rehearse_share=0.25, batching=batching)
    assert (data.names, data.mixture()) == (["new", "rehearsed"], [[0, [3, 1]]])
    samples = pairs(path=new, batching=batching).train.samples
    assert data.train.samples == round(samples / 0.75)
    targets = data.train.targets_by_source(np.arange(96))
    assert all(targets)
    if batching == "packed":
        shares = np.bincount(data.train.batch(0, 100).sources.numpy())
        assert shares.tolist() == [75, 25]
    assert data.old.targets_in(0, data.old.samples) > 0
    only_measured = pairs(path=new, rehearse=str(run), rehearse_share=0, batching=batching)
    assert only_measured.names == []
    assert only_measured.old.document_mask == only_measured.document_mask == (batching == "packed")


def test_ids_that_the_tokenizer_lacks_are_kept(opened: Opened, tmp_path: Path) -> None:
    write_indexed(tmp_path / "wide", 70_000, [([5, 69_999] * 40, True)] * 20)
    data = opened(tmp_path / "wide", model_vocab_size=70_000)
    plan = SimpleNamespace(config=RunConfig(), seq_len=1024, model_config={"vocab_size": 70_000})
    run: Any = SimpleNamespace(plan=plan, data=data, state=SimpleNamespace(samples=4))
    _write(run, tmp_path / "reservoir")
    ids = IndexedTokens(tmp_path / "reservoir" / TRAIN).ids
    assert int(ids.read(np.arange(len(ids))[None]).max()) == 69_999
    plan.config = RunConfig(train={"seed": 1})
    with pytest.raises(ConfigError, match="a sample of other data"):
        _write(run, tmp_path / "reservoir")


@pytest.mark.parametrize("most", [None, 10])
def test_kept_sample_has_no_duplicates_and_a_limit(
    most: int | None, pairs: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one and a half epochs, and more samples to evaluate than there are."""
    data, config = pairs(batching="length_grouped"), RunConfig(eval={"samples": 4096})
    if most is not None:
        monkeypatch.setattr(saving, "MOST_TOKENS", most * (config.data.seq_len + 1))
    state = SimpleNamespace(samples=data.train.samples * 3 // 2)
    plan = SimpleNamespace(config=config, seq_len=config.data.seq_len, model_config={})
    _write(SimpleNamespace(plan=plan, data=data, state=state), tmp_path / "reservoir")  # type: ignore[arg-type]
    for side, samples in ((TRAIN, data.train.samples), (HELD_OUT, data.held_out.samples)):
        assert IndexedTokens(tmp_path / "reservoir" / side).documents == (most or samples)


def test_rehearsal_data_can_be_a_path(pairs: Opened, new: str) -> None:
    old = pairs().sources[0].corpus.path
    data = pairs(path=new, rehearse=str(old), document_mask=True)
    assert data.old.documents == pairs().held_out.documents


def test_run_without_sample_or_other_tokenizer_is_rejected(pairs: Opened, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="a run that kept no sample"):
        pairs(rehearse=str(tmp_path / "none"))
    run = write_run(tmp_path / "run", pairs(), 2)
    (run / "reservoir" / FACTS).write_text('{"tokenizer": "another"}')
    with pytest.raises(ConfigError, match=r"with another tokenizer: set data.tokenizer="):
        pairs(rehearse=str(run))
    with pytest.raises(ConfigError, match=r"^data.eval_path is .*data.tokenizer=.*run/tokenizer,"):
        pairs(eval_path={"first": f"{run}/reservoir/{HELD_OUT}.bin"}, held_out=0.02)
