"""The data of a run as a dry run shows it: the run's own reader, stopped after the first records.

Without data.tokenizer, one is trained as by the run, if all documents were read or if they are
conversations; otherwise tokens are counted from the number of bytes.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.config.data_section import DataConfig, MixSource
from harness.data.spec import DataSpec, corpora_of, corpus_of, unused_template
from harness.errors import ConfigError, Unusable
from harness.files.chat import NO_TEMPLATE, Chat
from harness.files.corpus import Corpus, ReadLimit, holds_ids
from harness.files.corpus_files import TOPICS
from harness.files.data_format import BadLines
from harness.files.file_kinds import format_of
from harness.files.notes import Notes
from harness.files.pieces import Ids, Piece, begins, shortened
from harness.files.token_index import read_header
from harness.plan.batches import Counts

_MOST_BYTES = 1 << 26  # to count the records of, or to read as token ids
_SHOWN = 16  # number of a folder's pairs to show
# Bytes per token of a tokenizer that is trained on its text, by log2 of its vocabulary size: the
# mean of Python's library (11 MB: 1.90, 3.00, 3.74, 4.09) and of English manuals and Markdown
# (3 MB: 1.71, 2.87, 3.85, 4.39).
_BYTES_PER_TOKEN = ((9, 1.80), (11, 2.94), (13, 3.79), (15, 4.24))
_OF_ENGLISH = 4.0  # bytes per token of a tokenizer that is not here

Row = Chat | Ids | list[Piece]


@dataclass(frozen=True)
class Glance:
    """Documents of a source, as a dry run shows them. Numbers are extrapolated if the source was
    not read to its end, or not tokenized.
    """

    text: str
    documents: int
    tokens: int
    windows: int
    """Number of windows that the documents fill."""
    is_masked: bool = False
    """True if prompts are masked from the loss."""
    notes: tuple[str, ...] = ()
    """Warnings about the documents."""


@dataclass(frozen=True)
class Glances:
    """Sources and held-out sets of a run, as a dry run shows them."""

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

    @property
    def has_documents(self) -> bool:
        """True if attention is confined to documents."""
        return self.data.masks_documents(any(glance.is_masked for glance in self._all))

    def notes(self) -> list[str]:
        """Return the warnings about sources and held-out sets."""
        return [note for seen in self._all for note in seen.notes]

    @property
    def _all(self) -> tuple[Glance, ...]:
        return (*self.sources.values(), *self.sets.values())

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


def glances(spec: DataSpec, *, elsewhere: bool = False) -> Glances:
    """Return a dry run's view of each source and held-out set. `elsewhere`: the run is for another
    machine, which may have a tokenizer that this one lacks.

    Raises ConfigError with the problems for which the run would reject data and tokenizer.
    """
    spec = replace(spec, limit=ReadLimit())
    tokenizer, problems = None, list[str]()
    corpora = corpora_of(spec)
    is_trained = spec.config.tokenizer is None
    if is_trained:
        for corpus in corpora:
            if corpus.kind == "indexed":
                raise ConfigError(holds_ids(corpus.path))
    is_rough = is_trained and not all(_Head.of(corpus).is_whole for corpus in corpora)
    if not is_rough or any(corpus.holds_chats for corpus in corpora):
        tokenizer = _tokenizer_here(spec, elsewhere, is_rough)
    seen: list[dict[str, Glance]] = [{}, {}]
    for glances_of, specs in zip(seen, (spec.sources(), spec.eval_sets()), strict=True):
        for name, of_source in specs.items():
            try:
                glances_of[name] = glance(of_source, tokenizer, name, is_rough=is_rough)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Glances(spec.config, *seen)


def _tokenizer_here(spec: DataSpec, elsewhere: bool, is_rough: bool) -> Any:
    """Return the run's tokenizer, or one trained on the first documents; None if this machine lacks
    it and the run is for another one, or if transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:  # a laptop that only plans
        return None
    from harness.data.run_tokenizer import build_tokenizer, cached_tokenizer
    from harness.data.tokenizer import NoTokenizer, tokenizer_hash

    try:
        tokenizer = cached_tokenizer(spec)
        if tokenizer is None:
            with tempfile.TemporaryDirectory() as cache:
                config = spec.config.model_copy(update={"cache_dir": cache})
                tokenizer = build_tokenizer(replace(spec, config=config), lambda line: None)
    except NoTokenizer:
        if elsewhere:
            return None
        raise
    if not is_rough:
        spec.require_tokenizer(tokenizer_hash(tokenizer))
    return tokenizer


