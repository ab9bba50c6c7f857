"""Turns a recipe into consecutive datatrove pipelines, and manages the output folder OUT."""

import contextlib
import errno
import fcntl
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline import dedup, filters
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter
from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig
from datatrove.pipeline.dedup.minhash import MinhashConfig

from harness.data.shards import Shard
from harness.errors import ConfigError
from harness.files.corpus import Corpus, find_corpus
from harness.files.splits import ALL
from tools.cleaning import steps as own
from tools.cleaning.recipe import Recipe, packaged_model
from tools.cleaning.steps import HASHES, words_of

_BUFFER = 256  # signatures read ahead per file
_FORMAT = 5  # increase this if the same corpus and recipe would give different bytes


@dataclass(frozen=True)
class Stage:
    """Pipelines that run concurrently: the same steps on every task."""

    name: str
    steps: list[PipelineStep]
    tasks: int
    reads_corpus: bool = False


def _text_of(document: Document) -> str:
    return document.text


@dataclass(frozen=True)
class Pipeline:
    """The stages that clean a corpus; intermediate files are kept in `work`."""

    recipe: Recipe
    corpus: Corpus
    shards: list[Shard]
    out: Path
    sample_one_in: int
    sample_shards: frozenset[int]
    """Shards in which a share of the documents is measured for the report."""

    @property
    def work(self) -> Path:
        """Folder of intermediate files, removed after the output is written."""
        return self.out / "work"

    @property
    def problems(self) -> Path:
        """Folder of each task's bad lines; exists only if there are any."""
        return self.work / "problems"

    @property
    def removed(self) -> Path:
        """Folder of the documents that each step removed."""
        return self.out / "removed"

    @property
    def data(self) -> Path:
        """Folder of the output: JSON lines, as data.path reads them."""
        return self.out / "data"

    def stages(self) -> Iterator[Stage]:
        """Yield the stages in order; each begins when the previous one has ended."""
        recipe, tasks = self.recipe, len(self.shards)
        steps: list[PipelineStep] = [
            own.CorpusReader(self.corpus, self.shards, self.problems),
            own.Sample(self.work / "sample", self.sample_one_in, self.sample_shards),
            *(self._filter(name) for name in recipe.filters),
        ]
        is_last = recipe.exact_duplicates is None and recipe.near_duplicates is None
        if is_last:
            yield Stage("filters", [*steps, *self._last()], tasks, reads_corpus=True)
            return
        steps.append(_writer(self.work / "filtered"))
        if recipe.exact_duplicates is not None:
            steps.append(dedup.ExactDedupSignature(str(self.work / "exact"), self._exact))
        yield Stage("filters", steps, tasks, reads_corpus=True)
        if recipe.exact_duplicates is not None:
            find = dedup.ExactFindDedups(
                *(str(self.work / "exact"), str(self.work / "exact-found"), self._exact),
                lines_to_buffer=_BUFFER,
            )
            yield Stage("exact_duplicates", [find], 1)
        if recipe.near_duplicates is not None:
            yield from self._near_stages(tasks)
        steps = [*self._filtered(excluding=True)]
        if recipe.near_duplicates is not None:
            steps.append(
                dedup.MinhashDedupFilter(
                    str(self.work / "near-found"), self._excluded("near_duplicates")
                )
            )
        yield Stage("output", [*steps, *self._last()], tasks)

    def _near_stages(self, tasks: int) -> Iterator[Stage]:
        near = self.recipe.near_duplicates
        assert near is not None
        config = MinhashConfig(
            n_grams=near.n_grams,
            num_buckets=near.num_buckets,
            hashes_per_bucket=near.hashes_per_bucket,
            seed=near.seed,
            hash_config=HASHES,
        )
        signatures, pairs = str(self.work / "near"), str(self.work / "near-pairs")
        signature = dedup.MinhashDedupSignature(signatures, config, words_of(self.recipe.words))
        yield Stage("signatures", [*self._filtered(excluding=False), signature], tasks)
        buckets = dedup.MinhashDedupBuckets(
            signatures, pairs, config=config, lines_to_buffer=_BUFFER
        )
        yield Stage("buckets", [buckets], near.num_buckets)
        cluster = dedup.MinhashDedupCluster(pairs, str(self.work / "near-found"), config)
        yield Stage("clusters", [cluster], 1)

    def _filtered(self, *, excluding: bool) -> Iterator[PipelineStep]:
        """Yield a reader of what the filters left, without exact duplicates."""
        yield own.TaskReader(str(self.work / "filtered"), add_file_path=False)
        if self.recipe.exact_duplicates is not None:
            writer = self._excluded("exact_duplicates") if excluding else None
            yield dedup.ExactDedupFilter(str(self.work / "exact-found"), self._exact, writer)

    def _last(self) -> Iterator[PipelineStep]:
        personal = self.recipe.personal_data
        if personal is not None:
            yield own.PersonalData(**dict(personal), removed=self.removed / "personal_data")
        yield _writer(self.data)

    def _filter(self, name: str) -> PipelineStep:
        recipe = self.recipe
        options: dict[str, Any] = dict(getattr(recipe, name))
        excluded, words = self._excluded(name), words_of(recipe.words)
        if name == "url":
            return own.Urls(excluded, **options)
        if name == "language":
            model = Path(options["model"]) if options["model"] else packaged_model()
            return own.Language(options["keep"], options["threshold"], model, excluded)
        if name == "bad_words":
            file = recipe.bad_words.file
            return own.BadWords(Path(file) if file else own.BANNED_WORDS, excluded)
        if name == "decontaminate":
            n_grams = recipe.decontaminate.n_grams
            config = NGramsDecontConfig(n_grams=n_grams, hash_config=HASHES)
            return NGramsDecontFilter(str(self.work / "n-grams"), config, excluded, words)
        kinds = {
            "gopher_repetition": filters.GopherRepetitionFilter,
            "gopher_quality": filters.GopherQualityFilter,
            "c4": own.C4,
            "fineweb_quality": filters.FineWebQualityFilter,
        }
        return kinds[name](exclusion_writer=excluded, language=words, **options)

    def _excluded(self, name: str) -> own.TaskWriter:
        return _writer(self.removed / name)

    @property
    def _exact(self) -> ExactDedupConfig:
        return ExactDedupConfig(_text_of, hash_config=HASHES)


