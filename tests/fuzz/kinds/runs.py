"""Run folders to go on from: their records, and the words of resume.*."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.case import Case, Place
from tests.fuzz.files import replace_file, spoil_file
from tests.fuzz.trees import spoil, spoil_text
from tests.fuzz.values import to_json

_RECORDS = ("status.json", "plan.json", "metrics.jsonl", "events.jsonl", "lock")
_WORDS = (
    *("nowhere", "", "@", "@1", "old@", "old@0", "old@1", "old@2", "old@99", "old@-1", "old@1.5"),
    *("old@99999999", "old@999999999", "old@x", "old/", "./old@2", "old/checkpoints", "old@2@2"),
    *(
        "old/checkpoints/step-00000002",
        "/dev/null",
        "~nosuchuser/x@1",
        "run",
        "run@1",
        "..",
        "a" * 300,
    ),
)
_ALLOWED = (
    "",
    "probe",
    "optim.lr",
    "data_fingerprint",
    "model_config",
    "nothing",
    "a,b",
    "[]",
    "[1]",
)


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """The base's run, resumed for one step or read by a tool, with a record spoiled."""
    way = draw.randrange(10)
    if valid:
        return _valid(draw, place)
    if way < 3:
        return _branched(draw, place)
    folder = place.copied(place.base.run)
    if draw.randrange(6) == 0:
        note = _strange(draw, folder)
    else:
        names = draw.sample(_RECORDS, draw.choice((1, 1, 2)))
        note = "; ".join(_spoiled(draw, folder / name) for name in names)
    if way == 3:
        return Case([str(folder), "--step", "1"], note, main="tools.show_batch")
    if way == 4:
        words = [str(folder), "--out", str(place.folder / "out"), "--no-check"]
        return Case(words, note, main="tools.export_hf")
    if way == 5:
        return Case(place.training("model.name=run", "run.dir=new"), note)
    return Case(place.resuming(), note)


def _valid(draw: random.Random, place: Place) -> Case:
    """Resumed, branched, or a source of weights."""
    if draw.randrange(2):
        place.copied(place.base.run)
        return Case(place.resuming(), "resumed", valid=True)
    old = place.copied(place.base.run, "old")
    if draw.randrange(2):
        words = place.resuming(f"resume.from={old}@1", "optim.lr=1e-4")
        return Case(words, "branched", valid=True)
    return Case(place.training(f"model.init_from={old}"), "weights", valid=True)


def _branched(draw: random.Random, place: Place) -> Case:
    """resume.from, model.init_from and resume.allow with words that may name nothing."""
    place.copied(place.base.run, "old")
    word = draw.choice(_WORDS)
    key = draw.choice(("resume.from", "resume.from", "model.init_from", "run.dir"))
    words = [f"{key}={word}", f"resume.allow={draw.choice(_ALLOWED)}"]
    if draw.randrange(3) == 0:
        words.append(
            draw.choice(("optim.lr=1e-4", "model.overrides.hidden_size=32", "train.seed=5"))
        )
    return Case(place.resuming(*words), " ".join(words)[:120])


def _spoiled(draw: random.Random, path: Path) -> str:
    name, way = path.name, draw.randrange(8)
    if way == 0:
        return f"{name}: {replace_file(draw, path)}"
    if way == 1:
        return spoil_file(draw, path)
    if name == "lock":
        owner = {"pid": 1, "host": "elsewhere", "job": None, "since": "2026-01-01"}
        note = spoil(draw, owner)
        path.write_text(to_json(owner), encoding="utf-8", errors="surrogatepass")
        return f"lock: {note}"
    if name.endswith(".jsonl"):
        return _spoiled_lines(draw, path)
    if way < 5:
        data, note = spoil_text(draw, path.read_text())
        path.write_bytes(data)
        return f"{name}: {note}"
    tree = json.loads(path.read_text())
    note = spoil(draw, tree)
    path.write_text(to_json(tree), encoding="utf-8", errors="surrogatepass")
    return f"{name}: {note}"


def _spoiled_lines(draw: random.Random, path: Path) -> str:
    lines = path.read_text().splitlines(keepends=True)
    at = draw.randrange(len(lines))
    if draw.randrange(2):
        tree = json.loads(lines[at])
        note = spoil(draw, tree)
        lines[at] = to_json(tree, indent=None) + "\n"
        path.write_text("".join(lines), encoding="utf-8", errors="surrogatepass")
    else:
        data, note = spoil_text(draw, lines[at])
        lines[at : at + 1] = []
        path.write_bytes(data + "".join(lines).encode())
    return f"{path.name}: line {at}: {note}"


def _strange(draw: random.Random, folder: Path) -> str:
    """Files and folders that are missing, or more than there should be."""
    checkpoints, changes = folder / "checkpoints", dict[str, Callable[[], object]]()
    for name in (
        "heartbeats",
        "checkpoints",
        "export",
        "profile",
        "tokenizer",
        "checkpoints/latest",
    ):
        changes[f"{name} is no file or folder"] = lambda name=name: replace_file(
            draw, folder / name
        )
    changes |= {
        "an old hang.json": lambda: (
            (folder / "heartbeats").mkdir(exist_ok=True),
            (folder / "heartbeats" / "hang.json").write_text("{"),
        ),
        "a checkpoint without files": lambda: (checkpoints / "step-00000009").mkdir(),
        "a file as a checkpoint": lambda: (checkpoints / "step-00000009").write_text(""),
        "a checkpoint of no number": lambda: (checkpoints / "step-x").mkdir(),
        "a checkpoint of a long number": lambda: (checkpoints / ("step-" + "9" * 40)).mkdir(),
        "an unfinished checkpoint": lambda: (checkpoints / "step-00000003.unfinished").mkdir(),
        "a file as an unfinished one": lambda: (checkpoints / ".step-00000003").write_text(""),
        "latest names nothing": lambda: (checkpoints / "latest").write_text("../../x\n"),
        "no folder of its own": lambda: folder.joinpath("lock").unlink(),
    }
    note = draw.choice([*changes])
    changes[note]()
    return note
