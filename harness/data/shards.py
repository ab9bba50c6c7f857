"""A corpus in shards, tokenised by many processes on any machines and joined into the same bytes.

Shard boundaries depend on the corpus alone. A finished shard is a folder that was renamed as a
whole, so interrupted work continues with the missing shards.
"""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from harness.data.cache import Report, fill_once
from harness.data.encoding import HowEncoded
from harness.data.pair import join_indexed, join_masks, load_masks
from harness.data.prepare import (
    MASKS,
    TOKENS,
    Counts,
    encode_corpus,
    keep_skipped,
    read_notes,
    require_text,
    write_notes,
)
from harness.errors import ConfigError
from harness.files.corpus import Corpus
from harness.files.data_format import BadLines
from harness.files.file_kinds import format_of
from harness.files.notes import Notes

_LEAST_BYTES, _MOST_SHARDS = 4 << 20, 4096
_FACTS = "shard.json"


@dataclass(frozen=True)
class Shard:
    """Consecutive files of a corpus, or a byte range of one of them."""

    files: tuple[Path, ...]
    num_bytes: int
    between: tuple[int, int] | None = None


def shards_of(corpus: Corpus, least_bytes: int = _LEAST_BYTES) -> list[Shard]:
    """Return the shards of a corpus. Large files are divided if their format allows it; smaller
    files are grouped. Raises OSError.
    """
    target = max(least_bytes, corpus.num_bytes() // _MOST_SHARDS)
    shards: list[Shard] = []
    group: list[Path] = []
    size = 0
    for file in corpus.files:
        num_bytes = file.stat().st_size
        bounds = _bounds(corpus, file, target) if num_bytes >= 2 * target else []
        if len(bounds) > 2:
            shards += [Shard((*group,), size)] if group else []
            shards += [
                Shard((file,), stop - start, (start, stop)) for start, stop in pairwise(bounds)
            ]
            group, size = [], 0
            continue
        group.append(file)
        size += num_bytes
        if size >= target:
            shards.append(Shard((*group,), size))
            group, size = [], 0
    return [*shards, Shard((*group,), size)] if group else shards


def _bounds(corpus: Corpus, file: Path, least_bytes: int) -> list[int]:
    if corpus.kind != "text":
        return []
    return format_of(file, corpus.format).bounds(file, least_bytes)


def corpus_of_shard(corpus: Corpus, shard: Shard) -> Corpus:
    """Return a corpus of one shard's documents."""
    return replace(corpus, files=shard.files, between=shard.between, leading=corpus.first_document)


def settle_lines(corpus: Corpus, bad_lines: BadLines) -> None:
    """Renumber the lines of problems in a byte range to count from the start of the file."""
    if corpus.between is None or not bad_lines.by_problem:
        return
    lines_before = format_of(corpus.files[0], corpus.format).lines_before
    if lines_before is not None:
        bad_lines.shift(lines_before(corpus.files[0], corpus.between[0]))


class ShardedTokens:
    """The shards of a corpus, in a work folder that is removed after they are joined."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        how: HowEncoded,
        folder: Path,
        least_bytes: int = _LEAST_BYTES,
    ) -> None:
        """`folder`: the folder of the joined tokens."""
        self.corpus, self.folder = corpus, folder
        self._tokenizer, self._how = tokenizer, how
        self.shards = shards_of(corpus, least_bytes)
        self._work = folder.with_name(f"{folder.name}.{len(self.shards)}-shards")

    def missing(self) -> list[int]:
        """Return the numbers of the unfinished shards."""
        finished = {path.name for path in self._work.glob("[0-9]*[0-9]")}
        if self.folder.is_dir():  # checked last: another task removes the shards after joining them
            return []
        return [number for number in range(len(self.shards)) if _name(number) not in finished]

    def write(self, number: int, progress: Callable[[int], None]) -> None:
        """Tokenise a shard. It stores its bad lines too, for `join` to report. Raises OSError."""
        try:
            build = partial(self._write, number, progress)
            fill_once(self._work / _name(number), build, lambda line: None)
        except OSError:
            if number in self.missing():  # otherwise another task joined and removed them
                raise

    def _write(self, number: int, progress: Callable[[int], None], folder: Path) -> None:
        corpus = corpus_of_shard(self.corpus, self.shards[number])
        bad_lines = self.corpus.bad_lines()
        counts = encode_corpus(corpus, self._tokenizer, self._how, folder, bad_lines, progress)
        settle_lines(corpus, bad_lines)
        write_notes(counts.notes, folder)
        sizes = {key: value for key, value in vars(counts).items() if key != "notes"}
        facts = {"counts": sizes, "bad_lines": bad_lines.as_json()}
        (folder / _FACTS).write_text(json.dumps(facts))

    def join(self, report: Report) -> None:
        """Join the finished shards into the token folder, with the same bytes as write_tokens.

        If several tasks finish together, one joins and the others wait. Raises OSError, and
        ConfigError with the bad lines of all shards, which are then removed and redone next time.
        """
        fill_once(self.folder, self._join, report)
        self._remove_shards()

    def _join(self, joined: Path) -> None:
        if self.missing():
            raise ConfigError(
                f"data.path: {self.corpus.path} has bad lines, which another task has reported"
            )
        folders = [self._work / _name(number) for number in range(len(self.shards))]
        sizes, notes, bad_lines = Counter[str](), Notes(), self.corpus.bad_lines()
        tokens: list[int] = []
        for folder in folders:
            facts = json.loads((folder / _FACTS).read_text())
            sizes.update(facts["counts"])
            notes.add(read_notes(folder))
            bad_lines.merge(BadLines.from_json(facts["bad_lines"]))
            tokens.append(facts["counts"]["tokens"])
        try:
            require_text(self.corpus, Counts(**sizes, notes=notes), bad_lines)
        except ConfigError:
            self._remove_shards()
            raise
        join_indexed([folder / TOKENS for folder in folders], joined / TOKENS)
        masks = (load_masks(folder / MASKS) for folder in folders)  # few open at a time
        join_masks(zip(masks, tokens, strict=True), joined / MASKS)
        keep_skipped(self.corpus, bad_lines, joined)
        write_notes(notes, joined)

    def remove(self) -> None:
        """Remove the joined tokens, their lock, and all shards."""
        self.folder.with_name(f"{self.folder.name}.lock").unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._remove_shards()

    def _remove_shards(self) -> None:
        unwanted = self._work.with_name(f"{self._work.name}.removed")
        shutil.rmtree(unwanted, ignore_errors=True)  # left over from a killed process
        with contextlib.suppress(OSError):
            self._work.rename(unwanted)  # no other process sees a half-removed shard
        shutil.rmtree(unwanted, ignore_errors=True)


def _name(number: int) -> str:
    return f"{number:05}"
