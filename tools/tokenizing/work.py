"""Tokenizes the corpora of a run config in many processes, or one task's share of their shards."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from harness.config.run_config import RunConfig
from harness.data.cache import Report, locked
from harness.data.pair import IndexedTokens
from harness.data.prepare import TOKENS, read_skipped
from harness.data.rendering import writes_date
from harness.data.run_tokenizer import build_tokenizer, cache_of
from harness.data.shards import ShardedTokens
from harness.data.source import how_encoded, open_source, tokens_folder, tokens_key
from harness.data.spec import DataSpec, corpus_of
from harness.data.tokenizer import added_at_begin
from harness.errors import ConfigError
from harness.files.chat import Chat
from harness.files.corpus import Corpus
from harness.plan.data import balanced, with_eval_splits
from tools.workers import cores, progress_bar, run_workers


@dataclass(frozen=True)
class TextSource:
    """A source of the run to tokenize."""

    name: str
    spec: DataSpec
    tokens: ShardedTokens
    key: str  # cache key of its tokens


class Work:
    """The tokens of each source of a run config, in the cache or as PREFIX.bin/.idx."""

    def __init__(
        self, run: RunConfig, out: Path | None, report: Report, trust_remote_code: bool
    ) -> None:
        """Train the tokenizer if needed. Raises ConfigError."""
        if out is None:
            run, _ = with_eval_splits(run)
        if run.data.balance is not None:
            run = run.model_copy(update={"data": balanced(run.data)[0]})
        if out is not None:  # a .bin/.idx cannot exclude a bos token from the loss
            run = run.changed({"data.bos": "off"})
        self._spec = DataSpec.of_run(run, {}, trust_remote_code=trust_remote_code)
        self._out, self._report = out, report
        self._tokenizer = build_tokenizer(self._spec, report)

    def sources(self) -> list[TextSource]:
        """Return the sources, except those that are token ids. Raises ConfigError."""
        sources, problems = [], []
        for name, spec in [*self._spec.sources().items(), *self._spec.eval_sets().items()]:
            corpus = corpus_of(spec)
            if corpus.kind == "indexed":
                self._report(f"{corpus.path} already holds token ids")
                continue
            if spec.config.date is None and corpus.holds_chats and writes_date(self._tokenizer):
                problems.append(
                    f"data.date: the chat template writes the date into {corpus.path}, which is "
                    f"that of the run: set it here and for the run, as data.date={date.today()}"
                )
            key = tokens_key(corpus, self._tokenizer, spec)
            folder = tokens_folder(cache_of(spec), key)
            if self._out is not None:
                folder = Path(f"{self._out}.{key}")
                problems += self._problems_of_out(corpus, spec, key)
            tokens = ShardedTokens(
                corpus, self._tokenizer, how_encoded(spec, self._tokenizer), folder
            )
            sources.append(TextSource(name, spec, tokens, key))
        if problems:
            raise ConfigError(problems)
        return sources

    def _problems_of_out(self, corpus: Corpus, spec: DataSpec, key: str) -> list[str]:
        problems = []
        first = next(corpus.parts(corpus.bad_lines()), None)
        if first and spec.config.learn != "all":
            is_chat = isinstance(first.document, Chat)
            if is_chat or not first.document.is_learned:
                kind = "conversations" if is_chat else "prompts and completions"
                problems.append(
                    f"--out {self._out}: {corpus.path} holds {kind}, and a .bin/.idx cannot say "
                    "which tokens are learned: remove --out, or set data.learn=all"
                )
        there = [path for path in self._pair() if path.exists()]
        if there and self._made_from() != key:
            problems.append(
                f"--out {self._out}: {there[0]} exists and was not made from this data: remove it, "
                "or choose another name"
            )
        return problems

    def finish(self, source: TextSource) -> str:
        """Join the shards of a source into the files that training reads; return a line."""
        tokens = source.tokens
        if self._out is None:
            tokens.join(self._report)
            opened = open_source(
                source.name, source.spec, self._tokenizer, cache_of(source.spec), self._report
            )
            then = f"; train with data.date={opened.day}" if opened.day else ""
            return f"tokenised {opened.summary()}{then}"
        lock, skipped = Path(f"{self._out}.lock"), ""
        with locked(lock, self._report):  # if tasks end together, one writes
            if not self.is_made(source):
                self._write_pair(source)
                skipped = read_skipped(tokens.corpus, tokens.folder).skipped_text()
            tokens.remove()
            lock.unlink(missing_ok=True)
        pair = IndexedTokens(self._out)
        line = f"wrote {self._out}.bin and .idx: {pair.documents:,} documents, "
        adds = tokens.corpus.holds_text and added_at_begin(self._tokenizer)
        begin = "without the bos token that data.bos=auto adds to text" if adds else ""
        rest = [part for part in (tokens.corpus.split_text, skipped, begin) if part]
        return "; ".join([f"{line}{len(pair.ids):,} tokens", *rest])

    def _write_pair(self, source: TextSource) -> None:
        source.tokens.join(self._report)
        self._facts().write_text(json.dumps({"made_from": source.key}))
        for path in self._pair():
            joined = source.tokens.folder / f"{TOKENS}{path.suffix}"
            if joined.exists():  # otherwise an interrupted attempt has moved it
                joined.replace(path)

    def missing(self, source: TextSource) -> list[int]:
        """Return the numbers of a source's unfinished shards."""
        missing = source.tokens.missing()
        return [] if self.is_made(source) else missing  # last: making the pair deletes the shards

    def is_made(self, source: TextSource) -> bool:
        """Return True if PREFIX.bin and PREFIX.idx were made from the source."""
        return self._made_from() == source.key and all(path.exists() for path in self._pair())

    def _pair(self) -> list[Path]:
        return [Path(f"{self._out}{suffix}") for suffix in (".bin", ".idx")]

    def _facts(self) -> Path:
        return Path(f"{self._out}.made-from.json")

    def _made_from(self) -> str | None:
        """Return the key of the data in PREFIX.bin; None if this tool did not write it."""
        try:
            return str(json.loads(self._facts().read_text())["made_from"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class Share:
    """The part of the work that this process does."""

    workers: int = cores()
    task: int = 0
    tasks: int = 1


def tokenized(
    run: RunConfig, out: Path | None, share: Share, report: Report, *, trust_remote_code: bool
) -> Iterator[str]:
    """Tokenize each source into the cache, or into OUT.bin and OUT.idx; yield a line about each.

    Raises ConfigError, OSError and WorkerFailed.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    work = Work(run, out, report, trust_remote_code)
    for source in work.sources():
        tokens = source.tokens
        _write_shards(tokens, work.missing(source), share)
        if missing := work.missing(source):
            yield (
                f"{len(missing)} of {len(tokens.shards)} shards of {tokens.corpus.path} are left "
                "to other tasks; the last one to end merges all"
            )
        else:
            yield work.finish(source)


def _write_shards(tokens: ShardedTokens, missing: list[int], assigned: Share) -> None:
    """Tokenize a share of the missing shards."""
    share = [number for number in missing if number % assigned.tasks == assigned.task]
    if not share:
        return
    sizes = [shard.num_bytes for shard in tokens.shards]
    total = sum(sizes[number] for number in range(assigned.task, len(sizes), assigned.tasks))
    before = total - sum(sizes[number] for number in share)

    def watch(done: dict[int, int]) -> None:
        now = before + sum(min(count, sizes[number]) for number, count in done.items())
        bar.update(now - bar.n)

    with progress_bar("tokenised", total, before) as bar:
        run_workers(tokens.write, share, assigned.workers, watch)
