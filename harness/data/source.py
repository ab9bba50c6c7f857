"""One corpus as sample streams, using the cache."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from harness.config.data_section import ANY_LENGTH, DataConfig, TokenBounds
from harness.data.cache import Report, build_once, cache_key, cached_array
from harness.data.chat_tokens import divided_control_tokens
from harness.data.encoding import HowEncoded
from harness.data.packed_documents import WHOLE_FORMAT, WholeWindows, write_whole
from harness.data.packing import Packed
from harness.data.pair import NO_MASKS, IndexedTokens, Masks, load_masks
from harness.data.prepare import (
    CHOSEN,
    FORMAT,
    MASKS,
    SPLIT_FACTS,
    SPLIT_FORMAT,
    TOKENS,
    SplitFacts,
    read_facts,
    read_notes,
    read_skipped,
    require_ids_of,
    write_split,
    write_tokens,
)
from harness.data.rendering import writes_date
from harness.data.spec import DataSpec, corpus_of, unused_template
from harness.data.split import SIDES, load_split
from harness.data.tokenizer import added_at_begin, tokenizer_hash, trims_spans, vocab_size
from harness.data.turn_places import WITHOUT_END
from harness.errors import ConfigError
from harness.files.corpus import Corpus
from harness.files.data_format import BadLines
from harness.files.kept_sample import masks_of
from harness.files.notes import Note, Notes
from harness.files.pieces import shortened

_WITHOUT_END: Note = ("turns", WITHOUT_END)
_FIRST_TOKENS = 64  # more than a line of the summary holds


@dataclass(frozen=True)
class Source:
    """One corpus, packed into windows."""

    name: str
    """Its name in data.mix or data.eval_path; "" if it is the only one."""
    corpus: Corpus
    facts: SplitFacts
    begins: str
    """First line of the first document, as decoded by the tokenizer."""
    sides: Mapping[str, Packed]
    """Windows of the train split and, if any documents are held out, of the held-out split."""
    pairs: tuple[tuple[str, int, int], ...] = ()
    """Name, documents and tokens of each .bin/.idx pair, if the corpus is a folder of pairs."""
    bounds: TokenBounds = ANY_LENGTH
    """Length limits of the documents that are read."""
    skipped: BadLines = field(default_factory=BadLines)
    """Records that are skipped (data.bad_rows)."""
    notes: Notes = field(default_factory=Notes)
    """Content of its rows that is not read or not trained on."""
    begin: tuple[int, ...] = ()
    """Ids that the tokenizer prepends to every document."""
    added: str = ""
    """The prepended ids as text."""
    day: str | None = None
    """The date that the chat template writes; None if it writes no date."""
    config: DataConfig = field(default_factory=DataConfig)
    divided: Mapping[str, int] = field(default_factory=dict)
    """Control tokens of the first conversation that are text, each with its number of tokens."""

    @property
    def tokens(self) -> int:
        """Number of tokens in all documents, with separators."""
        return sum(packed.split.num_tokens for packed in self.sides.values())

    @property
    def is_masked(self) -> bool:
        """True if the loss mask excludes some tokens."""
        return any(packed.split.is_masked for packed in self.sides.values())

    @property
    def _of_other_length(self) -> str:
        """Counts of documents that are too short or too long, as text; "" if there are none."""
        return self.bounds.left_out(self.facts.shorter, self.facts.longer)

    def summary(self) -> str:
        """Return one line about the source, so that users can check that it is the right data."""
        name = f"{self.name}: " if self.name else ""
        pairs = f"{len(self.pairs):,} .bin/.idx pairs, " if self.pairs else ""
        held_out = learned = ""
        if "held_out" in self.sides:
            held_out = f", of which {self.sides['held_out'].split.num_tokens:,} are held out"
        if self.is_masked:
            count = sum(map(_num_learned, self.sides.values()))
            joint = " and" if held_out else ", of which"
            learned = f"{joint} {count:,} ({count / self.tokens:.1%}) are learned"
        more = [self.corpus.note]
        if self._of_other_length:
            more.append(f"not read: {self._of_other_length}")
        if self.corpus.left_out:
            more.append(f"left out: {self.corpus.left_out}")
        if isinstance(packed := self.sides["train"], WholeWindows):
            more.append(f"whole documents in {packed.num_windows:,} windows: {packed.counts()}")
        more += [text for _, text, _ in self._remarks()]
        return (
            f"{name}{self.corpus.path}: {pairs}{self.facts.documents:,} documents, "
            f"{self.tokens:,} tokens{held_out}{learned}; the first begins {self.begins!r}"
            + "".join(f"; {text}" for text in more if text)
        )

    def _remarks(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield the remarks for the summary and the events: kind, text and counts of each."""
        if self.skipped.count:
            yield "bad_rows", self.skipped.skipped_text(), self.skipped.skipped()
        if self.corpus.split:
            yield "split", self.corpus.split_text, {}
        rows = {note: n for note, n in self.notes.items() if note[0] != "variables"}
        left_out = Notes({note: n for note, n in rows.items() if note != _WITHOUT_END})
        if text := left_out.text():
            text = f"left out of the rows: {text}"
            yield "left_out_of_rows", text, {"counts": left_out.as_json()}
        if self.added:
            text = f"every document begins with {self.added}, which the tokenizer adds to text"
            yield "begins_with", f"{text}, not learned (data.bos)", {}
        if unset := self.notes.unset():
            yield "template_variables", unset, {}
        if self.day:
            yield "date", f"the chat template writes the date {self.day} (data.date)", {}

    def warnings(self) -> dict[str, str]:
        """Return warnings about its documents, by kind of event."""
        said = unused_template(self.corpus, self.config)
        if count := self.notes[_WITHOUT_END]:
            said["turns_without_end"] = (
                f"{count:,} assistant turns are learned without a token that ends them; the "
                "end-of-text token closes at most the last turn of a conversation: set "
                "data.template to one that writes an end token (within {% generation %}, if used)"
            )
        if self.divided:
            shown = ", ".join(f"{name} ({count} pieces)" for name, count in self.divided.items())
            said["divided_control_tokens"] = (
                "the chat template writes control tokens that the tokenizer does not have, which "
                f"are learned as text: {shown}; name a tokenizer with these tokens in "
                "data.tokenizer (docs/models.md#new-tokens), or set data.template to a template "
                "whose tokens it has"
            )
        whole = [side for side in self.sides.values() if isinstance(side, WholeWindows)]
        if longer := sum(side.facts.too_long for side in whole):
            documents = sum(side.split.num_documents for side in whole)
            pairs = bool(self.corpus.preferences)
            said["too_long"] = self.config.too_long_text(longer, documents, of_pairs=pairs)
        if untrained := sum(side.facts.without_target for side in whole):
            longest, seq_len = max(side.facts.longest for side in whole), self.config.seq_len
            remedy = f" (the longest has {longest:,}): raise data.seq_len" * (longest > seq_len)
            said["without_target"] = (
                f"{untrained:,} documents have no token to learn within data.seq_len = "
                f"{seq_len:,} tokens and are not trained on{remedy}"
            )
        return said

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events about the source, for events.jsonl."""
        named = {"source": self.name} if self.name else {}
        if self.corpus.left_out:
            message = f"not read as documents of {self.corpus.path}: {self.corpus.left_out}"
            yield {"kind": "left_out", "message": message, **named}
        for kind, text, counts in self._remarks():
            yield {"kind": kind, "message": f"{self.corpus.path}: {text}", **named, **counts}
        for kind, text in self.warnings().items():
            yield {"kind": kind, "message": f"{self.corpus.path}: {text}", **named}
        if self._of_other_length:
            counts = {key: getattr(self.facts, key) for key in ("documents", "shorter", "longer")}
            message = f"documents of {self.corpus.path} that are not read: {self._of_other_length}"
            yield {"kind": "left_out_by_length", "message": message, **named, **counts}
        for side, packed in self.sides.items():
            if isinstance(packed, WholeWindows):
                counts = {"samples": packed.num_windows, **asdict(packed.facts)}
                yield {"kind": "packed_whole", **named, "side": side, **counts}

    def problems(self, spec: DataSpec) -> Iterator[str]:
        """Yield a problem for each side of the split without a sample."""
        prefix = f"{self.corpus.path}: " if self.name else ""
        share = ""
        if "held_out" in self.sides:
            share = f", or change data.held_out (now {spec.config.held_out})"
        if self.name in spec.config.eval_path and self.corpus.split:
            share = ", or set data.held_out, which evaluates on documents of the train split"
        if self._of_other_length:
            share += f"; {self._of_other_length} were not read ({self.bounds.text()})"
        for side, packed in self.sides.items():
            if packed.num_windows:
                continue
            of_side = f"data.path: {prefix}the {side.replace('_', '-')} split has"
            facts = packed.facts if isinstance(packed, WholeWindows) else None
            if facts is not None and facts.without_target:
                yield (
                    f"{of_side} no document with a token to learn in its first "
                    f"{spec.config.seq_len} tokens (data.seq_len): raise data.seq_len, or set "
                    "data.packing=stream"
                )
            elif facts is not None and facts.dropped and facts.too_long:
                yield (
                    f"{of_side} {facts.too_long:,} documents, all longer than data.seq_len = "
                    f"{spec.config.seq_len:,} tokens (the longest has {facts.longest:,}) and "
                    "dropped: raise data.seq_len"
                    + ", or set data.too_long=cut"
                    * (not spec.preferences)
                )
            else:
                yield (
                    f"{of_side} {packed.split.num_tokens} tokens in {packed.split.num_documents} "
                    f"documents; one window needs data.seq_len + 1 = {spec.config.seq_len + 1}: "
                    f"add text{',' if share else ' or'} lower data.seq_len{share}"
                )


def _num_learned(side: Packed) -> int:
    """Return the number of tokens to train on; for whole documents, of those in windows."""
    if isinstance(side, WholeWindows):
        return side.facts.learned
    return side.split.num_tokens - int(side.split.masked[-1])


def open_source(
    name: str, spec: DataSpec, tokenizer: PreTrainedTokenizerBase, cache: Path, report: Report
) -> Source:
    """Return a source after one process has added any missing parts to the cache."""
    corpus = corpus_of(spec)
    key = tokens_key(corpus, tokenizer, spec)
    num_ids = max(spec.model_vocab_size or 0, vocab_size(tokenizer))
    prefixes, masks, skipped, notes = corpus.pairs, None, BadLines(), Notes()
    how = how_encoded(spec, tokenizer)
    if corpus.kind != "indexed":
        folder = tokens_folder(cache, key)
        build_once(folder, lambda path: write_tokens(corpus, tokenizer, how, path, report), report)
        prefixes, masks = (folder / TOKENS,), load_masks(folder / MASKS)
        skipped = read_skipped(corpus, folder)
        notes = read_notes(folder)
    elif masks_of(corpus.path).is_file():
        if spec.bounds != ANY_LENGTH:
            raise ConfigError(
                f"{spec.bounds.text()}: {corpus.path} holds samples that a run kept, cut from "
                "documents of unknown length: remove it for this data"
            )
        masks = _kept_masks(masks_of(corpus.path))
    tokens = IndexedTokens(*prefixes)
    folder = build_once(
        _split_folder(cache, key, spec),
        lambda path: write_split(
            tokens, masks, tokenizer, _held_out(spec), path, report, spec.bounds
        ),
        report,
    )
    facts = read_facts(folder)
    require_ids_of(tokens, facts, num_ids)
    begin = how.begin if corpus.holds_text else ()
    begin_tokens = len(begin)
    if corpus.kind == "indexed" and masks is not None and _masks_alone(how.begin, tokens, masks):
        begin_tokens = len(tokens.ids)  # a sample that a run kept has several documents in one
    documents = {
        side: {
            "tokens": tokens.ids,
            "split": load_split(folder, side, begin_tokens),
            "masks": masks or NO_MASKS,
            "seq_len": spec.config.seq_len,
            "eos_id": tokenizer.eos_token_id,
            "vocab_size": num_ids,
            "add_separator": facts.add_separator,
        }
        for side in (SIDES if spec.splits else SIDES[:1])
    }
    chosen = None
    if spec.preferences:
        chosen = cached_array(tokens_folder(cache, key) / CHOSEN, np.dtype("i8"))
    sides = _packed(documents, folder, spec, report, chosen)
    pairs = tuple(
        (str(path.relative_to(corpus.path)), documents, count)
        for path, documents, count in (tokens.sizes() if corpus.is_folder_of_pairs else ())
    )
    return Source(
        name,
        corpus,
        facts,
        _first_line(tokens, tokenizer),
        sides,
        pairs,
        spec.bounds,
        skipped,
        notes,
        tuple(begin),
        str(tokenizer.decode([*begin])),
        spec.config.date if _writes_date(corpus, tokenizer) else None,
        spec.config,
        divided_control_tokens(tokenizer, corpus.chats(), spec.config.template_values),
    )


def _kept_masks(path: Path) -> Masks:
    """Return the masks beside a pair that a run kept. Raises ConfigError if they are damaged."""
    try:
        return load_masks(path)
    except ConfigError as error:  # it advises removal, but nothing rebuilds this file
        raise ConfigError(
            f"data.path: {path} is damaged: restore the file that the run kept"
        ) from error


def _masks_alone(begin: Sequence[int], tokens: IndexedTokens, masks: Masks) -> bool:
    """Return True if the only masked tokens are those that the tokenizer prepends to documents."""
    starts, stops = masks.starts[1:], masks.stops[1:]
    if not begin or not len(starts) or int((stops - starts).max()) > len(begin):
        return False
    return bool(np.isin(tokens.ids.read(np.asarray(starts)), [*begin]).all())


def how_encoded(spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> HowEncoded:
    """Return the settings that determine the ids of a source's documents."""
    begin = added_at_begin(tokenizer) if spec.config.bos == "auto" else ()
    return HowEncoded(spec.config.learn, begin, spec.config.date, spec.config.template_values)


