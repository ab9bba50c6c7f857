"""One input: what is run on it, where it is made, and the kinds that there are."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.two_ranks import SHORT_RUN, SMALL_MODEL

VALID_EVERY = 6
"""One input in so many is left as it should be, and must be accepted."""
SECRET = "what-only-this-machine-should-hold"
SMALL_BUCKET = "ds.zero_optimization.reduce_bucket_size=1000000"  # DeepSpeed's takes 2 GB


@dataclass(frozen=True)
class Case:
    """A command line, and what was done to the input that it names."""

    argv: list[str]
    note: str
    main: str = "harness.train"
    """The module whose main(argv) is called."""
    valid: bool = False
    """Nothing is wrong with it: any end but 0 is a fault."""


@dataclass(frozen=True)
class Base:
    """Valid inputs, which nobody changes: every kind copies what it spoils."""

    folder: Path

    @property
    def corpus(self) -> Path:
        """A folder of text files."""
        return self.folder / "corpus"

    @property
    def cache(self) -> Path:
        """Folder of the tokenised corpus."""
        return self.folder / "cache"

    @property
    def run(self) -> Path:
        """A run of two steps with a checkpoint of each, and its export."""
        return self.folder / "run"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of that run."""
        return self.run / "tokenizer"

    @property
    def tokens(self) -> Path:
        """The prefix of a .bin/.idx pair."""
        return self.folder / "tokens"

    @property
    def sharded(self) -> Path:
        """The same export in several files with an index."""
        return self.folder / "sharded"


@dataclass(frozen=True)
class Place:
    """The folder of one input, in which the process runs."""

    folder: Path
    base: Base

    @property
    def marker(self) -> Path:
        """File that a planted payload creates if it is executed."""
        return self.folder / "executed"

    @property
    def run(self) -> Path:
        """A run folder that does not exist yet."""
        return self.folder / "run"

    def secret(self) -> Path:
        """A file that no input may carry into what is written."""
        path = self.folder / "secret.txt"
        path.write_text(f"{SECRET}\n")
        return path

    def copied(self, source: Path, name: str | None = None) -> Path:
        """A copy of a valid input, to be spoiled."""
        target = self.folder / (name or source.name)
        if source.is_dir():
            return Path(shutil.copytree(source, target))
        return Path(shutil.copy2(source, target))

    def training(self, *more: str, steps: int = 1, data: bool = True) -> list[str]:
        """The arguments of a run of a step or two of a small model."""
        words = [*SMALL_MODEL, *SHORT_RUN, SMALL_BUCKET]
        words += [f"train.steps={steps}", f"run.dir={self.run}"]
        if data:
            words.append(f"data.path={self.base.corpus}")
        if not (self.folder / "cache").exists():
            self.copied(self.base.cache)
        return [*words, f"data.cache_dir={self.folder / 'cache'}", *more]

    def resuming(self, *more: str, steps: int = 3) -> list[str]:
        """The arguments of the base's run, for one step more."""
        return self.training("save.every=1", *more, steps=steps)


@dataclass(frozen=True)
class Kind:
    """A kind of input. `make` gets a source of chance, a place and whether to leave it valid."""

    name: str
    inputs: int
    """Of the 1,500 that `make fuzz` tries."""
    make: Callable[[random.Random, Place, bool], Case]
    accepted: float = 0.1
    """The least part that must be accepted: a gate that nothing passes proves nothing."""
    refused: float = 0.1
    """The least part that must be refused."""


def is_valid(index: int) -> bool:
    """Return True for the indices whose input is left as it should be."""
    return index % VALID_EVERY == 0
