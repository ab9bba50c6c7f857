"""The data of a plan, described without a tokenizer and without reading all files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from harness.config.data_section import NEW, REHEARSED, DataConfig, MixSource
from harness.config.run_config import RunConfig
from harness.errors import ConfigError, Unusable
from harness.files.chat import Chat, read_template
from harness.files.corpus_files import CorpusFiles, find_files, splits_in
from harness.files.data_format import BadLines, problem_of
from harness.files.file_kinds import format_of
from harness.files.first_bytes import why_not_utf_8
from harness.files.forms import Document, read, value_of
from harness.files.notes import Notes
from harness.files.pieces import Ids, begins, shortened, unless_blank
from harness.files.splits import ALL
from harness.files.token_index import read_header
from harness.plan.batch_from_data import Counts
from harness.plan.draft import Draft
from harness.plan.folder import recorded_data


def keep_split(draft: Draft) -> None:
    """Use the split of the run that is resumed or branched from, unless the user set data.split;
    versions without that key read whole folders. Reads this machine's disk.
    """
    config, recorded = draft.config, recorded_data(draft)
    if recorded is None or config.is_set("data.split"):
        return
    paths = _paths(config.data.model_dump())
    split = recorded.get("split", ALL)
    if not paths or paths != _paths(recorded) or not isinstance(split, str | None):
        return
    if "split" not in recorded and with_eval_splits(config)[1]:
        draft.note("kept", f"data.split is {ALL}, because the resumed run read the entire folder")
    kept = config.data.model_copy(update={"split": split})
    draft.config = config.model_copy(update={"data": kept})


def evaluate_splits(draft: Draft) -> None:
    """Use the other splits of the data as held-out sets, if the run config sets nothing about
    evaluation. Plans for other machines, which may lack the data, skip this.
    """
    if draft.here:
        draft.config, message = with_eval_splits(draft.config)
        if message:
            draft.note("eval_splits", message)


def with_eval_splits(run: RunConfig) -> tuple[RunConfig, str]:
    """Return the run config with its held-out splits in data.eval_path, and a sentence about it; ""
    if there are none or the run config already has a held-out set.
    """
    data = run.data
    if data.path is None or data.mix or data.eval_path or run.is_set("data.held_out"):
        return run, ""
    try:
        splits, chosen = splits_in(data.path, data.format, data.split)
    except (ConfigError, OSError):
        return run, ""  # reading the data reports the problem
    held_out = splits.held_out(chosen) if chosen else []
    if not held_out:
        return run, ""
    verb = "evaluate" if len(held_out) > 1 else "evaluates"
    sets = {split.rpartition("/")[2]: {"path": data.path, "split": split} for split in held_out}
    tree = data.model_dump(exclude_unset=True) | {"eval_path": sets}
    message = (
        f"{data.path} has splits: {chosen} is trained on, {' and '.join(held_out)} {verb} "
        f"(data.eval_path); data.held_out={data.held_out:g} splits documents off instead"
    )
    return run.model_copy(update={"data": DataConfig.model_validate(tree)}), message


def _paths(data: Mapping[str, Any]) -> set[str]:
    """Return the paths that a data section trains on; empty for Python's own library."""
    mix = data.get("mix")
    sources = [data, *(mix if isinstance(mix, list) else ())]
    paths = (source.get("path") for source in sources if isinstance(source, Mapping))
    return {path for path in paths if isinstance(path, str)}


# Limits that keep a dry run fast.
_MOST_FILES = 20_000
_MOST_BYTES = 1 << 26
_MOST_RECORDS = 1000
_FILE_OF_TEMPLATE = ".jinja"
_SHOWN = 16  # pairs of a folder
_BYTES_PER_TOKEN = 4  # roughly, for English text


