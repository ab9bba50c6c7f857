"""A corpus in the cache: its tokens, the split of its documents, and their fingerprint.

The fingerprint consists of two hashes: of ids and document layout, and of the layout alone. Sample
order depends only on the second, so a run that resumes with corrected ids keeps its order.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from harness.config.data_section import ANY_LENGTH, TokenBounds
from harness.data.cache import Report, cached_json
from harness.data.encoding import Encoder, HowEncoded
from harness.data.pair import BLOCK, NO_MASKS, IndexedTokens, Masks, MaskWriter, write_indexed
from harness.data.split import stores_separator, write_splits
from harness.data.token_files import TokenFile
from harness.data.tokenizer import tokenizer_hash, vocab_size
from harness.errors import ConfigError, shortened
from harness.files.corpus import Corpus
from harness.files.data_format import BadLines
from harness.files.notes import Notes

# Increase this if the same text would give different tokens.
FORMAT = 7
# Increase this if the files of the split change.
SPLIT_FORMAT = 4
TOKENS, MASKS, NOTES, SPLIT_FACTS = "tokens", "masks.npy", "notes.json", "split.json"
CHOSEN = "chosen.npy"
"""File with the number of tokens of each pair's chosen side."""
SKIPPED = "skipped.json"
_REPORT_EVERY_CHARS = 1 << 26
_FACT_TYPES: dict[str, type] = {
    "fingerprint": str,
    "add_separator": bool,
    **dict.fromkeys(("documents", "lowest_id", "highest_id", "shorter", "longer"), int),
}
_NO_TOKEN_ID = 1 << 24  # no vocabulary is this large
# Files up to this size are hashed whole, about as fast as they are read. For larger files the hash
# covers the size, the modification time and SAMPLED_BLOCKS blocks.
WHOLE_BYTES = 32 << 30
SAMPLED_BLOCKS, SAMPLED_BYTES = 64, 1 << 20
_REPORT_EVERY_BYTES = 4 << 30


@dataclass(frozen=True)
class SplitFacts:
    """Facts about a split, stored so that its tokens need not be read again."""

    fingerprint: str
    add_separator: bool
    documents: int
    lowest_id: int
    """Lowest of all ids, or of the sampled ids in a large file (survey)."""
    highest_id: int
    shorter: int = 0
    """Documents that are skipped because they have fewer tokens than data.min_tokens."""
    longer: int = 0
    """Documents that are skipped because they have more tokens than data.max_tokens."""


@dataclass
class Counts:
    """The size of a corpus or of a part of it."""

    documents: int = 0
    characters: int = 0
    tokens: int = 0
    learned: int = 0
    """Tokens that are trained on."""
    notes: Notes = field(default_factory=Notes)
    """Content of its rows that is not read or not trained on."""


def write_tokens(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    how: HowEncoded,
    folder: Path,
    report: Report,
) -> None:
    """Write the tokens and their masks. Raises ConfigError with all bad lines."""
    bad_lines, reported = corpus.bad_lines(), 0

    def progress(characters: int) -> None:
        nonlocal reported
        if characters - reported > _REPORT_EVERY_CHARS:
            reported = characters
            report(f"tokenised {min(1.0, characters / corpus.num_bytes()):.0%} of {corpus.path}")

    counts = encode_corpus(corpus, tokenizer, how, folder, bad_lines, progress)
    require_text(corpus, counts, bad_lines)
    keep_skipped(corpus, bad_lines, folder)
    write_notes(counts.notes, folder)


def encode_corpus(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    how: HowEncoded,
    folder: Path,
    bad_lines: BadLines,
    progress: Callable[[int], None],
) -> Counts:
    """Write the tokens and masks of the good lines; `progress` receives the characters so far."""
    encoder, masks, counts = Encoder(corpus, tokenizer, how), MaskWriter(), Counts()
    chosen: list[int] = []

    def sequences() -> Iterator[tuple[list[int], bool]]:
        """Yield (ids of the next piece, True if its document ends there)."""
        for group in encoder.encoded(bad_lines):
            for part, encoded in group:
                masks.add_learned(len(encoded.ids), encoded.learned)
                if notes := (*part.notes, *encoded.notes):
                    counts.notes.add(notes)
                counts.documents += part.is_last
                counts.characters += part.num_characters
                counts.tokens += len(encoded.ids)
                counts.learned += sum(stop - start for start, stop in encoded.learned)
                chosen.append(encoded.chosen)
                yield encoded.ids, part.is_last
            progress(counts.characters)
            if bad_lines.are_enough:
                break

    write_indexed(folder / TOKENS, vocab_size(tokenizer), sequences())
    masks.save(folder / MASKS)
    if corpus.preferences:
        np.save(folder / CHOSEN, np.array(chosen, dtype=np.int64))
    return counts


