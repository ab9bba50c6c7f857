"""The data path alone: from .bin/.idx to batches, and from text to .bin/.idx."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from harness.config.curriculum import Curriculum
from harness.config.data_section import DataConfig
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.spec import DataSpec
from harness.data.tokenizer import PIECES_AT_ONCE
from tools.proofs.overhead.job import ACCUMULATED, SEQ_LEN

BATCHES = ((ACCUMULATED, SEQ_LEN), (8, 4096))  # (samples, tokens of each): as timed here, and large
TOKENS = 2_000_000  # read in a round, of each
TEXT_BYTES = 10_000_000  # of the corpus
COPIES = 4  # of it, tokenised in a round: what a start takes, however much text, is small beside it


def data_rates(data: Data, rounds: int) -> Iterator[dict[str, float]]:
    """Of every round: tokens/s by samples of a batch and tokens of a sample, MB/s of text."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer = folder / "tokenizer"
        data.tokenizer.save_pretrained(tokenizer)
        texts = _texts(data)
        corpus = folder / "corpus"
        corpus.mkdir()
        for number, text in enumerate(texts):
            (corpus / f"{number:06}.txt").write_text(text, newline="")
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        for number in range(rounds):
            cache = folder / f"cache-{number}"
            spec = DataSpec(
                DataConfig(path=str(corpus), tokenizer=str(tokenizer), cache_dir=str(cache))
            )
            seconds = {"text": _seconds_to_tokenise(spec), "raw": _raw_seconds(data, texts)}
            rates = {name: megabytes / taken_s for name, taken_s in seconds.items()}
            (index,) = cache.glob("tokens-*/*.idx")
            pair = str(index.with_suffix(""))
            for samples, seq_len in BATCHES:
                again = DataSpec(
                    DataConfig(
                        path=pair, tokenizer=str(tokenizer), cache_dir=str(cache), seq_len=seq_len
                    )
                )
                rates[f"{samples} x {seq_len}"] = _tokens_per_s(build_data(again), samples, seq_len)
            yield rates


def _texts(data: Data) -> list[str]:
    """Documents of the corpus, TEXT_BYTES of them together, COPIES times."""
    texts, length = [], 0
    for piece in data.sources[0].corpus.pieces():
        if length > TEXT_BYTES:
            break
        texts.append(piece.text)
        length += len(piece.text.encode())
    return texts * COPIES


def _seconds_to_tokenise(spec: DataSpec) -> float:
    """Text files -> .bin/.idx and its split, as a run does at its first start."""
    began = time.perf_counter()
    build_data(spec)
    return time.perf_counter() - began


def _raw_seconds(data: Data, texts: list[str]) -> float:
    """The same texts, in memory already, by the quickest call that the tokenizer offers."""
    backend = data.tokenizer.backend_tokenizer
    began = time.perf_counter()
    for start in range(0, len(texts), PIECES_AT_ONCE):
        some = texts[start : start + PIECES_AT_ONCE]
        for encoding in backend.encode_batch_fast(some, add_special_tokens=False):
            _ = encoding.ids
    return time.perf_counter() - began


def _tokens_per_s(data: Data, samples: int, seq_len: int) -> float:
    steps = max(1, TOKENS // (samples * seq_len))
    stream = data.train.steps(0, curriculum=Curriculum(samples), micro_batch=1)
    next(stream)
    began = time.perf_counter()
    for _ in islice(stream, steps):
        pass
    took = time.perf_counter() - began
    stream.close()
    return steps * samples * seq_len / took
