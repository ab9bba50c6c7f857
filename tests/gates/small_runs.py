"""Runs a small model on one CPU rank each, for curves over seeds and settings."""

from __future__ import annotations

import ast
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.data.corpus import find_corpus
from harness.launch.fork_server import Zygote
from harness.launch.ranks import REPOSITORY
from harness.runfolder import RunFolder

SMALL_MODEL = (
    *("model.overrides.vocab_size=1024", "model.overrides.hidden_size=64"),
    *("model.overrides.intermediate_size=160", "model.overrides.num_hidden_layers=2"),
    *("model.overrides.num_attention_heads=4", "model.overrides.num_key_value_heads=4"),
    "model.overrides.head_dim=16",
)
_QUIET = (
    *("data.vocab_size=1024", "ds.bf16.enabled=false", "sample.tokens=0", "save.export=false"),
    *("log.report=false", "log.weights_every=0", "log.attention_every=0"),
)


def functions() -> Iterator[str]:
    """Yield the functions and classes of Python's library as texts: many short, a few long."""
    for piece in find_corpus(None).pieces():
        try:
            tree = ast.parse(piece.text)
        except (SyntaxError, ValueError):
            continue
        lines = piece.text.splitlines(keepends=True)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    """Write texts as a corpus with one document each."""
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def trained(
    zygote: Zygote, folder: Path, words: Sequence[str], model: Sequence[str] = SMALL_MODEL
) -> RunFolder:
    """Run to the end, unless done already, and return the folder. Raises RuntimeError with the
    log.
    """
    run = RunFolder(folder)
    if (run.read_status() or {}).get("outcome") == "done":
        return run
    logs = folder.with_name(f"{folder.name}-logs")
    arguments = [f"--deepspeed={REPOSITORY / 'ds_configs/zero1.json'}", *model, *_QUIET, *words]
    ended = zygote.run([*arguments, f"run.dir={folder}"], logs, ranks=1, limit_s=3600)
    if ended.codes != [0]:
        raise RuntimeError(ended.output)
    return run


def mean_and_spread(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation of some values as text."""
    return f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"


def lines_with(run: RunFolder, key: str) -> list[dict[str, Any]]:
    """Return the metrics lines that have a key."""
    return [line for line in run.read_metrics() if line.get(key) is not None]
