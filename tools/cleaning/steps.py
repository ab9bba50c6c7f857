"""Pipeline steps that datatrove lacks, or whose originals would load data from the network."""

import ipaddress
import json
import re
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import regex
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig
from datatrove.pipeline.filters import C4BadWordsFilter, C4QualityFilter, URLFilter
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.formatters.pii import PIIReplacer
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.pipeline.writers.disk_base import DiskWriter
from datatrove.utils._import_utils import ASSETS_PATH
from datatrove.utils.hashing import HashConfig, create_hash_func
from datatrove.utils.text import TERMINAL_PUNCTUATION, ngrams, simplify_text
from datatrove.utils.word_tokenizers import WordTokenizer, load_word_tokenizer

from harness.data.shards import Shard, corpus_of_shard, settle_lines
from harness.files.chat import Chat
from harness.files.corpus import Corpus, Part, find_corpus
from harness.files.data_format import BadLines
from harness.files.pieces import Ids, Piece, shortened
from harness.files.splits import ALL
from tools.cleaning.recipe import language_model, words_in
from tools.cleaning.strictness import as_json, measured

# --- reading ---

read_so_far: Callable[[int], None] = lambda characters: None  # noqa: E731
"""Receives the number of characters that this process has read for its task. The executor sets it.
"""


class CorpusReader(PipelineStep):
    """Reads the documents of a shard. Bad lines fail the task, and one report lists them all."""

    type = "📖 - READER"
    name = "corpus"

    def __init__(self, corpus: Corpus, shards: list[Shard], problems: Path) -> None:
        """`problems`: folder for the bad lines of each shard."""
        super().__init__()
        self.corpus, self.shards, self.problems = corpus, shards, problems

    def run(
        self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1
    ) -> DocumentsPipeline:
        """Yield the documents of shard number `rank`."""
        corpus = corpus_of_shard(self.corpus, self.shards[rank])
        text_column = corpus.columns.get("text", "text")
        bad_lines = BadLines()
        characters, number = 0, 0
        for texts, part in _whole(corpus.parts(bad_lines)):
            text = "".join(texts)
            characters += len(text)
            read_so_far(characters)
            if not text.strip():
                self.stat_update("empty")
                continue
            metadata = _metadata(part, text_column)
            document = Document(text, f"{rank:05}-{number:07}", metadata=metadata)
            number += 1
            self.stat_update("documents")
            self.update_doc_stats(document)
            yield document
        settle_lines(corpus, bad_lines)
        if bad_lines.by_problem:
            self.problems.mkdir(parents=True, exist_ok=True)
            (self.problems / f"{rank:05}.json").write_text(json.dumps(bad_lines.as_json()))
        bad_lines.require_none()


def require_no_problems(folder: Path) -> None:
    """Raise ConfigError with the bad lines of all shards, if any, and delete their files."""
    bad_lines = BadLines()
    for file in sorted(folder.glob("*.json")):
        bad_lines.merge(BadLines.from_json(json.loads(file.read_text())))
        file.unlink()
    bad_lines.require_none()


class TaskReader(JsonlReader):
    """Reads the documents that the same task of an earlier stage wrote.

    datatrove's reader distributes the existing files over the tasks: if a task had written no file,
    all later tasks would read the file of another one.
    """

    def run(
        self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1
    ) -> DocumentsPipeline:
        """Yield the documents in the file of `rank`; none if there is no file."""
        name = f"{rank:05}.jsonl"
        for document in self.read_files_shard([name] if self.data_folder.isfile(name) else []):
            self.update_doc_stats(document)
            yield document


class TaskWriter(JsonlWriter):
    """Writes the documents of a task to its file. datatrove's writer would name the file after a
    document's column `rank`.
    """

    def _get_output_filename(self, document: Document, rank: int | str = 0, **_: Any) -> str:
        return f"{str(rank).zfill(5)}.jsonl"


def _whole(parts: Iterator[Part]) -> Iterator[tuple[list[str], Part]]:
    """Yield each document: the texts of its parts, and its last part."""
    texts: list[str] = []
    for part in parts:
        assert isinstance(part.document, Piece), "refused before"
        texts.append(part.document.text)
        if part.is_last:
            yield texts, part
            texts = []


def _metadata(part: Part, text_column: str) -> dict[str, Any]:
    """Return the columns of a record beside its text, and the file and line they come from."""
    record = dict(part.record) if isinstance(part.record, dict) else {}
    if isinstance(nested := record.get("metadata"), dict):
        del record["metadata"]
        record = {**nested, **record}
    count = record.get("token_count", 0)
    if not isinstance(count, int | float):  # datatrove adds them up; in CSV, they are text
        text = str(count)
        record["token_count"] = int(text) if text.isdecimal() else None
    place = f"{part.file}:{part.line}" if record else str(part.file)
    metadata = {k: v for k, v in record.items() if k != text_column} | {"read_from": place}
    return {_writable(key): _writable(value) for key, value in metadata.items()}


