"""A corpus in the cache: its tokens, and the split of its documents."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from harness.data.cache import Report, damaged
from harness.data.corpus import Corpus
from harness.data.fingerprint import combined, first_outside, survey
from harness.data.indexed import IndexedTokens, write_indexed
from harness.data.split import stores_separator, write_splits
from harness.data.tokenizer import encoded, tokenizer_hash, vocab_size
from harness.errors import ConfigError, Unusable, shortened
from harness.files.regular_file import read_json

# Increase this if the same text would give other tokens, ...
FORMAT = 3
# ... and this one if the files of the split change.
SPLIT_FORMAT = 2
TOKENS, PROMPTS, SPLIT_FACTS = "tokens", "prompts.npy", "split.json"
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


def write_tokens(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, folder: Path, report: Report
) -> None:
    """Write the tokens, and the number of prompt tokens of each document."""
    prompts, in_prompt, characters, reported = array("i"), 0, 0, 0

    def sequences() -> Iterator[tuple[list[int], bool]]:
        """Yield (ids of the next piece, True if its document ends there)."""
        nonlocal in_prompt, characters, reported
        for group, encodings in encoded(tokenizer, corpus.pieces()):
            for piece, ids in zip(group, encodings, strict=True):
                in_prompt += len(ids) * piece.is_prompt
                if piece.is_last:
                    prompts.append(in_prompt)
                    in_prompt = 0
                    ids.append(tokenizer.eos_token_id)
                yield ids, piece.is_last
            characters += sum(len(piece.text) for piece in group)
            if characters - reported > _REPORT_EVERY_CHARS:
                reported = characters
                report(f"tokenised {characters / corpus.num_bytes():.0%} of {corpus.path}")

    write_indexed(folder / TOKENS, vocab_size(tokenizer), sequences())
    if not characters:
        raise ConfigError(f"data.path: {corpus.path} holds no text ({len(prompts)} documents)")
    np.save(folder / PROMPTS, np.asarray(prompts, dtype=np.int32))


def write_split(
    tokens: IndexedTokens,
    prompts: NDArray[np.int32] | None,
    tokenizer: PreTrainedTokenizerBase,
    held_out: float,
    folder: Path,
    report: Report,
) -> None:
    """Write both sides of the split and its facts; `prompts` is None for the user's .bin/.idx."""
    modified_ns = tokens.bin_path.stat().st_mtime_ns if prompts is None else None
    starts = tokens.document_starts()
    if prompts is None:
        prompts = np.zeros(len(starts) - 1, dtype=np.int32)
    add_separator = not stores_separator(tokens, starts, tokenizer.eos_token_id)
    write_splits(folder, starts, prompts, held_out, add_separator=add_separator)
    layout = hashlib.sha256(f"{tokens.bin_bytes}:{tokenizer_hash(tokenizer)}:".encode())
    layout.update(tokens.idx_path.read_bytes())
    layout.update(prompts.tobytes())
    ids = survey(tokens.ids, modified_ns, report)
    facts = SplitFacts(
        combined(ids, layout.hexdigest()), add_separator, len(prompts), ids.lowest, ids.highest
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
