"""The data of a plan as a dry run shows it, without reading all files."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from harness.config.data_section import DataConfig, MixSource
from harness.errors import ConfigError, Unusable
from harness.files.chat import Chat
from harness.files.corpus_files import TOPICS, CorpusFiles, find_files
from harness.files.data_format import BadLines
from harness.files.file_kinds import format_of
from harness.files.first_bytes import why_not_utf_8
from harness.files.notes import Notes
from harness.files.pieces import Ids, begins, shortened
from harness.files.rows import documents_of, kind_of_document, why_not_mixed
from harness.files.token_index import read_header
from harness.plan.batches import Counts
from harness.plan.token_counts import Row, Rows, TokenCounter

# Limits that keep a dry run fast.
_MOST_FILES = 20_000
_MOST_BYTES = 1 << 26
_MOST_RECORDS = 1000
_SHOWN = 16  # number of a folder's pairs to show
_SAMPLED_FILES, _SAMPLED_BYTES = 16, 1 << 14


@dataclass(frozen=True)
class Glance:
    """Documents of a source, as a dry run shows them."""

    text: str
    documents: int
    """Number of documents; approximate if files were not read to the end."""
    tokens: int
    """Number of tokens; approximate for text."""
    windows: int
    """Number of windows that the documents fill; approximate for text."""
    is_masked: bool = False
    """True if prompts are masked from the loss."""
    note: str = ""
    """A warning about the documents; "" if there is none."""


@dataclass(frozen=True)
class Glances:
    """Sources and held-out sets of a plan, as a dry run shows them."""

    data: DataConfig
    sources: dict[str, Glance]
    sets: dict[str, Glance]

    def counts(self) -> Counts:
        """Return the approximate size of the data that a run trains on."""
        data = self.data
        kept = 1.0 if data.eval_path else 1.0 - data.held_out
        examples, windows = (
            max(1, round(kept * sum(getattr(glance, of_all) for glance in self.sources.values())))
            for of_all in ("documents", "windows")
        )
        is_masked = any(glance.is_masked for glance in self.sources.values())
        return Counts(examples, windows, is_masked, is_rough=True)

    def notes(self) -> list[str]:
        """Return the warnings about sources and held-out sets."""
        return [seen.note for seen in (*self.sources.values(), *self.sets.values()) if seen.note]

    def lines(self, samples: int | None) -> list[str]:
        """Return one line per source and held-out set, for a run of `samples` samples."""
        sets = {f"held-out set {name}".rstrip(): glance for name, glance in self.sets.items()}
        named = {**self.sources, **sets}
        lines = [f"{name}: {seen.text}" if name else seen.text for name, seen in named.items()]
        tokens = [glance.tokens for glance in self.sources.values()]
        read = samples and samples * self.data.seq_len
        for number, source in enumerate(self.data.mix):
            of_all = sum(tokens[: len(self.data.mix)])
            lines[number] += _share(self.data, source, tokens[number], of_all, read)
        return lines


def glances(data: DataConfig, init_from: str | None = None) -> Glances:
    """Return a dry run's view of each source and held-out set. `init_from`: initial weights, which
    bring their tokenizer.

    Raises ConfigError with the problems of everything that cannot be read, and of wrong rows.
    """
    problems, seen = [], []
    for of_kind in (data.sources(), data.eval_sets()):
        by_name = {}
        for name, section in of_kind.items():
            try:
                by_name[name] = glance(section, init_from)
            except ConfigError as error:
                problems += error.problems
        seen.append(by_name)
    if problems:
        raise ConfigError(problems)
    return Glances(data, *seen)


def _share(data: DataConfig, source: MixSource, tokens: int, of_all: int, read: int | None) -> str:
    """Return a source's share and its approximate number of epochs, as text."""
    if source.share is None:
        share, text = tokens / max(of_all, 1), "by size"
        if data.mix_temperature not in (None, 1):
            return f"; share by size, data.mix_temperature {data.mix_temperature:g}"
    else:
        share = source.share / sum(part.share or 0 for part in data.mix)
        text = f"{share:.2%}"
    if source.then is not None:
        then = source.then / sum(part.then or 0 for part in data.mix)
        return f"; share {text}, then {then:.2%}"
    if not read:
        return f"; share {text}"
    epochs = share * read / max(tokens, 1)
    most = f" (at most {source.epochs:g})" if source.epochs is not None else ""
    return f"; share {text}, roughly {epochs:.2g} epochs{most}"


def look_for(data: DataConfig) -> None:
    """Raise ConfigError if files of a source are missing, or headers of pairs cannot be read."""
    corpus = find_files(data.path, data.format, _MOST_FILES, data.split)
    if corpus.kind == "indexed":
        with _as_config_errors():
            _pairs(corpus, data)


