"""manifest.json: what a checkpoint is and every file of it. Written last: with it, it is whole."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.checkpoint.files import Entry, Unusable, Written, from_index

FORMAT = 1
MANIFEST, INDEX, PROBE = "manifest.json", "index.json", "probe.safetensors"
_FILE = re.compile(r"rank-[0-9]{5}-[0-9]{3}\.safetensors|probe\.safetensors|index\.json")


@dataclass(frozen=True)
class TrainState:
    """How far a run is. Everything else about the next step follows from it and the plan."""

    step: int = 0  # optimizer steps taken, skipped ones included
    samples: int = 0  # samples consumed, over all ranks
    tokens: int = 0  # the same in tokens

    def after(self, samples: int, seq_len: int) -> TrainState:
        """The state after one more step on `samples` sequences of `seq_len` tokens."""
        return TrainState(self.step + 1, self.samples + samples, self.tokens + samples * seq_len)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    `engine`: counters, loss scaling, the optimizer's steps. `probe_loss`: of the batch in
    probe.safetensors, in nats per target token, with these weights. `held_out_loss`: the last
    evaluation's. `about`: what else is worth knowing, of which nothing is read back. `watch`: what
    is needed to judge the next steps.
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
    files: list[Written] = field(default_factory=list)
    checksum: str = ""
    """SHA-256 of all the rest; a resumed run names it."""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)

    def to_bytes(self) -> bytes:
        """As it is on disk, with its checksum."""
        content = {"format": FORMAT, **asdict(self), "checksum": ""}
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, whose files are there with their sizes.

    Raises Unusable.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        found = content["checksum"]
        if content["format"] != FORMAT:
            raise Unusable(f"{path} has format {content['format']}, this version reads {FORMAT}")
        if found != _checksum({**content, "checksum": ""}):
            raise Unusable(f"{path} does not match its own checksum")
        content["state"] = TrainState(**content["state"])
        content["files"] = [Written(**file) for file in content["files"]]
        del content["format"]
        manifest = Manifest(**content)
    except FileNotFoundError:
        if (folder / "engine").is_dir():
            raise Unusable(
                f"{folder} was saved by an earlier version: tools/import_checkpoint.py reads it"
            ) from None
        raise Unusable(f"{path} is not there") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, Unusable):
            raise
        raise Unusable(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    if folder.name != (name := checkpoint_name(manifest.state.step)):
        raise Unusable(f"{folder} says that it is of step {manifest.state.step}: {name}")
    for file in manifest.files:
        _check_size(folder, file)
    return manifest


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"


def read_index(folder: Path) -> list[Entry]:
    """Where every fragment is."""
    return list(from_index(json.loads((folder / INDEX).read_bytes())))


def _check_size(folder: Path, file: Written) -> None:
    path = folder / file.name
    if not _FILE.fullmatch(file.name):
        raise Unusable(f"{folder / MANIFEST} names {file.name!r}, which no checkpoint has")
    if path.is_symlink() or not path.is_file():
        raise Unusable(f"{path} is not there")
    if path.stat().st_size != file.bytes:
        raise Unusable(f"{path} has {path.stat().st_size} bytes instead of {file.bytes}")


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
