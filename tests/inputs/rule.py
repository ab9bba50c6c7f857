"""The rule for every input: its exit code is in the table, there is no traceback, and it ends in
bounded time; nothing in it is executed, leaks or is left behind; and a valid input is accepted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.errors import ExitCode
from harness.launch.fork_server import OVERRAN, Outcome, Zygote
from tests.inputs.values import Draw, pick
from tests.real_runs import SHORT_RUN, SMALL_MODEL, write_corpus

SECRET = "what-only-this-machine-should-hold"
SMALL_BUCKET = "ds.zero_optimization.reduce_bucket_size=1000000"  # DeepSpeed's own takes 2 GB
SEED = int(os.environ.get("INPUTS_SEED", "0"))
INPUTS = int(os.environ.get("INPUTS", "1500"))
_LIMIT_S = 120.0  # seconds of waiting; computation ends after the zygote's BOUNDS
_SIGNS = (
    "Traceback (most recent call last)",
    "Fatal Python error",
    "Exception ignored in",
    "panicked at",
    "terminate called",
)
# Folders that may be filled before an input turns out to be invalid.
_CACHES = ("cache", "home", ".cache", "new cache")
_REFUSALS = (ExitCode.BAD_CONFIG, ExitCode.CANNOT_SAVE, ExitCode.NO_CHECKPOINT)

Files = dict[str, tuple[int, int, int]]
"""Files by path within an input's folder: mode, size and modification time; folders have only the
mode.
"""


@dataclass(frozen=True)
class Case:
    """A command line, and the change to the input that it names."""

    argv: list[str]
    note: str
    main: str = "harness.train"
    """The module whose main(argv) is called."""
    valid: bool = False
    """True if the input is valid: any exit code but 0 is a failure."""


class Base:
    """Valid inputs, made by the real commands; kinds change copies of them."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        """Write a corpus, its tokens, a run of two steps, and its exports in one file and in
        several.
        """
        folder.mkdir(parents=True)
        self.corpus = write_corpus(folder / "corpus", documents=30)
        self.cache, self.run, self.sharded = folder / "cache", folder / "run", folder / "sharded"
        self.tokenizer, self.export = self.run / "tokenizer", self.run / "export"
        self.tokens = folder / "tokens"
        words = [*SMALL_MODEL, *SHORT_RUN, "train.steps=2", "save.every=1", "save.export=true"]
        words += [f"data.path={self.corpus}", f"data.cache_dir={self.cache}", f"run.dir={self.run}"]
        _require_success(zygote.run(words, folder / "logs", ranks=1))
        words = [str(self.run), "--out", str(self.sharded), "--shard-size", "100KB", "--no-check"]
        _require_success(zygote.run(words, folder / "logs", ranks=1, main="tools.export_hf"))
        for suffix in (".bin", ".idx"):
            (tokens,) = self.cache.glob(f"tokens-*/tokens{suffix}")
            shutil.copy(tokens, f"{self.tokens}{suffix}")


def _require_success(outcome: Outcome) -> None:
    assert outcome.codes == [0], outcome.output


@dataclass(frozen=True)
class Place:
    """The folder of one input, in which the process runs."""

    folder: Path
    base: Base

    @property
    def marker(self) -> Path:
        """File that a planted payload creates if it is executed."""
        return self.folder / "executed"

    def secret(self) -> Path:
        """Write a file whose content no input may carry into an output."""
        path = self.folder / "secret.txt"
        path.write_text(f"{SECRET}\n")
        return path

    def copied(self, source: Path, name: str | None = None) -> Path:
        """Copy a valid input, to be spoiled."""
        target = self.folder / (name or source.name)
        if source.is_dir():
            return Path(shutil.copytree(source, target))
        return Path(shutil.copy2(source, target))

    def training(self, *more: str, steps: int = 1, data: bool = True, model: bool = True) -> Any:
        """Return the arguments of a run of one or more steps of a small model."""
        words = [*(SMALL_MODEL if model else ()), *SHORT_RUN, SMALL_BUCKET]
        words += [f"train.steps={steps}", f"run.dir={self.folder / 'run'}"]
        if data:
            words.append(f"data.path={self.base.corpus}")
        if not (self.folder / "cache").exists():
            self.copied(self.base.cache)
        return [*words, f"data.cache_dir={self.folder / 'cache'}", *more]

    def resuming(self, *more: str) -> list[str]:
        """Return the arguments that resume the base's run for one more step."""
        return list(self.training("save.every=1", *more, steps=3))

    def plant_code(self, folder: Path) -> None:
        """Write Python files that create the marker when they are imported."""
        for name in ("configuration_x", "modeling_x", "tokenization_x", "sitecustomize", "torch"):
            code = f"import pathlib\npathlib.Path({str(self.marker)!r}).touch()\n"
            (folder / f"{name}.py").write_text(code)


Kind = Callable[[Draw[Any], Place, bool], Case]
"""Creates an input in its place from drawn values; the last argument asks for a valid one."""


@st.composite
def cases(draw: Draw[Any], kind: Kind, place: Place) -> Case:
    """Draw an input of a kind; one in six is valid."""
    return kind(draw, place, pick(draw, (True, *[False] * 5)))