@contextmanager
def _as_config_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {error.filename}: {error.strerror}") from error
    except Unusable as error:
        raise ConfigError(f"data.path: {error}") from error


def glance(data: DataConfig, init_from: str | None = None) -> Glance:
    """Return one source as a dry run shows it. Raises ConfigError if it cannot be read here."""
    corpus = find_files(data.path, data.format, _MOST_FILES, data.split)
    with _as_config_errors():
        if corpus.kind == "indexed":
            seen = _pairs(corpus, data)
        else:
            seen = _text(corpus, data, TokenCounter(data, init_from))
    bounds = {"min_tokens": data.min_tokens, "max_tokens": data.max_tokens}
    limits = " and ".join(f"{key}={value}" for key, value in bounds.items() if value is not None)
    return replace(seen, text=f"{seen.text}; only those with {limits} are read") if limits else seen


def _pairs(corpus: CorpusFiles, data: DataConfig) -> Glance:
    counts = {}
    for prefix in corpus.pairs:
        header = read_header(Path(f"{prefix}.idx"))
        tokens = Path(f"{prefix}.bin").stat().st_size // header.id_bytes
        counts[prefix] = header.bounds - 1, tokens
    documents, tokens = map(sum, zip(*counts.values(), strict=True))
    windows = tokens // data.seq_len if data.batching == "packed" else documents
    text = f"{documents:,} documents, {tokens:,} tokens in "
    if not corpus.is_folder_of_pairs:
        return Glance(f"{text}{corpus.files[0]}", documents, tokens, windows)
    left_out = _left_out(corpus)
    each = [
        f"{prefix.relative_to(corpus.path)} {documents:,} documents, {tokens:,} tokens"
        for prefix, (documents, tokens) in counts.items()
    ]
    more = f"; {len(each) - _SHOWN:,} more" if len(each) > _SHOWN else ""
    at_least = "at least " if len(corpus.files) >= _MOST_FILES - 1 else ""
    shown = f"{'; '.join(each[:_SHOWN])}{more}{left_out}"
    text += f"{at_least}{len(each):,} pairs of {corpus.path}: {shown}"
    return Glance(text, documents, tokens, windows)


def _text(corpus: CorpusFiles, data: DataConfig, counter: TokenCounter) -> Glance:
    rows, left, tables, texts = 0, _MOST_BYTES, list[Path](), list[Path]()
    for file in corpus.files:
        count = format_of(file, corpus.format).count
        (texts if count is None else tables).append(file)
        if count is not None and left:
            of_file, left = count(file, left)
            rows += of_file
    at_least = "" if left and len(corpus.files) < _MOST_FILES else "at least "
    source = "Python's own library" if corpus.kind == "library" else str(corpus.path)
    pages = _pages() - 1 if corpus.kind == "library" and texts[-1].match(str(TOPICS)) else 0
    shown = f"{source}: {at_least}{len(texts) + pages + rows:,} documents"
    first, documents, share = _first(corpus, data)
    if not left:  # extrapolated to the bytes not read
        rows = round(rows * max(1, sum(file.stat().st_size for file in tables) / _MOST_BYTES))
    lengths, of_texts = counter.lengths(documents), _lengths_of(texts, counter)
    rows = round(rows * share)
    tokens = sum(of_texts) + round(rows * sum(lengths) / max(len(lengths), 1))
    is_masked = data.learn != "all" and any(map(_is_masked, documents))
    whole = data.batching != "packed" or (data.packing or ("stream", "whole")[is_masked]) == "whole"
    seen = Glance(
        f"{shown}, {corpus.num_bytes() / 2**20:,.1f} MiB (roughly {tokens:,} tokens), "
        f"the first {first}{_left_out(corpus)}",
        len(texts) + pages + rows,
        tokens,
        tokens // data.seq_len,
        is_masked,
    )
    seen = _read(seen, lengths or of_texts, data, whole=whole)
    return replace(seen, note=f"{corpus.path}: {seen.note}" if seen.note else "")


