"""An architecture that the planner does not know: its shape, and what its layers save, from its own
class.

torch is not imported here: another process traces the class on fake tensors (models/tracing.py),
once for each model and micro-batch; the answer is kept in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.estimate.layer_trace import Way
from harness.layout.shape import Shape
from harness.layout.tensors import Body, Tensor

_REPOSITORY = Path(__file__).resolve().parents[2]
_MODULE = "harness.models.tracing"
_FILES = (
    *("models/tracing.py", "models/state_kernels.py"),
    *("models/saved.py", "models/loss.py"),
)
_PATIENCE_S = 600


class Untraceable(ValueError):
    """A class that cannot be built or run on fake tensors, or no torch to do it."""


@dataclass(frozen=True)
class Traced:
    """A traced model; bytes are of the request's micro-batch."""

    shape: Shape
    layers: tuple[int, ...]
    outside: int
    way: Way


def traced(request: dict[str, Any]) -> Traced:
    """Return the trace of models/tracing.py's Request. Raises Untraceable."""
    answer = _answered(request)
    body, sizes = answer["body"], answer["sizes"]
    sizes["sliding_windows"] = tuple(sizes["sliding_windows"])

    def tensors(rows: list[list[Any]]) -> tuple[Tensor, ...]:
        return tuple(Tensor(name, tuple(size), kind) for name, size, kind in rows)

    made = Body(
        tensors(body["before"]),
        body["layer_prefix"],
        tuple(map(tensors, body["layers"])),
        tensors(body["after"]),
    )
    shape = Shape(**sizes, body=made)
    return Traced(shape, tuple(answer["layers"]), answer["outside"], answer["way"])


def _answered(request: dict[str, Any]) -> dict[str, Any]:
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        raise Untraceable("its class is traced where torch and transformers are installed")
    text = json.dumps(request, sort_keys=True)
    with _locked(_kept(text)) as path:
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                return answer
        answer = _asked(text)
        if path is not None:
            with contextlib.suppress(OSError):
                path.write_text(json.dumps(answer), encoding="utf-8")
        return answer


def _asked(text: str) -> dict[str, Any]:
    """Trace in another process, which needs no GPU."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    paths = [str(_REPOSITORY), environ.get("PYTHONPATH")]  # an empty one is the current folder
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-P", "-m", _MODULE]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, env=environ, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Untraceable(f"its class cannot be traced: {error}") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise Untraceable(f"its class cannot be traced: {last[0]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _kept(text: str) -> Path | None:
    """The file in which an answer is kept; None without a folder for it."""
    made_by = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    made_by += [(_REPOSITORY / "harness" / name).read_text(encoding="utf-8") for name in _FILES]
    digest = hashlib.sha256("\0".join([*made_by, text]).encode()).hexdigest()
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(root).expanduser() / "decoder-harness" / "traces"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder / f"{digest}.json"


@contextlib.contextmanager
def _locked(path: Path | None) -> Iterator[Path | None]:
    """Let ranks of a node trace one after the other: the first does, the others read."""
    if path is None:
        yield None
        return
    try:
        with path.with_suffix(".lock").open("w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
    except PermissionError:
        yield None
