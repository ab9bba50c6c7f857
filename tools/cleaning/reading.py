"""Reads a corpus in any form that training reads, as datatrove's documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers import JsonlReader

from harness.data.corpus import Corpus, Part
from harness.data.shards import Shard, corpus_of_shard, settle_lines
from harness.files.chat import Chat
from harness.files.data_format import BadLines
from harness.files.pieces import Ids, Piece

read_so_far: Callable[[int], None] = lambda characters: None  # noqa: E731
"""Receives the characters that this process has read of its task; set by the executor."""


class CorpusReader(PipelineStep):
    """The documents of a shard of a corpus. Bad lines end the task with all of the shard's."""

    type = "📖 - READER"
    name = "corpus"

    def __init__(self, corpus: Corpus, shards: list[Shard], problems: Path) -> None:
        """`problems`: folder of the bad lines of each shard."""
        super().__init__()
        self.corpus, self.shards, self.problems = corpus, shards, problems

    def run(
        self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1
    ) -> DocumentsPipeline:
        """Yield the documents of shard number `rank`."""
        corpus = corpus_of_shard(self.corpus, self.shards[rank])
        bad_lines = BadLines()
        characters, number = 0, 0
        for texts, part in _whole(corpus.parts(bad_lines)):
            text = "".join(texts)
            characters += len(text)
            read_so_far(characters)
            if not text.strip():
                self.stat_update("empty")
                continue
            document = Document(text, f"{rank:05}-{number:07}", metadata=_metadata(part))
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
    """Raise ConfigError with the bad lines of all shards, and forget them."""
    bad_lines = BadLines()
    for file in sorted(folder.glob("*.json")):
        bad_lines.merge(BadLines.from_json(json.loads(file.read_text())))
        file.unlink()
    bad_lines.require_none()


class TaskReader(JsonlReader):
    """The documents that the same task of an earlier stage wrote.

    datatrove's own deals out the files that there are: a task that wrote none would shift the
    numbers of all documents behind it.
    """

    def run(
        self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1
    ) -> DocumentsPipeline:
        """Yield the documents of the file of `rank`; none without the file."""
        name = f"{rank:05}.jsonl"
        for document in self.read_files_shard([name] if self.data_folder.isfile(name) else []):
            self.update_doc_stats(document)
            yield document


def _whole(parts: Iterator[Part]) -> Iterator[tuple[list[str], Part]]:
    """Yield the pieces of each document."""
    texts: list[str] = []
    for part in parts:
        assert isinstance(part.document, Piece), "refused before"
        texts.append(part.document.text)
        if part.is_last:
            yield texts, part
            texts = []


def _metadata(part: Part) -> dict[str, Any]:
    """Return the other columns of the record, and where it came from."""
    record = dict(part.record) if isinstance(part.record, dict) else {}
    nested = record.pop("metadata", None)
    record = {**nested, **record} if isinstance(nested, dict) else record
    source = f"{part.file}:{part.line}" if record else str(part.file)
    return {**{k: v for k, v in record.items() if k != "text"}, "source": source}


def why_no_text(corpus: Corpus) -> str | None:
    """Return why a corpus cannot be cleaned; None if it can be."""
    if corpus.kind == "indexed":
        return "holds token ids: clean the text that they were made of"
    first = next(corpus.parts(BadLines()), None)
    if first is None:
        return None
    if isinstance(first.document, Chat):
        return "holds conversations: this tool cleans plain text, one document a record"
    if isinstance(first.document, Ids):
        return "holds token ids: clean the text that they were made of"
    if not first.document.is_learned:
        return "holds prompts and completions: this tool cleans plain text, one document a record"
    return None


class Sample(PipelineStep):
    """Measures an even share of the documents before any step, for the report."""

    type = "📊 - STATS"
    name = "sample"

    def __init__(self, folder: Path, one_in: int, shards: frozenset[int]) -> None:
        super().__init__()
        self.folder, self.one_in, self.shards = folder, one_in, shards

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield every document; measure the first of each `one_in`, of some shards."""
        if rank not in self.shards:
            yield from data
            return
        from tools.cleaning.strictness import as_json, measured

        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{rank:05}.jsonl").open("w", encoding="utf-8") as file:
            for number, document in enumerate(data):
                if (number + rank) % self.one_in == 0:
                    self.stat_update("measured")
                    file.write(json.dumps(as_json(measured(document.id, document.text))) + "\n")
                yield document
