"""From data.path to batches, as in a run."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from harness.config.data_section import DataConfig
from harness.config.run_config import RunConfig
from harness.config.run_file import load_run_config
from harness.data.build import build_data, cached_fingerprint
from harness.data.data import Data
from harness.data.pair import write_indexed
from harness.data.prepare import order_key
from harness.data.spec import DataSpec
from harness.data.tokenizer import encode, tokenizer_hash
from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.make import make_plan
from tests.data.conftest import Opened, Refused, Written

WORDS = ["the", "model", "reads", "text", "and", "learns", "a", "bit", "of", "it", "each", "day"]


def text(number: int, words: int = 60) -> str:
    words_of_text = (WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(words))
    return " ".join(words_of_text) + f" {number}.\n"


def everything(data: Data) -> dict[int, list[int]]:
    """Return the ids of every document, reassembled from the samples of both splits."""
    tokens_of: dict[int, dict[int, int]] = {}
    for stream in (data.train, data.held_out):
        for index in range(stream.samples):
            sample = stream.sample(index)
            shown = [*sample.batch.input_ids[0].tolist(), None]
            for span in sample.spans:
                ids = shown[span.column : span.column + span.last - span.first]
                places = range(span.first, span.last)
                for place, token in zip(places, ids, strict=True):
                    if token is not None:
                        tokens_of.setdefault(span.document, {})[place] = token
    return {n: [ids[place] for place in sorted(ids)] for n, ids in tokens_of.items()}


def test_forms_of_text_batch_alike(opened: Opened, tmp_path: Path, write_jsonl: Written) -> None:
    texts = [text(n) for n in range(12)]
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, content in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(content)
    lines = write_jsonl(*({"text": content} for content in texts))
    whole = opened(lines, seq_len=64)
    pairs = []
    for name, ending in (("with", [whole.eos_id]), ("without", [])):
        write_pair(tmp_path / name, [ids + ending for ids in encode(whole.tokenizer, texts)])
        pairs.append(opened(tmp_path / name, seq_len=64))
    others = [opened(folder, seq_len=64), *pairs]
    for other in others:
        assert other.train.samples == whole.train.samples > 20
        assert everything(other) == everything(whole)
    assert others[0].fingerprint == whole.fingerprint
    assert torch.equal(others[0].train.batch(0, 9).labels, whole.train.batch(0, 9).labels)


def test_loss_covers_only_completions(opened: Opened, write_jsonl: Written) -> None:
    pairs = [(text(n, 5 + n % 9), f" answer {n}" * (n % 3)) for n in range(60)]
    path = write_jsonl(*({"prompt": p, "completion": c} for p, c in pairs))
    data = opened(path, seq_len=12, packing="stream")
    learned = 0
    for stream in (data.train, data.held_out):
        assert stream.is_masked
        for index in range(stream.samples):
            sample = stream.sample(index)
            assert sample.batch.position_ids is not None  # the document mask is on for such data
            for span in sample.spans:
                prompt, completion = encode(data.tokenizer, list(pairs[span.document]))
                document = [*prompt, *completion, data.eos_id]
                for place in range(span.first, span.last):
                    column = span.column + place - span.first - 1
                    if column >= 0:
                        is_learned = place >= len(prompt)
                        expected = document[place] if is_learned else -100
                        assert sample.batch.labels[0, column] == expected
                        learned += is_learned
    counted = [stream.targets_in(0, stream.samples) for stream in (data.train, data.held_out)]
    assert sum(counted) == learned > 200


def test_the_tokenizer_is_trained_on_the_users_text(opened: Opened, tmp_path: Path) -> None:
    path, cache = tmp_path / "book.txt", tmp_path / "cache"
    path.write_text("".join(text(n) for n in range(200)))
    spec = DataSpec(DataConfig(path=str(path), cache_dir=str(cache), seq_len=16, held_out=0.2))
    assert cached_fingerprint(spec) is None
    assert not cache.exists()
    data = build_data(spec)
    assert cached_fingerprint(spec) == data.fingerprint != opened(path).fingerprint
    assert cached_fingerprint(DataSpec(spec.config.model_copy(update={"vocab_size": 512}))) is None
    assert 300 < data.vocab_size < 8192
    assert data.tokenizer.decode(encode(data.tokenizer, [text(3)])[0]) == text(3)
    assert (data.train.documents, data.held_out.documents) == (1, 1)  # one document, split in two
    assert data.held_out.tokens / data.train.tokens == pytest.approx(0.25, rel=0.01)


def test_standard_library_is_cached_as_the_readme_says(library: Data, cache_dir: Path) -> None:
    assert library.vocab_size == 8192
    assert library.train.is_masked is False
    assert 2.5e6 < library.train.tokens < 4.5e6
    assert library.held_out.samples > 96  # the samples of one evaluation
    assert 5 < library.bigram_nats + 1.5 < library.unigram_nats < math.log(8192)
    splits = [json.loads(file.read_text()) for file in cache_dir.glob("split-*/split.json")]
    (facts,) = [each for each in splits if each["fingerprint"] == library.fingerprint]
    assert facts["add_separator"] is False
    assert facts["documents"] == library.train.documents + library.held_out.documents > 500
    assert (facts["lowest_id"], facts["highest_id"]) == (0, 8191)
    before = {file: file.stat().st_mtime_ns for file in cache_dir.rglob("*")}
    again, other = (
        build_data(DataSpec(DataConfig(cache_dir=str(cache_dir), **more), seed), pytest.fail)
        for more, seed in (({"seq_len": 64}, 0), ({}, 1))
    )
    assert {file: file.stat().st_mtime_ns for file in cache_dir.rglob("*")} == before
    assert again.fingerprint == other.fingerprint == library.fingerprint
    assert again.train.samples == pytest.approx(2 * library.train.samples, abs=1)
    # The seed reorders training samples, but not held-out ones.
    for side, is_same in (("train", False), ("held_out", True)):
        ours, theirs = (getattr(data, side).batch(0, 4).input_ids for data in (library, other))
        assert torch.equal(ours, theirs) == is_same


@pytest.mark.parametrize("trains_tokenizer", [False, True])
def test_data_without_a_token_is_refused(
    refused: Refused, tmp_path: Path, write_jsonl: Written, trains_tokenizer: bool
) -> None:
    path = write_jsonl()
    options = {"tokenizer": None} if trains_tokenizer else {}
    for content in ("\n\n", '{"text": ""}\n' * 3, '{"prompt": "", "completion": ""}\n'):
        path.write_text(content)
        assert "holds no text" in refused(path, **options)[0]
    for suffix in ("bin", "idx"):
        (tmp_path / f"pair.{suffix}").write_bytes(b"MMIDIDX")
    (problem,) = refused(tmp_path / "pair", **options)
    expected = "set data.tokenizer" if trains_tokenizer else "pair.idx is truncated: 7 bytes"
    assert expected in problem
    documents = [[5, 6, -1 if trains_tokenizer else 1 << 30, 2] * 20] * 9
    write_indexed(tmp_path / "pair", 100_000, ((document, True) for document in documents))
    (problem,) = refused(tmp_path / "pair")
    assert f"document 0 has token id {documents[0][2]} at offset 2" in problem
    assert "these are not token ids: does" in problem


def test_a_spec_is_that_of_the_run() -> None:
    def spec(**sections: object) -> DataSpec:
        return DataSpec.of_run(RunConfig.model_validate(sections), {"vocab_size": 299})

    section = {"path": "p", "seq_len": 9, "held_out": 0.5, "cache_dir": "c"}
    plain = DataSpec(DataConfig(**section), 4, 299, eval_seq_len=32, eval_samples=5)
    assert spec(data=section, train={"seed": 4}, eval={"seq_len": 32, "samples": 5}) == plain
    given = spec(model={"init_from": "folder"})
    assert given.config.tokenizer == "folder"
    assert given.adds_rows
    sized = {"init_from": "folder", "overrides": {"vocab_size": 299}}
    assert not spec(model=sized).adds_rows
    assert not spec().adds_rows


def test_too_little_text_names_the_numbers(refused: Refused, write_jsonl: Written) -> None:
    path = write_jsonl({"text": "a"}, {"text": "b"})
    problems = refused(path, seq_len=100)
    assert len(problems) == 2
    assert "the train split has 2 tokens in 1 documents" in problems[0]
    assert "data.seq_len + 1 = 101" in problems[0]
    assert "the held-out split has 2 tokens" in problems[1]
    assert "change data.held_out (now 0.2)" in problems[1]


def test_a_bad_line_leaves_nothing(refused: Refused, tmp_path: Path, write_jsonl: Written) -> None:
    path = write_jsonl({"text": text(1)}, {"txt": "typo"}, {"text": 1}, {"text": text(2)})
    for options in ({}, {"tokenizer": None}):
        problems = refused(path, **options)
        assert [problem.split(": ")[1] for problem in problems] == [f"{path}:2", f"{path}:3"]
    assert not [folder for folder in (tmp_path / "cache").iterdir() if folder.is_dir()]


def test_given_weights_get_rows_for_missing_ids(opened: Opened, write_jsonl: Written) -> None:
    path = write_jsonl(*({"text": text(n)} for n in range(20)))
    assert opened(path, model_vocab_size=299, adds_rows=True).vocab_size == 300


def write_pair(prefix: Path, documents: list[list[int]]) -> Path:
    write_indexed(prefix, 8192, ((document, True) for document in documents))
    return prefix


def test_unknown_ids_are_rejected_early(opened: Opened, refused: Refused, tmp_path: Path) -> None:
    """They are in the last document, which no window of the first steps contains."""
    ordinary = [*[10, 11, 12] * 11, *[14] * 40, 2]
    pair = write_pair(tmp_path / "pair", [ordinary] * 9 + [[*ordinary[:33], 9000, 9100, 2]])
    (problem,) = refused(pair)
    assert "document 9 has token id 9000 at offset 33, outside the model's vocabulary" in problem
    assert "of 300; the ids range from 0 to 9100: set model.overrides.vocab_size=9101" in problem
    data = opened(pair, model_vocab_size=9101)
    assert data.train.samples > 10


def test_ids_replaced_in_place_change_the_fingerprint(opened: Opened, tmp_path: Path) -> None:
    """Same size, same .idx, same cache: every reader must notice the one changed id."""
    documents = [[10 + number % 50, 11, 12, 13] * 20 + [2] for number in range(40)]
    pair = write_pair(tmp_path / "pair", documents)
    before = opened(pair)
    documents[30][5] += 1
    write_pair(pair, documents)
    after = opened(pair)
    assert after.fingerprint != before.fingerprint
    assert after.fingerprint[:16] != before.fingerprint[:16]  # the part that reports show
    # The documents have the same positions: a run that may continue does so in its order.
    windows = [[data.train.sample(i).window for i in range(50)] for data in (before, after)]
    assert windows[0] == windows[1]


def test_text_with_reordered_words_changes_the_fingerprint(opened: Opened, tmp_path: Path) -> None:
    """One character per token: neither sizes nor token counts differ."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text("the model reads text and learns a bit " * 9)
    before = opened(folder)
    text = (folder / "07.txt").read_text()
    (folder / "07.txt").write_text(text.replace("model reads", "reads model"))
    after = opened(folder)
    assert order_key(after.fingerprint) == order_key(before.fingerprint)
    assert after.fingerprint != before.fingerprint