def write_notes(notes: Notes, folder: Path) -> None:
    """Write notes for read_notes."""
    (folder / NOTES).write_text(json.dumps(notes.as_json()))


def read_notes(folder: Path) -> Notes:
    """Return the notes that write_notes wrote. Raises ConfigError if the file is damaged."""
    return cached_json(folder / NOTES, Notes.from_json)


def require_text(corpus: Corpus, counts: Counts, bad_lines: BadLines) -> None:
    """Raise ConfigError with all bad lines, or if there is no text, or nothing to train on."""
    bad_lines.require_good_rows()
    if bad_lines.is_cut:  # the rest may have what is missing
        return
    if not counts.characters:
        raise ConfigError(f"data.path: {corpus.path} holds no text ({counts.documents} documents)")
    if not counts.learned:
        why = counts.notes.text() or "its rows mark everything as not learned"
        documents = f"{counts.documents:,} documents"
        raise ConfigError(f"data.path: {corpus.path} has nothing to learn in {documents}: {why}")


def keep_skipped(corpus: Corpus, bad_lines: BadLines, folder: Path) -> None:
    """Write the bad lines that were skipped to a file beside the corpus's tokens."""
    if corpus.bad_rows_limit is not None:
        (folder / SKIPPED).write_text(json.dumps(bad_lines.as_json()))


def read_skipped(corpus: Corpus, folder: Path) -> BadLines:
    """Return the skipped lines. Raises ConfigError beyond the limit, which may have changed."""
    if corpus.bad_rows_limit is None:
        return BadLines()
    parse = partial(BadLines.from_json, limit=corpus.bad_rows_limit)
    bad_lines = cached_json(folder / SKIPPED, parse)
    bad_lines.require_none()
    return bad_lines


@dataclass(frozen=True)
class Survey:
    """Hash and range of a file's token ids."""

    digest: str
    lowest: int
    highest: int


def survey(file: TokenFile, modified_ns: str | None, report: Report) -> Survey:
    """Return the hash and range of all ids, or of a sample if the file is large.

    `modified_ns` is hashed with a sample; None for files that this library wrote, which are always
    read whole.
    """
    digest, lowest, highest, done, reported = hashlib.sha256(), 0, 0, 0, 0
    whole = modified_ns is None or file.num_bytes <= WHOLE_BYTES
    if not whole:
        digest.update(f"sample:{file.num_bytes}:{modified_ns}:".encode())
    for ids in file.blocks() if whole else _sample(file):
        digest.update(ids.data)
        lowest, highest = min(lowest, int(ids.min())), max(highest, int(ids.max()))
        done += ids.nbytes
        if done - reported > _REPORT_EVERY_BYTES:
            reported = done
            report(f"hashed {done / file.num_bytes:.0%} of {file.path}")
    return Survey(digest.hexdigest(), lowest, highest)