def glance(
    spec: DataSpec, tokenizer: Any = None, name: str = "", *, is_rough: bool = False
) -> Glance:
    """Return one source as a dry run shows it. `is_rough`: the run's tokenizer is another one.
    Raises ConfigError as the run would.
    """
    spec = replace(spec, limit=spec.limit or ReadLimit())
    corpus = corpus_of(spec)
    read = _pairs if corpus.kind == "indexed" else _text
    try:
        seen = read(corpus, spec, tokenizer, name, is_rough)
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {error.filename}: {error.strerror}") from error
    except Unusable as error:
        raise ConfigError(f"data.path: {error}") from error
    config = spec.config
    bounds = {"min_tokens": config.min_tokens, "max_tokens": config.max_tokens}
    limits = " and ".join(f"{key}={value}" for key, value in bounds.items() if value is not None)
    return replace(seen, text=f"{seen.text}; only those with {limits} are read") if limits else seen


def _pairs(corpus: Corpus, spec: DataSpec, tokenizer: Any, name: str, is_rough: bool) -> Glance:
    if tokenizer is not None and corpus.num_bytes() <= _MOST_BYTES:
        _exact_size(spec, tokenizer, name, is_whole=True)
    counts = {}
    for prefix in corpus.pairs:
        header = read_header(Path(f"{prefix}.idx"))
        tokens = Path(f"{prefix}.bin").stat().st_size // header.id_bytes
        counts[prefix] = header.bounds - 1, tokens
    documents, tokens = map(sum, zip(*counts.values(), strict=True))
    windows = tokens // spec.config.seq_len if spec.config.batching == "packed" else documents
    text = f"{documents:,} documents, {tokens:,} tokens in "
    if not corpus.is_folder_of_pairs:
        return Glance(f"{text}{corpus.files[0]}", documents, tokens, windows)
    each = [
        f"{prefix.relative_to(corpus.path)} {documents:,} documents, {tokens:,} tokens"
        for prefix, (documents, tokens) in counts.items()
    ]
    more = f"; {len(each) - _SHOWN:,} more" if len(each) > _SHOWN else ""
    shown = f"{'; '.join(each[:_SHOWN])}{more}{_left_out(corpus)}"
    text += f"{len(each):,} pairs of {corpus.path}: {shown}"
    return Glance(text, documents, tokens, windows)


@dataclass(frozen=True)
class _Head:
    """The first documents of a corpus, or all of them."""

    documents: list[Row]
    notes: Notes
    bad_lines: BadLines

    @classmethod
    def of(cls, corpus: Corpus) -> _Head:
        """Read them. Raises ConfigError for bad rows."""
        documents, notes, bad_lines = list[Row](), Notes(), corpus.bad_lines()
        pieces: list[Piece] = []
        for part in corpus.parts(bad_lines):
            notes.add(part.notes)
            if isinstance(part.document, Piece):
                pieces.append(part.document)
            if part.is_last:
                whole = pieces if isinstance(part.document, Piece) else part.document
                documents.append(whole)
                pieces = []
        bad_lines.require_good_rows()
        return cls(documents, notes, bad_lines)

    @property
    def is_whole(self) -> bool:
        """True if the corpus has no other documents."""
        return not self.bad_lines.is_cut

    @property
    def num_bytes(self) -> int:
        """Bytes of the text in these documents."""
        return sum(len(_written(row).encode(errors="replace")) for row in self.documents)


@dataclass(frozen=True)
class _Size:
    """Size of a part of a corpus that was read, or of all of it."""

    documents: int
    tokens: int
    windows: int
    is_masked: bool
    longer: int
    """Documents longer than data.seq_len whose windows hold whole documents."""
    is_stream: bool
    """True if windows are cut from one stream of all documents."""
    notes: Notes
    warnings: Mapping[str, str]
    """Warnings about documents, by kind."""