MANY = pytest.mark.parametrize(
    "count", [40, pytest.param(1000, marks=pytest.mark.gate("inputs"), id="all")]
)
"""Number of inputs of a test that needs no other process."""
_NOT_SHRUNK = [Phase.generate]  # with one process per input, the first failure is shown as it is


def each(count: int, **more: Any) -> settings:
    """Return the settings of a test with `count` inputs, always the same unless there is a seed."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


@dataclass
class Inputs:
    """Tries inputs of one kind, each in a new process; a failing input keeps its folder."""

    zygote: Zygote
    base: Base
    folder: Path
    codes: Counter[int | None] = field(default_factory=Counter)

    def brief(self, kind: Kind, count: int) -> None:
        """Try a few inputs, always the same."""
        each(count, phases=_NOT_SHRUNK)(self._test(kind))()

    def seeded(self, kind: Kind, share: int) -> None:
        """Try `share` of 1,500 inputs; if almost all are accepted or rejected, they prove
        nothing.
        """
        name = getattr(kind, "__name__", "")
        replay = f"INPUTS_SEED={SEED} pytest --gate inputs tests/inputs -k '{name}'"
        print(f"{name}, seed {SEED}; again: {replay}; INPUTS={INPUTS} in all")
        count = max(1, share * INPUTS // 1500)
        each(count, phases=_NOT_SHRUNK)(hypothesis.seed(SEED)(self._test(kind)))()
        refused = sum(self.codes[code] for code in _REFUSALS)
        print(f"{name}: {dict(self.codes)}")
        if count >= 30:
            assert min(self.codes[0], refused * 2) >= self.codes.total() // 10, self.codes

    def _test(self, kind: Kind) -> Callable[[], None]:
        @given(st.data())
        def keeps_the_rule(data: st.DataObject) -> None:
            place = Place(self.folder / "input", self.base)
            remove(place.folder)
            place.folder.mkdir(parents=True)
            case = data.draw(cases(kind, place))
            outcome, faults = tried(self.zygote, case, place)
            self.codes[outcome.codes[0]] += 1
            assert not faults, f"{case.note}\n{faults}\n{case.main} {case.argv}\n{outcome.output}"

        return keeps_the_rule


def tried(
    zygote: Zygote, case: Case, place: Place, limit_s: float = _LIMIT_S
) -> tuple[Outcome, dict[str, str]]:
    """Run one input in a new process; return its outcome and violations of the rule."""
    before = _files_in(place.folder)
    outcome = zygote.run(
        [
            os.fsdecode(os.fsencode(word)) if _can_be_passed(word) else ascii(word)[:100_000]
            for word in case.argv
        ],
        place.folder.with_name(f"{place.folder.name}.log"),
        ranks=1,
        limit_s=limit_s,
        main=case.main,
        cwd=place.folder,
        bounded=True,
    )
    return outcome, _faults(case, place, before, outcome)


def _can_be_passed(word: str) -> bool:
    """Return True if a word can be a process argument: bytes without NUL."""
    with contextlib.suppress(UnicodeEncodeError):
        return b"\0" not in os.fsencode(word) and len(word) < 100_000
    return False


def _faults(case: Case, place: Place, before: Files, outcome: Outcome) -> dict[str, str]:
    (code,) = outcome.codes
    after = _files_in(place.folder)
    faults = {}
    last_line = (outcome.output.strip().splitlines() or [""])[-1][:300]
    if code in (None, -OVERRAN):
        faults["hang"] = f"not ended after {outcome.seconds[0]:.0f} s"
    elif signs := [sign for sign in _SIGNS if sign in outcome.output]:
        faults["traceback"] = f"code {code}, {signs[0]}: {last_line}"
    elif code not in {*ExitCode}:
        faults["exit code"] = f"code {code}: {last_line}"
    elif case.valid and code != 0:
        faults["not accepted"] = f"code {code}: {last_line}"
    if place.marker.exists():
        faults["executed"] = f"{place.marker.name} was created"
    changed = sorted(
        path
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path) and not path.startswith(_CACHES)
    )
    if changed and (code == ExitCode.BAD_CONFIG or (code == 0 and "--dry-run" in case.argv)):
        faults["written"] = f"code {code}, but {', '.join(changed[:3])}"
    if leaks := [path for path in changed if _holds_secret(place.folder / path)]:
        faults["leaked"] = f"{leaks[0]} has what only {place.folder.name} should hold"
    return faults


def _files_in(folder: Path) -> Files:
    """Return all files and folders of an input, without following links."""
    table = {}
    for path in folder.rglob("*"):
        about = path.lstat()
        is_folder = path.is_dir() and not path.is_symlink()
        size, time = (0, 0) if is_folder else (about.st_size, about.st_mtime_ns)
        table[str(path.relative_to(folder))] = (about.st_mode, size, time)
    return table


def _holds_secret(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes()


def remove(folder: Path) -> None:
    """Remove a folder of any depth."""
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(max(limit, 20_000))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
    finally:
        sys.setrecursionlimit(limit)
