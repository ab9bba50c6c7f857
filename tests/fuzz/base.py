"""Valid inputs, made by the real commands."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.fuzz.case import Base
from tests.two_ranks import SHORT_RUN, SMALL_MODEL, write_corpus
from tools.proofs.zygote import Outcome, Zygote


def build_base(zygote: Zygote, folder: Path) -> Base:
    """A corpus, its tokens, a run of two steps, its export in one file and in several."""
    base = Base(folder)
    folder.mkdir(parents=True)
    write_corpus(base.corpus, documents=30)
    words = [*SMALL_MODEL, *SHORT_RUN, "train.steps=2", "save.every=1", "save.export=true"]
    words += [f"data.path={base.corpus}", f"data.cache_dir={base.cache}", f"run.dir={base.run}"]
    _succeeded(zygote.run(words, folder / "logs", ranks=1))
    words = [str(base.run), "--out", str(base.sharded), "--shard-size", "100KB", "--no-check"]
    _succeeded(zygote.run(words, folder / "logs", ranks=1, main="tools.export_hf"))
    for suffix in (".bin", ".idx"):
        (tokens,) = base.cache.glob(f"tokens-*/tokens{suffix}")
        shutil.copy(tokens, f"{base.tokens}{suffix}")
    return base


def _succeeded(outcome: Outcome) -> None:
    assert outcome.codes == [0], outcome.output