def _writes_date(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> bool:
    return corpus.holds_chats and writes_date(tokenizer)


def cached_fingerprint_of(
    spec: DataSpec, tokenizer: PreTrainedTokenizerBase, cache: Path
) -> str | None:
    """Return the fingerprint of a source if it is cached, otherwise None."""
    folder = _split_folder(cache, tokens_key(corpus_of(spec), tokenizer, spec), spec)
    return read_facts(folder).fingerprint if (folder / SPLIT_FACTS).is_file() else None


def _held_out(spec: DataSpec) -> float | None:
    return spec.config.held_out if spec.splits else None


def tokens_key(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, spec: DataSpec) -> str:
    """Return the cache key of a corpus's tokens."""
    masks = masks_of(corpus.path)
    beside: dict[str, Any] = {"masks": masks.stat().st_mtime_ns} if masks.is_file() else {}
    if corpus.holds_chats:
        beside["ends"] = 2  # trained on up to and including the separator
        beside["special_tokens"] = tokenizer.special_tokens_map  # the template may write them
        if spec.config.template_values:
            beside["template_values"] = spec.config.template_values
    if (corpus.holds_chats or corpus.holds_text) and trims_spans(tokenizer):
        beside["spans"] = 2  # with the spaces of each token
    return cache_key(
        **beside,
        format=FORMAT,
        corpus=corpus.identity(),
        tokenizer=tokenizer_hash(tokenizer),
        learn=spec.config.learn,
        template=tokenizer.chat_template if corpus.holds_chats else None,
        # The ids themselves: data.bos has no effect if the tokenizer adds none, and tokenizers with
        # the same vocabulary may add different ones.
        bos=[*how_encoded(spec, tokenizer).begin] if corpus.holds_text else [],
        date=spec.config.date if _writes_date(corpus, tokenizer) else None,
    )


def tokens_folder(cache: Path, key: str) -> Path:
    """Return the cache folder of the tokens with a key."""
    return cache / f"tokens-{key}"


def _split_folder(cache: Path, key: str, spec: DataSpec) -> Path:
    bounds = asdict(spec.bounds) if spec.bounds != ANY_LENGTH else {}
    name = cache_key(source=key, held_out=_held_out(spec), format=SPLIT_FORMAT, **bounds)
    return cache / f"split-{name}"


def _packed(
    documents: Mapping[str, Mapping[str, Any]],
    split: Path,
    spec: DataSpec,
    report: Report,
    chosen: NDArray[np.int64] | None,
) -> dict[str, Packed]:
    """Return the windows of each side of the split; `documents` holds the arguments of Packed, and
    `chosen` the tokens of each pair's first side.
    """
    config = spec.config
    sides = {side: Packed(**arguments, stride=spec.stride) for side, arguments in documents.items()}
    is_masked = any(side.split.is_masked for side in sides.values())
    alone = config.batching != "packed"
    if (
        not spec.preferences
        and not alone
        and (config.packing or ("whole" if is_masked else "stream")) == "stream"
    ):
        return sides
    parts: dict[str, Any] = {"seq_len": config.seq_len, "too_long": config.too_long}
    parts |= {"format": WHOLE_FORMAT, **({"alone": 2} if alone else {})}
    folder = split.with_name(f"whole-{cache_key(split=split.name, **parts)}")

    def build(path: Path) -> None:
        for side, packed in sides.items():
            write_whole(path, side, packed, config.too_long, alone=alone)

    build_once(folder, build, report)
    return {
        side: WholeWindows(folder, side, alone=alone, chosen=chosen, **arguments)
        for side, arguments in documents.items()
    }


def _first_line(tokens: IndexedTokens, tokenizer: PreTrainedTokenizerBase) -> str:
    ids = tokens.ids.block(0, min(len(tokens.ids), _FIRST_TOKENS))
    return shortened(str(tokenizer.decode([*ids[ids < vocab_size(tokenizer)].tolist()])))