@dataclass(frozen=True)
class Glance:
    """Documents of a source, as a dry run shows them."""

    text: str
    documents: int
    """Number of documents; approximate if files were not read to the end."""
    tokens: int
    """Number of tokens; approximate for text."""
    is_masked: bool = False
    """True if prompts are masked from the loss."""


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
        examples, tokens = (
            max(1, round(kept * sum(getattr(glance, of_all) for glance in self.sources.values())))
            for of_all in ("documents", "tokens")
        )
        windows = examples if data.batching != "packed" else max(1, tokens // data.seq_len)
        is_masked = any(glance.is_masked for glance in self.sources.values())
        return Counts(examples, windows, is_masked, is_rough=True)

    def lines(self, samples: int | None) -> list[str]:
        """Return one line per source and held-out set; sources of a mixture also show share and
        approximate epochs in a run of `samples` samples.
        """
        sets = {f"held-out set {name}".rstrip(): glance for name, glance in self.sets.items()}
        named = {**self.sources, **sets}
        lines = [f"{name}: {seen.text}" if name else seen.text for name, seen in named.items()]
        tokens = [glance.tokens for glance in self.sources.values()]
        read = samples and samples * self.data.seq_len
        for number, source in enumerate(self.data.mix):
            of_all = sum(tokens[: len(self.data.mix)])
            lines[number] += _share(self.data, source, tokens[number], of_all, read)
        return lines


def check_mix(draft: Draft) -> None:
    """Reject a data.mix change at a fraction of a run of unknown length, and a run that rehearses
    itself.
    """
    until, epochs = draft.config.data.mix_until, draft.config.train.epochs
    if until is not None and until < 1 and epochs is not None:
        why = "a fraction of the run, but train.epochs is set"
        draft.problems.add("data.mix_until", why, "give optimizer steps, or train.steps")
    own, rehearse = draft.config.run.dir, draft.config.data.rehearse
    if (
        own is not None
        and rehearse is not None
        and os.path.realpath(own) == os.path.realpath(rehearse)
    ):
        draft.problems.add("data.rehearse", "which is run.dir itself", "name an earlier run")


def check_data(draft: Draft) -> None:
    """Reject a missing chat template and, on this machine, missing data."""
    config, problems = draft.config, list[str]()
    template = config.data.template
    if template is not None and (draft.here or not template.endswith(_FILE_OF_TEMPLATE)):
        problems += _problems_of(lambda: read_template(template))
    if draft.here:  # another machine may have the data
        problems += missing_here(config.data)
        tokenizer = config.data.tokenizer or ""
        if tokenizer.startswith(("/", ".")) and not Path(tokenizer).exists():  # otherwise a hub id
            problems.append(f"data.tokenizer: {tokenizer} does not exist")
    said = [*draft.problems]
    draft.problems.say(*(text for text in dict.fromkeys(problems) if text not in said))


def missing_here(data: DataConfig) -> list[str]:
    """Return a problem for each path of a data section that this machine lacks."""
    problems = list[str]()
    for key, part in _parts(data, problems).items():
        of_part = _problems_of(partial(_look_for, part))
        problems += [text.replace("data.path: ", f"{key}: ", 1) for text in of_part]
    return problems


def _parts(data: DataConfig, problems: list[str]) -> dict[str, DataConfig]:
    """Return the data section of each path by key and name, and add problems of data.rehearse."""
    sources = dict[str, DataConfig]()
    problems += _problems_of(lambda: sources.update(data.sources()))
    keys = {"": "data.path", NEW: "data.path", REHEARSED: "data.rehearse"}
    parts = {keys.get(name, f"data.mix {name}"): section for name, section in sources.items()}
    return parts | {
        f"data.eval_path {name}".strip(): section for name, section in data.eval_sets().items()
    }


def _problems_of(read: Callable[[], object]) -> list[str]:
    try:
        read()
    except ConfigError as error:
        return error.problems
    return []


def glances(data: DataConfig) -> Glances:
    """Return a dry run's view of each source and held-out set.

    Raises ConfigError with the problems of everything that cannot be read, and of wrong rows.
    """
    problems, seen = [], []
    for of_kind in (data.sources(), data.eval_sets()):
        by_name = {}
        for name, section in of_kind.items():
            try:
                by_name[name] = _glance(section)
            except ConfigError as error:
                problems += error.problems
        seen.append(by_name)
    if problems:
        raise ConfigError(problems)
    return Glances(data, *seen)


def _share(data: DataConfig, source: MixSource, tokens: int, of_all: int, read: int | None) -> str:
    """Return share and approximate epochs of a source."""
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


def glance(data: DataConfig) -> str:
    """Return kind, number and size of one source's documents, and its first line of text.

    Raises ConfigError if the data cannot be read here.
    """
    return _glance(data).text


def _look_for(data: DataConfig) -> None:
    """Raise ConfigError if files of a source, or headers of pairs, are missing."""
    corpus = find_files(data.path, data.format, _MOST_FILES, data.split)
    if corpus.kind == "indexed":
        with _as_config_errors():
            _pairs(corpus)


@contextmanager
def _as_config_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {error.filename}: {error.strerror}") from error
    except Unusable as error:
        raise ConfigError(f"data.path: {error}") from error


def _glance(data: DataConfig) -> Glance:
    corpus = find_files(data.path, data.format, _MOST_FILES, data.split)
    with _as_config_errors():
        seen = _pairs(corpus) if corpus.kind == "indexed" else _text(corpus, data)
    bounds = {"min_tokens": data.min_tokens, "max_tokens": data.max_tokens}
    limits = " and ".join(f"{key}={value}" for key, value in bounds.items() if value is not None)
    return replace(seen, text=f"{seen.text}; only those with {limits} are read") if limits else seen


def _pairs(corpus: CorpusFiles) -> Glance:
    counts = {}
    for prefix in corpus.pairs:
        header = read_header(Path(f"{prefix}.idx"))
        tokens = Path(f"{prefix}.bin").stat().st_size // header.id_bytes
        counts[prefix] = header.bounds - 1, tokens
    documents, tokens = map(sum, zip(*counts.values(), strict=True))
    text = f"{documents:,} documents, {tokens:,} tokens in "
    if not corpus.is_folder_of_pairs:
        return Glance(f"{text}{corpus.files[0]}", documents, tokens)
    left_out = _left_out(corpus)
    each = [
        f"{prefix.relative_to(corpus.path)} {documents:,} documents, {tokens:,} tokens"
        for prefix, (documents, tokens) in counts.items()
    ]
    more = f"; {len(each) - _SHOWN:,} more" if len(each) > _SHOWN else ""
    at_least = "at least " if len(corpus.files) >= _MOST_FILES - 1 else ""
    shown = f"{'; '.join(each[:_SHOWN])}{more}{left_out}"
    text += f"{at_least}{len(each):,} pairs of {corpus.path}: {shown}"
    return Glance(text, documents, tokens)


def _text(corpus: CorpusFiles, data: DataConfig) -> Glance:
    documents, left = 0, _MOST_BYTES
    for file in corpus.files:
        count = format_of(file, corpus.format).count
        if count is None:
            documents += 1
        elif left:
            of_file, left = count(file, left)
            documents += of_file
    at_least = "" if left and len(corpus.files) < _MOST_FILES else "at least "
    source = "Python's own library" if corpus.kind == "library" else str(corpus.path)
    size = corpus.num_bytes()
    first, is_masked = _first(corpus, data)
    text = (
        f"{source}: {at_least}{documents:,} documents, {size / 2**20:,.1f} MiB (roughly "
        f"{size // _BYTES_PER_TOKEN:,} tokens), the first {first}{_left_out(corpus)}"
    )
    if not left:  # extrapolated to the bytes not read
        documents = round(documents * size / _MOST_BYTES)
    return Glance(text, documents, size // _BYTES_PER_TOKEN, is_masked)


def _left_out(corpus: CorpusFiles) -> str:
    """Return how files are read if their names do not tell, and what is not read."""
    parts = [corpus.split_text, f"left out: {corpus.left_out}" if corpus.left_out else ""]
    if corpus.kind == "text":
        parts.insert(0, format_of(corpus.files[0], corpus.format).note(corpus.files[0]))
    return "".join(f"; {part}" for part in parts if part)


def _first(corpus: CorpusFiles, data: DataConfig) -> tuple[str, bool]:
    """Return how the first document begins (for conversations also turns and share of the loss),
    and True if some of the first documents are partly masked.
    """
    file = corpus.files[0]
    format = format_of(file, corpus.format)
    if format.begin is not None:
        return format.begin(file), False
    assert format.records is not None, "a format has pieces or records"
    bad_lines, documents, notes = BadLines(limit=data.most_bad_rows), [], Notes()
    try:
        for line, record in islice(format.records(file, bad_lines), _MOST_RECORDS):
            bad_lines.seen += 1
            try:
                if any(value_of(record, key) != value for key, value in data.where.items()):
                    continue
                document, of_record = read(record, data.columns)
                if not isinstance(document, Chat | Ids) and bad_lines.limit is not None:
                    document = unless_blank(document)
            except ValueError as error:
                bad_lines.add(file, problem_of(error), line)
                if bad_lines.are_enough:
                    break
            else:
                documents.append(document)
                notes.add(note for note in of_record if note[1] not in data.where)
    except UnicodeDecodeError as error:
        bad_lines.add(file, f"{error}; it {why_not_utf_8(file)}")
    if bad_lines.limit is None or (bad_lines.seen < _MOST_RECORDS and len(corpus.files) == 1):
        bad_lines.require_good_rows()
    bad = bad_lines.skipped_text("bad rows among the first, to be left out")
    if not documents:
        return f"cannot be read: {bad or 'there is none'}", False
    unread = f"left out of {len(documents):,} rows: {notes.text()}" if notes else ""
    text = "; ".join(part for part in (_begin(documents), unread, bad) if part)
    return text, data.learn != "all" and any(map(_is_masked, documents))


def _is_masked(document: Document) -> bool:
    """Return True if part of a document is masked from the loss."""
    if isinstance(document, Chat):
        return document.num_learned < document.num_characters
    pieces = [document] if isinstance(document, Ids) else document
    return not all(piece.is_learned for piece in pieces)


def _begin(documents: list[Document]) -> str:
    """Return how the first document begins; for conversations also turns and share of the loss."""
    chats = [document for document in documents if isinstance(document, Chat)]
    if isinstance(documents[0], Ids):
        return f"has {len(documents[0].ids):,} token ids"
    if not chats:
        return begins(next((piece.text for piece in documents[0] if piece.text), ""))  # type: ignore[union-attr]
    turns = sum(len(chat.messages) for chat in chats) / len(chats)
    characters = sum(chat.num_characters for chat in chats) or 1
    learned = sum(chat.num_learned for chat in chats) / characters
    first = next(turn for turn in chats[0].messages if turn["role"] == "user")
    return (
        f"{len(chats):,} conversations of {turns:.1f} turns, {learned:.0%} of their text the "
        f"assistant's; the first asks {shortened(first['content'])!r}"
    )