def _text(corpus: Corpus, spec: DataSpec, tokenizer: Any, name: str, is_rough: bool) -> Glance:
    if tokenizer is not None and corpus.holds_chats:
        from harness.data.chat_tokens import ChatEncoder

        ChatEncoder(tokenizer, values=spec.config.template_values)  # rejects what the run would
    head = _Head.of(corpus)
    if spec.config.tokenizer is None:
        _require_trainable(corpus, spec.config, head)
    if tokenizer is None:
        size = _rough_size(head, spec.config)
    else:
        size = _exact_size(spec, tokenizer, name, is_whole=head.is_whole)
    number, is_least = _num_documents(corpus, head)
    of_documents, of_text = _scales(corpus, head, number)
    documents, longer = (round(of_documents * n) for n in (size.documents, size.longer))
    tokens, windows = (round(of_text * n) for n in (size.tokens, size.windows))
    if size.is_stream and not head.is_whole:
        windows = tokens // spec.config.seq_len
    is_rough = is_rough or not head.is_whole or tokenizer is None
    roughly = "roughly " if is_rough else ""
    among = "" if head.is_whole else f"among the first {len(head.documents):,} documents, "
    said = {kind: f"{among}{text}" for kind, text in size.warnings.items()}
    said |= unused_template(corpus, spec.config)
    if longer:
        said["too_long"] = spec.config.too_long_text(
            longer, documents, roughly, of_pairs=bool(spec.preferences)
        )
    path = "Python's own library" if corpus.kind == "library" else str(corpus.path)
    text = (
        f"{path}: {'at least ' * is_least}{number:,} documents, {corpus.num_bytes() / 2**20:,.1f} "
        f"MiB ({roughly}{tokens:,} tokens), the first {_first(head, size.notes)}{_left_out(corpus)}"
    )
    notes = tuple(f"{corpus.path}: {one}" for one in said.values())
    return Glance(text, documents, tokens, windows, size.is_masked, notes)


def _num_documents(corpus: Corpus, head: _Head) -> tuple[int, bool]:
    """Return the number of documents, and True if there may be more: records are counted in the
    first _MOST_BYTES, and of those read some may be bad.
    """
    read = len(head.documents)
    if head.is_whole:
        return read, False
    rows, left, texts = 0, _MOST_BYTES, 0
    for file in corpus.files:
        count = format_of(file, corpus.format).count if corpus.kind == "text" else None
        texts += count is None
        if count is not None and left:
            of_file, left = count(file, left)
            rows += of_file
    if corpus.kind == "library" and corpus.files[-1].match(str(TOPICS)):
        texts += _pages() - 1
    return max(texts + rows, read), not left


def _scales(corpus: Corpus, head: _Head, number: int) -> tuple[float, float]:
    """Return the documents and the text of a corpus in multiples of what was read."""
    if head.is_whole:
        return 1.0, 1.0
    if not head.bad_lines.seen:  # each file is a document
        of_text = corpus.num_bytes() / max(head.num_bytes, 1)
        return number / max(len(head.documents), 1), of_text
    size = sum(file.stat().st_size for file in corpus.files)
    of_rows = number * max(1.0, size / _MOST_BYTES) / head.bad_lines.seen
    return of_rows, of_rows


def _pages() -> int:
    """Return the number of documents in the library's last file."""
    from pydoc_data.topics import topics

    return len(topics)


def _exact_size(spec: DataSpec, tokenizer: Any, name: str, *, is_whole: bool) -> _Size:
    """Return the size of what was read, opened as the run does, in a temporary cache.

    Raises ConfigError, for a corpus that `is_whole` also if a side of the split has no sample.
    """
    from harness.data.packed_documents import WholeWindows
    from harness.data.packing import require_contiguous
    from harness.data.source import open_source

    with tempfile.TemporaryDirectory() as cache:
        source = open_source(name, spec, tokenizer, Path(cache), lambda line: None)
        if is_whole and (problems := [*source.problems(spec)]):
            raise ConfigError(problems)
        if is_whole and spec.rows is not None and spec.splits:
            require_contiguous(source.sides["train"], spec.rows)
        sides = [*source.sides.values()]
        return _Size(
            sum(side.split.num_documents for side in sides),
            source.tokens,
            sum(side.num_windows for side in sides),
            source.is_masked,
            sum(side.facts.too_long for side in sides if isinstance(side, WholeWindows)),
            not sides[0].holds_whole_documents,
            source.notes,
            source.warnings(),
        )