def test_a_tokenizer_with_gaps_in_its_ids(
    opened: Opened, refused: Refused, tmp_path: Path, write_jsonl: Written
) -> None:
    """Two ids, the larger one 70000: neither the width on disk nor the check may use len()."""
    words = {"a": 70_000, "</s>": 1}
    backend = Tokenizer(WordLevel(words, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    wrapped.save_pretrained(tmp_path / "gaps")
    path = write_jsonl(*({"text": "a a a a " * 9} for _ in range(9)))
    data = opened(path, tokenizer=str(tmp_path / "gaps"))
    assert data.vocab_size == 70_001
    assert set(data.train.batch(0, 9).input_ids.unique().tolist()) == {1, 70_000}
    (problem,) = refused(path, tokenizer=str(tmp_path / "gaps"), model_vocab_size=50_000)
    assert "has 70001 ids, but the model's vocabulary has 50000" in problem
    assert "model.overrides.vocab_size=70001" in problem


def test_baselines_count_ids_that_the_tokenizer_lacks(opened: Opened, tmp_path: Path) -> None:
    documents = [[10, 11, 9000 + number, 2] * 20 for number in range(40)]
    pair = write_pair(tmp_path / "pair", documents)
    data = opened(pair, model_vocab_size=10_000)
    assert 0 < data.bigram_nats < data.unigram_nats


def test_prompt_data_keeps_the_fingerprint_of_earlier_versions(
    opened: Opened, tmp_path: Path, write_jsonl: Written
) -> None:
    """They stored the number of prompt tokens per document, and must resume with the same data."""
    pairs = [("p" * (n % 4), text(n)) for n in range(30)]
    path = write_jsonl(*({"prompt": p, "completion": c} for p, c in pairs))
    data = opened(path)
    (prefix,) = (tmp_path / "cache").glob("tokens-*/tokens.bin")
    tokens, tokenizer = prefix.read_bytes(), tokenizer_hash(data.tokenizer)
    layout = hashlib.sha256(f"{len(tokens)}:{tokenizer}:".encode())
    layout.update(prefix.with_suffix(".idx").read_bytes())
    prompts = [len(encode(data.tokenizer, [prompt])[0]) for prompt, _ in pairs]
    layout.update(np.array(prompts, dtype=np.int32).tobytes())
    ids = hashlib.sha256(tokens).hexdigest()
    whole = hashlib.sha256(f"{layout.hexdigest()}:{ids}".encode()).hexdigest()
    assert data.fingerprint == f"{whole}-{layout.hexdigest()}"


def test_too_small_held_out_split_says_how_to_disable(tmp_path: Path, tokenizer_dir: str) -> None:
    for name, count in (("train", 50), ("test", 1)):
        lines = [json.dumps({"text": text(number, 8)}) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    words = [f"data.path={tmp_path}", f"data.tokenizer={tokenizer_dir}", "data.seq_len=64"]
    words += [f"data.cache_dir={tmp_path / '.cache'}"]

    def build(*more: str) -> Data:
        plan = make_plan(load_run_config(None, [*words, *more]), {}, World(), here=True)
        return build_data(DataSpec.of_run(plan.config, {}))

    with pytest.raises(ConfigError, match=r"or set data.held_out, which evaluates on documents of"):
        build()
    assert build("data.held_out=0.3").documents == 50
