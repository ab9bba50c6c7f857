"""A corpus in the cache: its tokens, and the split of its documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from harness.data.cache import Report, damaged
from harness.data.corpus import Corpus
from harness.data.encoding import Encoder
from harness.data.fingerprint import combined, first_outside, survey
from harness.data.indexed import IndexedTokens, write_indexed
from harness.data.masks import NO_MASKS, Masks, MaskWriter
from harness.data.split import stores_separator, write_splits
from harness.data.token_file import BLOCK_BYTES
from harness.data.tokenizer import tokenizer_hash, vocab_size
from harness.errors import ConfigError, Unusable, shortened
from harness.files.data_format import BadLines
from harness.files.regular_file import read_json

# Increase this if the same text would give other tokens, ...
FORMAT = 4
# ... and this one if the files of the split change.
SPLIT_FORMAT = 3
TOKENS, MASKS, SPLIT_FACTS = "tokens", "masks.npy", "split.json"
_REPORT_EVERY_CHARS = 1 << 26
_MOST_FACTS_BYTES = 2**20
_FACT_TYPES: dict[str, type] = {
    "fingerprint": str,
    "add_separator": bool,
    **dict.fromkeys(("documents", "lowest_id", "highest_id"), int),
}
_NO_TOKEN_ID = 1 << 24  # no vocabulary is as large


@dataclass(frozen=True)
class SplitFacts:
    """Facts of a split, stored so that its tokens need not be read."""

    fingerprint: str
    add_separator: bool
    documents: int
    lowest_id: int
    """Lowest of all ids, or of the sampled ids of a large file (fingerprint.survey)."""
    highest_id: int


@dataclass(frozen=True)
class Counts:
    """The size of a corpus, or of a part of it."""

    documents: int
    characters: int
    tokens: int


def write_tokens(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, learn: str, folder: Path, report: Report
) -> None:
    """Write the tokens, and which of them are masked. Raises ConfigError with all bad lines."""
    bad_lines, reported = BadLines(), 0

    def progress(characters: int) -> None:
        nonlocal reported
        if characters - reported > _REPORT_EVERY_CHARS:
            reported = characters
            report(f"tokenised {min(1.0, characters / corpus.num_bytes()):.0%} of {corpus.path}")

    counts = encode_corpus(corpus, tokenizer, learn, folder, bad_lines, progress)
    require_text(corpus, counts, bad_lines)


def encode_corpus(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    learn: str,
    folder: Path,
    bad_lines: BadLines,
    progress: Callable[[int], None],
) -> Counts:
    """Write the tokens and masks of the good lines; `progress` receives the characters so far."""
    encoder = Encoder(corpus, tokenizer, learn)
    masks, documents, characters, tokens = MaskWriter(), 0, 0, 0

    def sequences() -> Iterator[tuple[list[int], bool]]:
        """Yield (ids of the next piece, True if its document ends there)."""
        nonlocal documents, characters, tokens
        for group in encoder.encoded(bad_lines):
            for part, encoded in group:
                masks.add_learned(len(encoded.ids), encoded.learned)
                documents += part.is_last
                characters += part.num_characters
                tokens += len(encoded.ids)
                yield encoded.ids, part.is_last
            progress(characters)
            if bad_lines.are_enough:
                break

    write_indexed(folder / TOKENS, vocab_size(tokenizer), sequences())
    masks.save(folder / MASKS)
    return Counts(documents, characters, tokens)


def require_text(corpus: Corpus, counts: Counts, bad_lines: BadLines) -> None:
    """Raise ConfigError with all bad lines, or if there is no text."""
    bad_lines.require_none()
    if not counts.characters:
        raise ConfigError(f"data.path: {corpus.path} holds no text ({counts.documents} documents)")


def write_split(
    tokens: IndexedTokens,
    masks: Masks | None,
    tokenizer: PreTrainedTokenizerBase,
    held_out: float | None,
    folder: Path,
    report: Report,
) -> None:
    """Write both sides of the split and its facts; `masks` is None for the user's .bin/.idx."""
    modified_ns = tokens.bin_path.stat().st_mtime_ns if masks is None else None
    starts = tokens.document_starts()
    # Documents of ours end with all that they need; the last turn of a chat may be no separator.
    add_separator = masks is None and not stores_separator(tokens, starts, tokenizer.eos_token_id)
    masks = masks or NO_MASKS
    write_splits(folder, starts, masks, held_out, add_separator=add_separator)
    layout = hashlib.sha256(f"{tokens.bin_bytes}:{tokenizer_hash(tokenizer)}:".encode())
    with tokens.idx_path.open("rb") as index:
        while block := index.read(BLOCK_BYTES):
            layout.update(block)
    layout.update(np.diff(masks.before(starts)).astype(np.int32).tobytes())
    nearest = starts[np.minimum(np.searchsorted(starts, masks.starts), len(starts) - 1)]
    if (nearest != masks.starts).any():
        # Of prompts at the start of documents the counts say everything: the fingerprint of
        # earlier versions, whose runs resume.
        layout.update(np.stack([masks.starts, masks.stops]).tobytes())
    ids = survey(tokens.ids, modified_ns, report)
    facts = SplitFacts(
        combined(ids, layout.hexdigest()), add_separator, len(starts) - 1, ids.lowest, ids.highest
    )
    (folder / SPLIT_FACTS).write_text(json.dumps(asdict(facts)))


def read_facts(folder: Path) -> SplitFacts:
    """Return the facts that write_split wrote. Raises ConfigError if the file is damaged."""
    try:
        facts = read_json(folder / SPLIT_FACTS, _MOST_FACTS_BYTES, links=True)
    except (OSError, Unusable) as error:
        raise damaged(folder / SPLIT_FACTS, error) from error
    types = {key: type(value) for key, value in facts.items()} if isinstance(facts, dict) else {}
    if not isinstance(facts, dict) or types != _FACT_TYPES:
        raise damaged(folder / SPLIT_FACTS, f"it holds {shortened(facts)}")
    return SplitFacts(**facts)


def require_ids_of(tokens: IndexedTokens, facts: SplitFacts, vocab_size: int) -> None:
    """Raise ConfigError with the first id outside the model's vocabulary, if there is one."""
    if facts.lowest_id >= 0 and facts.highest_id < vocab_size:
        return
    outside = first_outside(tokens.ids, vocab_size)
    assert outside is not None, "the range of the ids is that of the file"
    starts = tokens.document_starts()
    document = int(np.searchsorted(starts, outside[0], side="right")) - 1
    advice = f"set model.overrides.vocab_size={facts.highest_id + 1}"
    if facts.lowest_id < 0 or facts.highest_id >= _NO_TOKEN_ID:
        advice = f"these are no token ids: is {tokens.idx_path} of the same file?"
    raise ConfigError(
        f"data.path: {tokens.bin_path}: document {document} has token id {outside[1]} at offset "
        f"{outside[0] - starts[document]}, outside the model's vocabulary of {vocab_size}; the ids "
        f"go from {facts.lowest_id} to {facts.highest_id}: {advice}"
    )
