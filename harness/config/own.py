"""Decorators for a file of the user's own (run.code), which add rows to the tables of optimizers,
losses, attentions, schedules and metrics; docs/own_code.md shows one of each.

Only `load` runs such a file, and only run_file.load_run_config calls it, with what the user typed
for this start: a stored config, plan.json or checkpoint that names a file never runs it.
"""

import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from harness.config.assignments import MAX_FILE_BYTES
from harness.config.optim_and_schedule import DECAYS, Decay
from harness.config.sections import LOSSES, NAME_PATTERN
from harness.errors import ConfigError, worded
from harness.files.paths import expanded_path
from harness.files.regular_file import read_regular
from harness.layout.attention_table import ATTENTIONS, Attention
from harness.layout.optimizer_table import OPTIMIZERS, Optimizer

_Made = TypeVar("_Made", bound=Callable[..., Any])
_Adding = Callable[[_Made], _Made]
METRICS: dict[str, None] = {}
_TABLES: dict[str, dict[str, Any]] = {
    "optimizer": OPTIMIZERS,
    "loss": LOSSES,
    "attention": ATTENTIONS,
    "schedule": DECAYS,
    "metric": METRICS,
}
_MODULE = "own_code"


@dataclass(frozen=True)
class Row:
    """A function of the user's, or a class, which is called like one."""

    kind: str
    name: str
    function: Callable[..., Any]
    place: str
    """FILE:LINE."""
    keys: Mapping[str, bool]
    """Keys of own.* that it takes; True if it needs them."""

    def __str__(self) -> str:
        """Return the row as the beginning of a problem."""
        return f"{self.place}: {self.kind} {self.name!r}"

    def bound(self, values: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the function with its values of own.*."""
        return partial(self.function, **{key: values[key] for key in self.keys if key in values})

    def failed(self, error: Exception) -> ConfigError:
        """Return the error that the function raised as a problem of the file."""
        return ConfigError(f"{_worded(self.place.rpartition(':')[0], error)} ({self})")


ROWS: dict[tuple[str, str], Row] = {}
"""What the loaded file has added, by kind and name."""
_loaded: tuple[str, bytes] | None = None


def load(path: str | None, origin: str) -> None:
    """Run a file and replace what an earlier one has added; None: only remove that. A file that is
    loaded already does not run again.

    Raises ConfigError, with file and line, if it cannot be run or adds what it may not.
    """
    global _loaded
    own = None
    try:
        if path:
            path = expanded_path(path)
            own = path, read_regular(Path(path), MAX_FILE_BYTES, links=True)
            if own == _loaded:
                return
        _unload()
        if own:
            _loaded = own
            _run(*own)
    except (Exception, SystemExit) as error:
        _unload()
        why = _worded(own[0], error) if own else f"it cannot be read: {error}"
        raise ConfigError(worded("run.code", path, origin, why)) from error


def _run(path: str, source: bytes) -> None:
    spec = importlib.util.spec_from_loader(_MODULE, None, origin=path)
    assert spec is not None
    module = sys.modules[_MODULE] = importlib.util.module_from_spec(spec)
    module.__file__ = path
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))


def _unload() -> None:
    global _loaded
    for kind, name in ROWS:
        del _TABLES[kind][name]
    ROWS.clear()
    sys.modules.pop(_MODULE, None)
    _loaded = None


def _worded(path: str, error: BaseException) -> str:
    """Return FILE:LINE: the error of a file, on one line."""
    text, frames = str(error), traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        text, lines = error.msg, [error.lineno]
    kind = "" if isinstance(error, _Refused) else f"{type(error).__name__}: "
    return f"{path}:{lines[-1] if lines else 1}: {kind}{' '.join(text.split())}"


def loaded(path: str | None) -> dict[str, Any] | None:
    """Return path, sha256 and rows of the loaded file, for plan.json; None if it is not `path`."""
    if _loaded is None or _loaded[0] != path:
        return None
    adds = [f"{kind} {name}" for kind, name in ROWS]
    return {"file": path, "sha256": hashlib.sha256(_loaded[1]).hexdigest(), "adds": adds}


def source() -> bytes:
    """Return the content of the loaded file, as it was when it ran."""
    return _loaded[1] if _loaded else b""


class _Refused(ValueError):
    """A row that cannot be added; its text says why."""


def optimizer(
    name: str,
    *,
    state_bytes: float,
    takes: tuple[str, ...] = (),
    momentum: float = 0.0,
    layouts: str = "any",
) -> _Adding[_Made]:
    """Add a value of optim.name: a function of (groups, lr, weight_decay, ...) that returns a
    torch.optim.Optimizer, or such a class. Keyword arguments: as in layout/optimizer_table.py.
    """
    known, places = ("betas", "eps", "momentum"), ("any", "unoffloaded", "whole")
    if not {*takes} <= {*known} or layouts not in places:
        raise _Refused(f"takes={takes} must be of {known}, layouts={layouts!r} of {places}")
    row = Optimizer(f"own_{name}", tuple(takes), state_bytes, momentum, layouts=layouts)
    return _adding("optimizer", name, "groups", ("lr", "weight_decay", *takes), lambda _: row)


def loss(name: str) -> _Adding[_Made]:
    """Add a value of train.loss: a function of logits (micro_batch, seq_len, vocab_size) fp32 and
    labels (micro_batch, seq_len), -100 where there is no target, that returns the loss of each
    token, (micro_batch, seq_len), 0 where there is no target.
    """
    return _adding("loss", name, "logits labels", (), lambda _: "of run.code")


def attention(
    name: str,
    *,
    exact: bool = True,
    keeps_scores: bool = False,
    keys: Callable[[float], float] = lambda half: half,
) -> _Adding[_Made]:
    """Add a value of model.attention: a function as in transformers' ALL_ATTENTION_FUNCTIONS, whose
    mask is (micro_batch, 1, seq_len, seq_len), True where a query sees a key.

    `exact`: it is compared with sdpa at the start; `keeps_scores`: all scores are saved for the
    backward pass; `keys`: average number of keys per query, from half the sequence length.
    """
    if "flash" in name or "flex" in name:
        raise _Refused(f"attention {name!r}: transformers treats names with flash and flex as own")
    row = Attention(
        keys=lambda _, half: keys(half),
        keeps_scores=keeps_scores,
        is_own=True,
        approximates=not exact,
    )
    given = "module query key value attention_mask"
    passed = ("scaling", "dropout", "sliding_window", "softcap", "position_ids", "use_cache")
    return _adding("attention", name, given, passed, lambda _: row)


def schedule(name: str) -> _Adding[_Made]:
    """Add a value of optim.schedule: a function of the progress after warm-up, from 0 to 1, that
    returns the position between the lowest rate (0) and the peak (1).
    """

    def row_of(row: Row) -> Decay:
        own = tuple(row.keys)
        return Decay(lambda progress, _, **values: row.function(progress, **values), own=own)

    return _adding("schedule", name, "progress", (), row_of)


def metric(name: str) -> _Adding[_Made]:
    """Add a metric: a function of (run, step) whose number or scalar tensor each line of
    metrics.jsonl holds as own/NAME, or a class of harness.run.instrument.Instrument. Every rank
    calls it; rank 0 writes.
    """
    return _adding("metric", name, "run step", (), lambda _: None)


def _adding(
    kind: str, name: str, given: str, keywords: tuple[str, ...], row_of: Callable[[Row], Any]
) -> _Adding[_Made]:
    """Return a decorator that adds a function to a table; it will be called with `given` by
    position and with `keywords`.
    """

    def add(function: _Made) -> _Made:
        if _loaded is None:  # another program imports the file, such as its tests
            return function
        table, path = _TABLES[kind], _loaded[0]
        if not re.fullmatch(NAME_PATTERN, name) or name == "auto":
            raise _Refused(f"{kind} {name!r}: a name consists of letters, digits, _, . and -")
        if name.lower() in map(str.lower, table):
            by = ROWS[kind, name].place if (kind, name) in ROWS else "the harness"
            raise _Refused(f"{kind} {name!r} is taken by {by}")
        is_class = kind == "metric" and isinstance(function, type)
        keys = _own_keys(kind, name, function, [] if is_class else given.split(), keywords)
        lines = [frame.lineno for frame in traceback.extract_stack() if frame.filename == path]
        row = ROWS[kind, name] = Row(kind, name, function, f"{path}:{lines[-1]}", keys)
        table[name] = row_of(row)
        return function

    return add


def _own_keys(
    kind: str, name: str, function: Callable[..., Any], given: list[str], keywords: tuple[str, ...]
) -> dict[str, bool]:
    """Return the parameters that are keys of own.*, True for those without a default."""
    try:
        signature = inspect.signature(function)
        passed = signature.bind_partial(*given, **dict.fromkeys(keywords)).arguments
    except (TypeError, ValueError) as error:
        how = ", ".join([*given, *(f"{key}=..." for key in keywords)])
        raise _Refused(f"{kind} {name!r} must take ({how}): {error}") from None
    return {
        key: parameter.default is parameter.empty
        for key, parameter in signature.parameters.items()
        if key not in passed
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