def _sample(file: TokenFile) -> Iterator[NDArray[np.integer]]:
    """Yield the first and last block, and one at a fixed place in each equal range between them."""
    count = SAMPLED_BYTES // file.dtype.itemsize
    last = len(file) - count
    for number in range(SAMPLED_BLOCKS):
        begin, end = (part * last // (SAMPLED_BLOCKS - 1) for part in (number, number + 1))
        place = int.from_bytes(hashlib.sha256(f"{len(file)}:{number}".encode()).digest()[:8], "big")
        inner = 0 < number < SAMPLED_BLOCKS - 1
        yield file.block(begin + place % (end - begin) if inner else begin, count)


def first_outside(file: TokenFile, vocab_size: int) -> tuple[int, int] | None:
    """Return index and value of the first id outside the vocabulary, or None if all are inside."""
    first = 0
    for ids in file.blocks():
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if outside.size:
            return first + int(outside[0]), int(ids[outside[0]])
        first += len(ids)
    return None


def write_split(
    tokens: IndexedTokens,
    masks: Masks | None,
    tokenizer: PreTrainedTokenizerBase,
    held_out: float | None,
    folder: Path,
    report: Report,
    bounds: TokenBounds = ANY_LENGTH,
) -> None:
    """Write both sides of the split and its facts; `masks` is None for the user's .bin/.idx."""
    modified = tokens.modified_ns() if masks is None else None
    # Documents that this library wrote are complete. A chat may end with a token other than the
    # separator.
    add_separator = masks is None and not stores_separator(tokens, tokenizer.eos_token_id)
    masks = masks or NO_MASKS
    left_out = write_splits(
        folder, tokens, masks, held_out, add_separator=add_separator, bounds=bounds
    )
    layout = _layout(tokens, masks, tokenizer)
    if bounds != ANY_LENGTH:
        layout.update(f"bounds:{bounds.least}:{bounds.most}".encode())
    ids = survey(tokens.ids, modified, report)
    both = hashlib.sha256(f"{layout.hexdigest()}:{ids.digest}".encode()).hexdigest()
    fingerprint = f"{both}-{layout.hexdigest()}"
    facts = SplitFacts(
        fingerprint, add_separator, tokens.documents, ids.lowest, ids.highest, *left_out
    )
    (folder / SPLIT_FACTS).write_text(json.dumps(asdict(facts)))


def _layout(tokens: IndexedTokens, masks: Masks, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a hash of the document boundaries and the masks."""
    layout = hashlib.sha256(f"{tokens.bin_bytes}:{tokenizer_hash(tokenizer)}:".encode())
    for block in tokens.index_blocks():
        layout.update(block)
    whole_runs = True
    for starts in tokens.starts():
        layout.update(np.diff(masks.before(starts)).astype(np.int32).tobytes())
        first, last = np.searchsorted(masks.starts, starts[[0, -1]])
        runs = masks.starts[first:last]
        whole_runs = whole_runs and bool((starts[np.searchsorted(starts, runs)] == runs).all())
    if not whole_runs:
        # Prompts elsewhere than at the start of a document, which their counts do not describe.
        for column in (masks.starts, masks.stops):
            for at in range(0, len(column), BLOCK):
                layout.update(column[at : at + BLOCK].tobytes())
    return layout


def read_facts(folder: Path) -> SplitFacts:
    """Return the facts that write_split wrote. Raises ConfigError if the file is damaged."""
    return cached_json(folder / SPLIT_FACTS, _facts_of)


def _facts_of(values: Any) -> SplitFacts:
    types = {key: type(value) for key, value in values.items()} if type(values) is dict else {}
    if types != _FACT_TYPES:
        raise ValueError(f"it holds {shortened(values)}")
    return SplitFacts(**values)


def require_ids_of(tokens: IndexedTokens, facts: SplitFacts, vocab_size: int) -> None:
    """Raise ConfigError with the first id outside the model's vocabulary, if any."""
    if facts.lowest_id >= 0 and facts.highest_id < vocab_size:
        return
    outside = first_outside(tokens.ids, vocab_size)
    assert outside is not None, "the range of the ids is that of the file"
    path, document, offset = tokens.place_of(outside[0])
    advice = f"set model.overrides.vocab_size={facts.highest_id + 1}"
    if facts.lowest_id < 0 or facts.highest_id >= _NO_TOKEN_ID:
        advice = f"these are not token ids: does {path.with_suffix('.idx')} belong to this file?"
    raise ConfigError(
        f"data.path: {path}: document {document} has token id {outside[1]} at offset "
        f"{offset}, outside the model's vocabulary of {vocab_size}; the ids "
        f"range from {facts.lowest_id} to {facts.highest_id}: {advice}"
    )


def order_key(fingerprint: str) -> str:
    """Return the part of a fingerprint that determines the sample order: its second hash, or all of
    it if it has only one.
    """
    return fingerprint.rpartition("-")[2]


def joined(fingerprints: Sequence[str]) -> str:
    """Return the fingerprint of several sources; a single source keeps its own."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    layout = hashlib.sha256(" ".join(map(order_key, fingerprints)).encode()).hexdigest()
    return f"{hashlib.sha256(' '.join(fingerprints).encode()).hexdigest()}-{layout}"
