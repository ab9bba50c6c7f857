"""Timed jobs: ours and the libraries' own, each in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.proofs.cleaning.planted import FILES
from tools.workers import cores


def _timed(work: Callable[[], object]) -> None:
    """Print the seconds of `work`, and the CPU seconds of it and of its processes."""
    before, begun = _cpu(), time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    print(json.dumps({"seconds": seconds, "cpu": _cpu() - before}))


def _cpu() -> float:
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(of.ru_utime + of.ru_stime for of in map(resource.getrusage, who))


def _tool(folder: Path, out: Path) -> None:
    import tools.cleaning.page  # what a start costs is not a rate
    import tools.cleaning.report
    from tools.clean_data import main as clean

    assert tools.cleaning.page
    assert tools.cleaning.report
    _timed(lambda: clean([str(folder), str(out), "--recipe=fineweb", "url=false", "--keep-work"]))


def _bare(folder: Path, out: Path) -> None:
    """The blocks of datatrove that the recipe names, by its own executor."""
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader

    from harness.data.corpus import find_corpus
    from tools.cleaning.pipeline import Pipeline
    from tools.cleaning.recipe import read_recipe

    recipe = read_recipe("fineweb", ["url=false"])
    tasks: list[Any] = [None] * FILES  # its own reader deals out the files
    pipeline = Pipeline(recipe, find_corpus(str(folder)), tasks, out, 1, frozenset())

    def work() -> None:
        for number, stage in enumerate(pipeline.stages(), 1):
            steps = stage.steps
            if stage.reads_corpus:
                steps = [JsonlReader(str(folder)), *steps[2:]]
            logs = str(out / "logs" / f"{number}-{stage.name}")
            workers = min(cores(), stage.tasks)
            LocalPipelineExecutor(steps, stage.tasks, workers, logs, start_method="fork").run()

    _timed(work)


def _train(folder: Path, out: Path) -> None:
    from tools.train_tokenizer import main as train

    _timed(
        lambda: train([str(folder / "0.jsonl"), str(out), "--kind=byte_bpe", "--vocab-size=8000"])
    )


def _tokenize(folder: Path, out: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from harness.config.run_file import load_run_config
    from tools.tokenizing.work import Work
    from tools.workers import run_workers

    words = [f"data.path={folder}", f"data.tokenizer={folder.parent / 'tokenizer'}"]
    work = Work(load_run_config(None, words), out, lambda line: None, False)
    (source,) = work.sources()

    def tokenized() -> None:
        run_workers(source.tokens.write, source.tokens.missing(), cores(), lambda done: None)
        work.finish(source)

    _timed(tokenized)


def _encode(folder: Path, out: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from harness.data.tokenizer import encode, load_tokenizer

    tokenizer = load_tokenizer(folder.parent / "tokenizer")
    lines = [line for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]
    texts = [json.loads(line)["text"] for line in lines]

    def work() -> None:
        for first in range(0, len(texts), 1024):
            encode(tokenizer, texts[first : first + 1024])

    _timed(work)


JOBS: dict[str, Callable[[Path, Path], None]] = {
    "tool": _tool,
    "bare": _bare,
    "train": _train,
    "tokenize": _tokenize,
    "encode": _encode,
}
