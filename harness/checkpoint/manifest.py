"""manifest.json: describes a checkpoint and lists its files. Written last, so its presence means
that the checkpoint is complete.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.checkpoint.index import INDEX, Index
from harness.errors import Unusable
from harness.files.regular_file import open_regular, read_json
from harness.files.table import Table

FORMAT = 1
MANIFEST, PROBE = "manifest.json", "probe.safetensors"
PRECISIONS = ("fp32", "bf16", "fp16")
_WEIGHTS = re.compile(r"rank-[0-9]{5}-[0-9]{3}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Enough for a thousand ranks with a hundred files each, and for their index.
_MOST_MANIFEST_BYTES, _MOST_INDEX_BYTES = 2**26, 2**31


@dataclass(frozen=True)
class TrainState:
    """The progress of a run. It and the plan determine the next step."""

    step: int = 0  # optimizer steps taken, skipped ones included
    samples: int = 0  # samples consumed, over all ranks
    tokens: int = 0  # tokens consumed, over all ranks

    def after(self, samples: int, tokens: int) -> TrainState:
        """Return the state after one more step with this many samples and tokens."""
        return TrainState(self.step + 1, self.samples + samples, self.tokens + tokens)


@dataclass(frozen=True)
class Written:
    """A written file, with the size and hash that readers check."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    `engine`: counters, loss scaling, step count of the optimizer. `probe_loss`: loss of the batch
    in probe.safetensors with these weights, in nats per target token. `held_out_loss`: in the same
    unit, None if these weights were not evaluated. `about`: further facts, for display only.
    `watch`: the state of `guard.stability.StabilityMonitor`.
    """

    state: TrainState
    precision: str
    model_config: dict[str, Any]
    data_fingerprint: Any
    engine: dict[str, dict[str, Any]]
    probe_loss: float | None
    held_out_loss: float | None
    about: dict[str, Any]
    watch: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, Any] = field(default_factory=dict)
    """peft's config of the trained adapters; the frozen weights are not saved."""
    quantization: dict[str, Any] = field(default_factory=dict)
    """transformers' config of how the frozen weights were quantized."""
    files: list[Written] = field(default_factory=list)
    checksum: str = ""
    """SHA-256 of the other fields; a resumed run records it."""

    @property
    def bytes(self) -> int:
        """Total bytes of all files."""
        return sum(file.bytes for file in self.files)

    def to_bytes(self) -> builtins.bytes:
        """Return the content of the file, including its checksum."""
        content = {"format": FORMAT, **asdict(self), "checksum": ""}
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files match its manifest."""

    path: Path
    manifest: Manifest

    @property
    def state(self) -> TrainState:
        """The progress of the run at the save."""
        return self.manifest.state


def read_manifest(folder: Path, check_sizes: bool = True) -> Manifest:
    """Return a checkpoint's manifest, after checking the sizes of its files.

    `check_sizes` is False if other ranks check them. Raises Unusable, and OSError.
    """
    path = folder / MANIFEST
    if folder.is_symlink():
        raise Unusable(f"{folder} is a symlink, not a checkpoint")
    try:
        manifest = _manifest(Table(read_json(path, _MOST_MANIFEST_BYTES), path))
    except (FileNotFoundError, NotADirectoryError):
        raise Unusable(f"{path} is not there") from None
    except RecursionError:  # parsed, but too deep to be serialised again
        raise Unusable(f"{path} is nested too deeply") from None
    if folder.name != (name := checkpoint_name(manifest.state.step)):
        raise Unusable(f"{folder} contains step {manifest.state.step} and should be called {name}")
    if check_sizes:
        for file in manifest.files:
            check_size(folder, file)
    return manifest


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint of a step."""
    return f"step-{step:08d}"


def read_index(folder: Path) -> Index:
    """Return the index, checked only to be a JSON object of objects. Raises Unusable, and
    OSError.
    """
    path = folder / INDEX
    try:
        return Index(read_json(path, _MOST_INDEX_BYTES), path)
    except FileNotFoundError:
        raise Unusable(f"{path} is not there") from None