def _writable(value: Any) -> Any:
    """Return a value that datatrove's writer accepts: binary as None, others that it rejects (such
    as decimals, durations, integers beyond 64 bits and lone surrogates) as text.
    """
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    if isinstance(value, bytes):
        return None
    if isinstance(value, date):  # datatrove also writes pandas.Timestamp, which orjson rejects
        return value
    try:
        orjson.dumps(value)
    except TypeError:
        return str(value).encode(errors="backslashreplace").decode()
    return value


def why_no_text(corpus: Corpus) -> str | None:
    """Return the reason why a corpus cannot be cleaned; None if it can be."""
    if corpus.kind == "indexed":
        return "contains token ids: clean the original text"
    first = next(corpus.parts(BadLines()), None)
    if first is None:
        return None
    if isinstance(first.document, Chat):
        return "holds conversations: this tool cleans plain text, one document per record"
    if isinstance(first.document, Ids):
        return "contains token ids: clean the original text"
    if not first.document.is_learned:
        return "holds prompts and completions: this tool cleans plain text, one document per record"
    return None


class Sample(PipelineStep):
    """Measures an even share of the documents before any step, for the report."""

    type = "📊 - STATS"
    name = "sample"

    def __init__(self, folder: Path, one_in: int, shards: frozenset[int]) -> None:
        super().__init__()
        self.folder, self.one_in, self.shards = folder, one_in, shards

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield every document; in some shards, measure every `one_in`-th."""
        if rank not in self.shards:
            yield from data
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{rank:05}.jsonl").open("w", encoding="utf-8") as file:
            for number, document in enumerate(data):
                if (number + rank) % self.one_in == 0:
                    self.stat_update("measured")
                    file.write(json.dumps(as_json(measured(document.id, document.text))) + "\n")
                yield document


# --- words ---

# In scripts written without spaces, each letter is a word. So is each punctuation mark.
_WORD = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
    r"|[\w--[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]+"
    r"(?:['\u2019][\w--[\p{Han}\p{Hiragana}\p{Katakana}]]+)*"
    r"|[^\w\s]",
    regex.V1,
)
_ENDS = regex.escape("".join(sorted(TERMINAL_PUNCTUATION)))
_SENTENCE = regex.compile(rf"[^{_ENDS}\n]+(?:[{_ENDS}]+[\"'\u201d\u2019)]*|\n|$)")


class RegexWords(WordTokenizer):
    """Splits text into words and sentences with regular expressions."""

    def word_tokenize(self, text: str) -> list[str]:
        """Return words and punctuation marks."""
        return _WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """Return sentences without surrounding whitespace."""
        return [text[start:end].strip() for start, end in self.span_tokenize(text)]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return the (start, end) of each sentence that is not blank."""
        return [found.span() for found in _SENTENCE.finditer(text) if found[0].strip()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RegexWords)

    def __hash__(self) -> int:
        return hash(RegexWords)


def words_of(named: str) -> WordTokenizer | str:
    """Return the language argument of datatrove's steps."""
    return RegexWords() if named == "regex" else "en"


HASHES = HashConfig(precision=64, hash_fc="sha1")  # xxhash 4 no longer accepts strings
BANNED_WORDS = Path(ASSETS_PATH) / "banned_words.txt"


class Urls(URLFilter):
    """datatrove's URL filter, but it needs no network and keeps documents without an address."""

    name = "url"

    def __init__(self, exclusion_writer: DiskWriter | None = None, **options: Any) -> None:
        from tldextract import TLDExtract

        super().__init__(exclusion_writer=exclusion_writer, **options)
        self.tldextractor = TLDExtract(suffix_list_urls=())

    def filter(self, document: Document) -> bool | tuple[bool, str]:
        """Return True if a document is kept, otherwise False and the reason."""
        url = document.metadata.get("url")
        if not url or not isinstance(url, str):
            self.stat_update("without_url")
            return True
        return super().filter(document)


class Language(BaseFilter):
    """Keeps documents in the given languages by a fastText model from a file."""

    name = "language"

    def __init__(
        self, keep: list[str], threshold: float, model: Path, exclusion_writer: DiskWriter
    ) -> None:
        super().__init__(exclusion_writer)
        self.keep, self.threshold, self.path = keep, threshold, model

    def filter(self, document: Document) -> bool | tuple[bool, str]:
        """Return True if a document is kept, otherwise False and its language."""
        text = document.text.replace("\n", " ")
        labels, scores = language_model(self.path).predict(text, k=-1)
        by_language = {
            label.removeprefix("__label__"): float(score)
            for label, score in zip(labels, scores, strict=True)
        }
        best = max(by_language, key=lambda language: by_language[language])
        document.metadata["detected_language"] = best
        document.metadata["detected_language_score"] = round(by_language[best], 4)
        if any(by_language.get(language, 0.0) > self.threshold for language in self.keep):
            return True
        return False, best


