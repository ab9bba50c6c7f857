"""Inputs of export_hf.py: run folders that others made."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.case import Case, Place
from tests.fuzz.files import replace_file, spoil_file
from tests.fuzz.kinds.models import plant_code
from tests.fuzz.trees import spoil
from tests.fuzz.values import hostile, to_json

_ARGUMENTS = (
    *(["--dtype", "bf16"], ["--dtype", "int8"], ["--shard-size", "100KB"], ["--shard-size", "0"]),
    *(
        ["--shard-size", "9" * 400],
        ["--shard-size", "1e3"],
        ["--shard-size", "-1GB"],
        ["--step", "1"],
    ),
    *(["--step", "99"], ["--step", "-1"], ["--step", "x"], ["--step", "9" * 30], ["--no-check"]),
    *(
        ["--out", "/dev/null/x"],
        ["--out", ""],
        ["--out", "o" * 300],
        ["--out", "run"],
        ["--out", "."],
    ),
    *(
        ["--out", "run/checkpoints"],
        ["--trust-remote-code"],
        ["--bogus"],
        ["--out", "\udcff"],
        ["x"],
    ),
    *(
        ["--out", "secret.txt"],
        ["--out", "secret.txt/x"],
        ["--out", "/proc/nowhere"],
        ["--shard-size"],
    ),
)


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """The base's run, exported with other arguments, another tokenizer or another plan."""
    run = place.copied(place.base.run)
    words = [str(run), "--out", str(place.folder / "out")]
    if valid:
        words += draw.choice(([], ["--step", "1"], ["--dtype", "bf16"], ["--shard-size", "100KB"]))
        return Case(words, "valid", main="tools.export_hf", valid=True)
    place.secret()
    way = draw.randrange(3)
    if way == 0:
        more = draw.choice(_ARGUMENTS)
        note = " ".join(more)[:100]
        words += more
    elif way == 1:
        note = _spoiled_tokenizer(draw, place, run / "tokenizer")
    else:
        path = run / "plan.json"
        plan = json.loads(path.read_text())
        key = draw.choice(("model_source", "model_config", "run", "precision"))
        if draw.randrange(2):
            plan[key] = hostile(draw)
            note = f"plan.json: {key} is {plan[key]!r:.60}"
        else:
            note = f"plan.json: {spoil(draw, plan)}"
        path.write_text(to_json(plan), encoding="utf-8", errors="surrogatepass")
    return Case(words, note, main="tools.export_hf")


def _spoiled_tokenizer(draw: random.Random, place: Place, folder: Path) -> str:
    def code() -> None:
        plant_code(place, f"run/{folder.name}")

    changes: dict[str, Callable[[], object]] = {
        "a link to a secret": lambda: (folder / "vocab.txt").symlink_to("../../secret.txt"),
        "a linked folder": lambda: (folder / "more").symlink_to("../.."),
        "code": code,
        "a folder inside": lambda: (folder / "more" / "more").mkdir(parents=True),
        "damaged": lambda: spoil_file(draw, draw.choice(sorted(folder.glob("*.json")))),
        "no file": lambda: replace_file(draw, draw.choice(sorted(folder.glob("*.json")))),
        "no folder": lambda: replace_file(draw, folder),
        "named like weights": lambda: (folder / "model.safetensors").write_text("x"),
        "named like the config": lambda: (folder / "config.json").write_text("{"),
    }
    note = draw.choice([*changes])
    changes[note]()
    return f"tokenizer: {note}"
