"""Checkpoints: damaged, and re-signed after a change, as only their writer could."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.case import Case, Place
from tests.fuzz.files import spoil_file
from tests.fuzz.kinds.weights import spoil_header
from tests.fuzz.trees import spoil, spoil_text
from tests.fuzz.values import hostile, to_json

_NEWEST = "step-00000002"


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """The base's run, whose newest checkpoint is spoiled: resumed, exported, or weights' source."""
    run = place.copied(place.base.run)
    newest = run / "checkpoints" / _NEWEST
    note = "valid"
    if draw.randrange(4) == 0:  # nothing to fall back to
        shutil.rmtree(run / "checkpoints" / "step-00000001")
        note = "the only one: valid"
    if not valid:
        way = draw.randrange(8)
        path = draw.choice(sorted(newest.iterdir()))
        if way == 0:
            told = spoil_file(draw, path)
        elif way == 1:
            data, told = spoil_text(draw, (newest / "manifest.json").read_text())
            (newest / "manifest.json").write_bytes(data)
        else:
            told = _resigned(draw, place, newest)
        note = note.replace("valid", told)
    use = draw.randrange(6)
    if use == 0:
        words = [str(run), "--out", str(place.folder / "out")]
        return Case(words, f"export: {note}", main="tools.export_hf", valid=valid)
    if use == 1:
        words = place.training(f"model.init_from={run}@2", "run.dir=new")
        return Case(words, f"weights: {note}", valid=valid)
    return Case(place.resuming(), f"resume: {note}", valid=valid)


def sign(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest whose sizes and hashes are those of its files, and its own."""
    files = manifest.get("files")
    for file in files if isinstance(files, list) else ():
        if isinstance(file, dict) and isinstance(file.get("name"), str) and file["name"]:
            path = folder / file["name"]
            if "\0" not in file["name"] and len(file["name"]) < 250 and path.is_file():
                data = path.read_bytes()
                file.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    plain = json.dumps({**manifest, "checksum": ""}, sort_keys=True).encode()
    manifest["checksum"] = hashlib.sha256(plain).hexdigest()
    text = to_json(manifest, indent=1)
    (folder / "manifest.json").write_text(text, encoding="utf-8", errors="surrogatepass")


def _resigned(draw: random.Random, place: Place, folder: Path) -> str:
    manifest = json.loads((folder / "manifest.json").read_text())
    index = json.loads((folder / "index.json").read_text())
    fragments = sorted(folder.glob("rank-*.safetensors"))
    name = draw.choice([*index])
    entry = index[name]

    def write_index(value: Any = None) -> None:
        text = to_json(index if value is None else value, indent=None)
        (folder / "index.json").write_text(text, encoding="utf-8", errors="surrogatepass")

    def spoil_index() -> str:
        told = spoil(draw, index)
        write_index()
        return told

    def overlapping() -> None:
        offset, numel, file = entry["at"][0]
        entry["at"] = [[offset, numel // 2, file], [offset, numel - numel // 2, file]]
        write_index()

    def outside() -> None:
        place.secret()
        entry["at"][0][2] = draw.choice(("../../../secret.txt", str(place.folder / "secret.txt")))
        write_index()

    def linked() -> None:
        path = draw.choice([*fragments, folder / "probe.safetensors", folder / "index.json"])
        outside = place.folder / "elsewhere"
        shutil.move(path, outside)
        path.symlink_to(outside)

    def value(key: str, part: str | None = None) -> Callable[[], object]:
        def change() -> str:
            target = manifest[key] if part and isinstance(manifest.get(key), dict) else manifest
            target[part or key] = hostile(draw)
            return f"{key} {part or ''} is {target[part or key]!r:.50}"

        return change

    changes: dict[str, Callable[[], object]] = {
        "manifest": lambda: spoil(draw, manifest),
        "index": spoil_index,
        "a hostile index": lambda: write_index(hostile(draw)),
        "overlapping pieces": overlapping,
        "a file outside": outside,
        "a link": linked,
        "a fragment's header": lambda: spoil_header(draw, draw.choice(fragments)),
        "a fragment's bytes": lambda: spoil_file(draw, draw.choice(fragments)),
        "the probe": lambda: spoil_file(draw, folder / "probe.safetensors"),
        "the probe's header": lambda: spoil_header(draw, folder / "probe.safetensors"),
        "step": value("state", "step"),
        "state": value("state"),
        "engine": value("engine"),
        "counters": value("engine", "counters"),
        "watch": value("watch"),
        "precision": value("precision"),
        "probe_loss": value("probe_loss"),
        "model_config": value("model_config"),
        "files": value("files"),
        "data_fingerprint": value("data_fingerprint"),
        "format": value("format"),
    }
    what = draw.choice([*changes])
    told = changes[what]()
    sign(folder, manifest)
    return f"re-signed: {what}{f': {told}' if isinstance(told, str) else ''}"