def _writer(folder: Path) -> own.TaskWriter:
    return own.TaskWriter(str(folder), compression=None)


def logs_of(logs: Path, number: int, stage: Stage) -> Path:
    """Return the folder of a stage's logs, statistics and completion marks."""
    return logs / f"{number}-{stage.name}"


# --- the folder ---


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Lock OUT. Raises ConfigError if another process holds the lock."""
    with (out / "lock").open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # workers do not inherit it
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(
                    f"OUT: {out} is being written by another process: wait for it, or choose "
                    "another OUT"
                ) from None
        yield


def keep_identity(pipeline: Pipeline) -> None:
    """Record the corpus and the recipe. Raises ConfigError if OUT holds another cleaning."""
    made_from = {
        "format": _FORMAT,
        "datatrove": version("datatrove"),
        "recipe": json.loads(pipeline.recipe.identity()),
        "corpus": pipeline.corpus.identity(),
        "columns": dict(pipeline.corpus.columns),
        **_files_of(pipeline.recipe),
        "tasks": len(pipeline.shards),
    }
    made_from = json.loads(json.dumps(made_from))
    path = pipeline.out / "made-from.json"
    if path.exists():
        before = json.loads(path.read_text())
        differs = [key for key in made_from if made_from[key] != before.get(key)]
        if differs:
            raise ConfigError(
                f"OUT: {pipeline.out} holds a cleaning with a different {', '.join(differs)} "
                f"({path}): choose another OUT, or remove this one"
            )
        return
    if others := [path.name for path in pipeline.out.iterdir() if path.name != "lock"]:
        raise ConfigError(
            f"OUT: {pipeline.out} holds {others[0]}, which this tool did not write: choose "
            "another OUT"
        )
    temporary = path.with_name(".made-from.json")
    temporary.write_text(json.dumps(made_from))
    temporary.replace(path)


def _files_of(recipe: Recipe) -> dict[str, Any]:
    """Return the names, sizes and modification times of the files that a recipe reads."""
    read: dict[str, Any] = {}
    if recipe.decontaminate:
        corpora = [find_corpus(file, split=ALL) for file in recipe.decontaminate.files]
        read["evaluation data"] = [corpus.identity() for corpus in corpora]
    if recipe.bad_words and recipe.bad_words.file:
        read["list of words"] = _state(recipe.bad_words.file)
    if recipe.language and recipe.language.model:
        read["language model"] = _state(recipe.language.model)
    return read


def _state(file: str) -> list[int]:
    stat = Path(file).stat()
    return [stat.st_size, stat.st_mtime_ns]


def empty(folder: Path) -> None:
    """Remove the contents of a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_report(pipeline: Pipeline) -> dict[str, Any]:
    """Write the report as JSON, text and HTML unless it exists, and return it."""
    from harness.report.page import write_page
    from tools.cleaning.report import as_text, page_of, report_of

    path = pipeline.out / "report.json"
    if path.exists():
        return json.loads(path.read_text())
    report = report_of(pipeline, pipeline.out / "logs")
    (pipeline.out / "report.txt").write_text(as_text(report) + "\n", encoding="utf-8")
    write_page(pipeline.out / "report.html", page_of(report))
    write_page(path, json.dumps(report, indent=1))
    return report