class C4(C4QualityFilter):
    """datatrove's C4 filter, which here also removes documents that have no line left."""

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return True if a document is kept, otherwise False and the reason."""
        text = doc.text
        verdict = super().filter(doc)
        if verdict is True and not doc.text:
            doc.text = text
            return False, "no_line_left"
        return verdict


class BadWords(C4BadWordsFilter):
    """C4's filter with a list from a file, for all languages."""

    name = "bad words"

    def __init__(self, file: Path, exclusion_writer: DiskWriter | None = None) -> None:
        super().__init__(exclusion_writer=exclusion_writer)
        words = "|".join(map(re.escape, words_in(file)))
        self._pattern = re.compile(rf"(?:\W|^)({words})(?:\W|$)")

    def _get_badwords(self, lang: str) -> re.Pattern[str]:
        return self._pattern


# 8 to 15 digits in groups: +49 30 1234567, 0049 (30) 1234-567; (212) 555-0100, 212.555.0100.
_PHONE = (
    r"(?<![\w.+-])(?:"
    r"(?:\+|00)[1-9]\d{0,2}(?:[ .\-/]?\(?\d{1,5}\)?){1,6}"
    r"|(?:1[ .\-])?\(?[2-9]\d{2}\)?[ .\-]\d{3}[ .\-]\d{4}"
    r")(?![\w]|[.\-]\d)"
)
_IPV6 = r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])"
_PHONES = ("+1 202-555-0100", "+1 202-555-0143", "+1 202-555-0176")  # fictional, NANPA


class PersonalData(PIIFormatter):
    """datatrove's PII formatter with IPv6, telephone numbers, counts and examples."""

    name = "personal data"

    def __init__(
        self, emails: bool, ips: bool, only_public_ips: bool, phones: bool, removed: Path
    ) -> None:
        super().__init__(emails, ips, only_public_ips)
        self.replacers: dict[str, list[PIIReplacer]] = {}
        if emails:
            self.replacers["emails"] = [self.emails_replacer]
        if ips:
            ipv6 = PIIReplacer(_IPV6, "2001:db8::1", _is_ipv6(only_public_ips))
            self.replacers["ips"] = [self.ip_replacer, ipv6]
        if phones:
            self.replacers["phones"] = [PIIReplacer(_PHONE, _PHONES, _has_digits)]
        self.removed = removed

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield every document, redacted."""
        self.removed.mkdir(parents=True, exist_ok=True)
        with (self.removed / f"{rank:05}.jsonl").open("w", encoding="utf-8") as examples:
            for document in data:
                self.stat_update("total")
                with self.track_time():
                    changes = self.redact(document)
                self.update_doc_stats(document)
                if changes:
                    self.stat_update("changed")
                    example = {"text": " · ".join(changes), "id": document.id}
                    examples.write(json.dumps(example, ensure_ascii=False) + "\n")
                yield document

    def redact(self, document: Document) -> list[str]:
        """Replace personal data in a document; return each replaced text with its context."""
        changes: list[str] = []
        for kind, replacers in self.replacers.items():
            for replacer in replacers:
                text = document.text
                for match in replacer.regex.finditer(text):
                    if replacer.validator is None or replacer.validator(match[0]):
                        self.stat_update(kind)
                        around = text[max(0, match.start() - 30) : match.end() + 30]
                        changes.append(" ".join(around.split()))
                if changes:
                    document.text = replacer.replace(text)
        return changes


def _has_digits(text: str) -> bool:
    return 8 <= sum(map(str.isdigit, text)) <= 15


def _is_ipv6(only_public: bool) -> Callable[[str], bool]:
    def is_address(text: str) -> bool:
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            return False
        return not only_public or address.is_global

    return is_address


def write_n_grams(files: list[str], n: int, words: str, folder: Path) -> None:
    """Write the index of evaluation data that datatrove's NGramsDecontFilter reads.

    datatrove's own indexer needs lighteval and a network connection.
    """
    config = NGramsDecontConfig(n_grams=n, hash_config=HASHES)
    hash_of, tokenizer = create_hash_func(config.hash_config), load_word_tokenizer(words_of(words))
    for number, file in enumerate(files):
        hashes: set[int] = set()
        text = ""
        for piece in find_corpus(file, split=ALL).pieces():
            text += piece.text
            if piece.is_last:
                simple = tokenizer.word_tokenize(simplify_text(text, config.norm_config))
                hashes |= {hash_of(" ".join(gram)) for gram in ngrams(simple, n)}
                text = ""
        name = re.sub(r"[^\w.-]", "_", shortened(Path(file).name))
        array = np.array(sorted(hashes), dtype=config.hash_config.np_descr)
        array.tofile(folder / f"{number:02}-{name}.index.hashes")