def _read(seen: Glance, lengths: list[int], data: DataConfig, *, whole: bool) -> Glance:
    """Return the part of `seen` that a run reads, extrapolated from the `lengths` of some documents
    in tokens.
    """
    least, most = data.min_tokens or 0, data.max_tokens or math.inf
    inside = [length for length in lengths if least <= length <= most]
    per_length = seen.documents / max(len(lengths), 1)
    if len(inside) < len(lengths):
        documents = round(len(inside) * per_length)
        tokens = round(seen.tokens * sum(inside) / max(sum(lengths), 1))
        seen = replace(seen, documents=documents, tokens=tokens, windows=tokens // data.seq_len)
    if not whole:
        return seen
    kept = [length for length in inside if data.too_long != "drop" or length <= data.seq_len]
    bins = len(kept) if data.batching != "packed" else _windows(kept, data.seq_len)
    longer, note = sum(length > data.seq_len for length in inside), ""
    if longer:
        number = round(longer * per_length)
        note = data.too_long_text(number, seen.documents, "roughly ")
    return replace(seen, windows=round(bins * per_length), note=note)


def _windows(lengths: list[int], seq_len: int) -> int:
    """Return the number of windows that best-fit packing fills with whole documents."""
    free: list[int] = []  # of each window, ascending
    for length in sorted(lengths, reverse=True):
        place = bisect_left(free, min(length, seq_len))
        space = free.pop(place) if place < len(free) else seq_len
        insort(free, space - min(length, seq_len))
    return len(free)


def _lengths_of(texts: list[Path], counter: TokenCounter) -> list[int]:
    """Return the approximate number of tokens in each file, which is one document, from the first
    _SAMPLED_BYTES of some files.
    """
    heads = []
    for file in texts[:: len(texts) // _SAMPLED_FILES or 1]:
        with file.open("rb") as opened:
            heads.append(opened.read(_SAMPLED_BYTES).decode(errors="replace"))
    size = counter.bytes_per_token(heads)
    return [round(file.stat().st_size / size) + 1 for file in texts]


def _pages() -> int:
    """Return the number of documents in the library's last file."""
    from pydoc_data.topics import topics

    return len(topics)


def _left_out(corpus: CorpusFiles) -> str:
    """Return how files are read if their names do not tell, and which files are not read."""
    parts = [corpus.split_text, f"left out: {corpus.left_out}" if corpus.left_out else ""]
    if corpus.kind == "text":
        parts.insert(0, format_of(corpus.files[0], corpus.format).note(corpus.files[0]))
    return "".join(f"; {part}" for part in parts if part)


def _first(corpus: CorpusFiles, data: DataConfig) -> tuple[str, Rows, float]:
    """Return how the first document begins, the first documents, and the share of the first records
    that became documents.
    """
    file = corpus.files[0]
    format = format_of(file, corpus.format)
    if format.begin is not None:
        return format.begin(file), [], 1.0
    assert format.records is not None, "a format has pieces or records"
    bad_lines, documents, notes = BadLines(limit=data.most_bad_rows), list[Row](), Notes()
    records, first = islice(format.records(file, bad_lines), _MOST_RECORDS), None
    try:
        rows = documents_of(file, records, bad_lines, data.where, data.columns)
        for line, _, (document, of_record) in rows:
            kind = kind_of_document(document)
            first = first or (kind, f"{file}:{line}")
            if kind != first[0]:
                bad_lines.add(file, why_not_mixed(kind, first), line)
                continue
            documents.append(document if isinstance(document, Chat | Ids) else [*document])
            notes.add(of_record)
    except UnicodeDecodeError as error:
        bad_lines.add(file, f"{error}; it {why_not_utf_8(file)}")
    if bad_lines.limit is None or (bad_lines.seen < _MOST_RECORDS and len(corpus.files) == 1):
        bad_lines.require_good_rows()
    bad = bad_lines.skipped_text("bad rows among the first, to be left out")
    if not documents:
        return f"cannot be read: {bad or 'there is none'}", [], 1.0
    unread = f"left out of {len(documents):,} rows: {notes.text()}" if notes else ""
    text = "; ".join(part for part in (_begin(documents), unread, bad) if part)
    return text, documents, len(documents) / max(bad_lines.seen, 1)


def _is_masked(document: Row) -> bool:
    """Return True if part of a document is masked from the loss."""
    if isinstance(document, Chat):
        return document.num_learned < document.num_characters
    pieces = [document] if isinstance(document, Ids) else document
    return not all(piece.is_learned for piece in pieces)


def _begin(documents: Rows) -> str:
    """Return how the first document begins; for conversations also turns and share of the loss."""
    first = documents[0]
    if isinstance(first, Ids):
        return f"has {len(first.ids):,} token ids"
    if isinstance(first, list):
        return begins(next((piece.text for piece in first if piece.text), ""))
    chats = [document for document in documents if isinstance(document, Chat)]
    turns = sum(len(chat.messages) for chat in chats) / len(chats)
    characters = sum(chat.num_characters for chat in chats) or 1
    learned = sum(chat.num_learned for chat in chats) / characters
    asked = next(turn for turn in chats[0].messages if turn["role"] == "user")
    return (
        f"{len(chats):,} conversations of {turns:.1f} turns, {learned:.0%} of their text the "
        f"assistant's; the first asks {shortened(asked['content'])!r}"
    )