def _require_trainable(corpus: Corpus, config: DataConfig, head: _Head) -> None:
    """Raise ConfigError as training a tokenizer on the corpus would."""
    first = head.documents[0] if head.documents else None
    if isinstance(first, Ids):
        raise ConfigError(holds_ids(corpus.first_document[1] if corpus.first_document else ""))
    if isinstance(first, Chat) and config.template is None:
        raise ConfigError(NO_TEMPLATE)
    if head.is_whole and not any(map(_written, head.documents)):
        raise ConfigError(f"data.path: {corpus.path} holds no text to train a tokenizer on")


_AROUND_A_TURN = 5  # tokens of a chat template: start, role, line break, end, line break


def _rough_size(head: _Head, data: DataConfig) -> _Size:
    """Return the approximate size of the documents that were read, from their bytes."""
    per_token = _usual_bytes_per_token(data)
    least, most = data.min_tokens or 0, data.max_tokens or math.inf
    lengths = []
    for row in head.documents:
        around = _AROUND_A_TURN * len(row.messages) if isinstance(row, Chat) else 0
        size = len(_written(row).encode(errors="replace"))
        lengths.append(math.ceil(size / per_token) + around + 1)
    inside = [length for length in lengths if least <= length <= most]
    tokens, is_masked = sum(inside), data.learn != "all" and any(map(_is_masked, head.documents))
    if data.batching == "packed" and (data.packing or ("stream", "whole")[is_masked]) == "stream":
        windows = tokens // data.seq_len
        return _Size(len(inside), tokens, windows, is_masked, 0, True, head.notes, {})
    longer = sum(length > data.seq_len for length in inside)
    kept = [n for n in inside if data.too_long != "drop" or n <= data.seq_len]
    windows = len(kept) if data.batching != "packed" else _windows(kept, data.seq_len)
    return _Size(len(inside), tokens, windows, is_masked, longer, False, head.notes, {})


def _windows(lengths: Sequence[int], seq_len: int) -> int:
    """Return the number of windows that hold whole documents of these lengths."""
    import numpy as np

    from harness.data.packed_documents import BestFit

    cut = np.minimum(np.asarray(lengths, dtype=np.int64), seq_len)
    return BestFit(np.bincount(cut, minlength=seq_len + 1), seq_len).num_bins


def _usual_bytes_per_token(data: DataConfig) -> float:
    """Return usual bytes per token; those of a trained tokenizer depend on its vocabulary size."""
    if data.tokenizer is not None:
        return _OF_ENGLISH
    size, points = math.log2(data.vocab_size), _BYTES_PER_TOKEN
    (low, least), (high, most) = next(
        (pair for pair in pairwise(points) if size <= pair[1][0]), points[-2:]
    )
    size = min(max(size, low - 1), high + 1)
    return least + (most - least) * (size - low) / (high - low)


def _written(row: Row) -> str:
    """Return the text of a document; "" for token ids."""
    if isinstance(row, Chat):
        return "\n".join(message["content"] or "" for message in row.messages)
    return "" if isinstance(row, Ids) else "".join(piece.text for piece in row)


def _is_masked(row: Row) -> bool:
    """Return True if part of a document is masked from the loss."""
    if isinstance(row, Chat):
        return row.num_learned < row.num_characters
    return not all(part.is_learned for part in ([row] if isinstance(row, Ids) else row))


def _left_out(corpus: Corpus) -> str:
    """Return how files are read if their names do not tell, and which files are not read."""
    parts = [corpus.note, corpus.split_text]
    parts += [f"left out: {corpus.left_out}"] if corpus.left_out else []
    return "".join(f"; {part}" for part in parts if part)


def _first(head: _Head, notes: Mapping[Any, int]) -> str:
    """Return how the first document begins, what is not read of the rows, and which are bad."""
    bad = head.bad_lines.skipped_text("bad rows among the first, to be left out")
    if not head.documents:
        return f"cannot be read: {bad or 'there is none'}"
    said = Notes(notes)
    left_out = f"left out of {len(head.documents):,} rows: {said.text()}" if said.text() else ""
    parts = (_begin(head.documents), left_out, said.unset(), bad)
    return "; ".join(part for part in parts if part)


def _begin(documents: Sequence[Row]) -> str:
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
    said = next((turn for turn in chats[0].messages if turn["role"] == "user"), None)
    begin = f"asks {shortened(said['content'])!r}" if said else "has no user turn"
    return (
        f"{len(chats):,} conversations of {turns:.1f} turns, {learned:.0%} of their text the "
        f"assistant's; the first {begin}"
    )