def check_index(folder: Path, manifest: Manifest) -> None:
    """Check that the index is complete and that its files are in the manifest. Raises Unusable."""
    path, index = folder / INDEX, read_index(folder)
    files = index.check()
    listed = {file.name for file in manifest.files if _WEIGHTS.fullmatch(file.name)}
    if strange := files - listed:
        raise Unusable(f"{path} names {min(strange)!r}, which the manifest does not list")


def _manifest(content: Table) -> Manifest:
    """Return the manifest, after checking the types of its values."""
    if type(version := content.get("format")) is not int or version != FORMAT:
        raise Unusable(
            f"{content.file} has format {version!r:.60}, but this version reads {FORMAT}"
        )
    checksum = content.text("checksum")
    if checksum != _checksum({**content.values, "checksum": ""}):
        raise Unusable(f"{content.file} does not match its own checksum")
    state, engine = content.table("state"), content.table("engine")
    watch = content.table("watch")
    for section in ("counters", "loss_scaling", "optimizer"):
        engine.all_numbers(section)
    _check_watch(watch)
    if (precision := content.text("precision")) not in PRECISIONS:
        raise Unusable(f"{content.file}: precision is {precision!r:.60}, not one of {PRECISIONS}")
    files = [_written(Table(file, content.file, "files")) for file in content.row("files")]
    probe_loss, model_config = content.loss("probe_loss"), content.table("model_config")
    for name in (INDEX, *(() if probe_loss is None else (PROBE,))):
        if name not in {file.name for file in files}:
            raise Unusable(f"{content.file} does not list {name} among its files")
    model_config.text("model_type")
    return Manifest(
        state=TrainState(state.count("step"), state.count("samples"), state.count("tokens")),
        precision=precision,
        model_config=model_config.as_json(),
        data_fingerprint=content.get("data_fingerprint"),
        engine={name: section.as_json() for name, section in engine.tables()},
        probe_loss=probe_loss,
        held_out_loss=content.loss("held_out_loss"),
        about=content.table("about").as_json(),
        watch=watch.as_json(),
        adapters=content.table("adapters").as_json(),
        quantization=content.table("quantization").as_json(),
        files=files,
        checksum=checksum,
    )


def _check_watch(watch: Table) -> None:
    """Check that the state of the stability monitor can be restored. Raises Unusable."""
    counts = [(watch, key) for key in ("bad_steps", "rollbacks")]
    if "seen" in watch:
        seen = watch.table("seen")
        counts.append((seen, "in_a_row"))
        for key in ("loss", "log_grad_norm"):
            if key in seen:
                seen.numbers(key)
    if "patience" in watch:
        patience = watch.table("patience")
        counts += [(patience, "best_step"), (patience, "since")]
        if "best" in patience:
            patience.loss("best")
    for table, key in counts:
        if key in table:
            table.count(key)


def _written(file: Table) -> Written:
    name, sha256 = file.text("name"), file.text("sha256")
    if name not in (INDEX, PROBE) and not _WEIGHTS.fullmatch(name):
        raise Unusable(f"{file.file} lists {name!r:.60}, which is not a checkpoint file")
    if not _SHA256.fullmatch(sha256):
        raise Unusable(f"{file.file}: {sha256!r:.60} is not a SHA-256 (of {name})")
    return Written(name, file.count("bytes"), sha256)


def check_size(folder: Path, file: Written) -> None:
    """Check that a file of a checkpoint exists and has the right size. Raises Unusable, and
    OSError.
    """
    path = folder / file.name
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise Unusable(f"{path} is not there") from None
    if not stat.S_ISREG(status.st_mode):
        raise Unusable(f"{path} is not a regular file")
    if status.st_size != file.bytes:
        raise Unusable(f"{path} has {status.st_size} bytes instead of {file.bytes}")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 hash of a file."""
    with open_regular(path) as file:
        # Reads ahead while hashing.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(content: Mapping[Any, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
