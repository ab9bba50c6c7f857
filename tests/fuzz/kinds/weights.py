"""Weights of another model: the folder of model.init_from."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.case import SECRET, Case, Place
from tests.fuzz.files import LFS_POINTER, replace_file, spoil_file
from tests.fuzz.kinds.models import plant_code
from tests.fuzz.trees import spoil, spoil_text
from tests.fuzz.values import hostile, to_json
from tests.two_ranks import SMALL_MODEL

INDEX = "model.safetensors.index.json"


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """An export of the base's run, whole or in shards, of which something is spoiled."""
    sharded = draw.randrange(2) == 1
    folder = place.copied(place.base.sharded if sharded else place.base.run / "export", "model")
    note = "valid" if valid else _spoiled(draw, place, folder, sharded)
    training = [word for word in place.training() if word not in SMALL_MODEL]
    words = [*training, "model.name=model", "model.init_from=model"]
    if not valid and draw.randrange(8) == 0:
        word = draw.choice(
            ("nowhere", "model/config.json", "run@1", "model@3", "~nosuchuser/m", ".", "/dev/null")
        )
        words[-1], note = f"model.init_from={word}", f"model.init_from={word}, {note}"
    return Case(words, f"{'sharded' if sharded else 'one file'}: {note}", valid=valid)


def _spoiled(draw: random.Random, place: Place, folder: Path, sharded: bool) -> str:
    way = draw.randrange(10)
    files = sorted(folder.glob("*.safetensors"))
    if way < 3:
        return spoil_file(draw, draw.choice(files))
    if way < 5:
        return spoil_header(draw, draw.choice(files))
    if way == 5:
        return replace_file(draw, draw.choice(files))
    if way == 6:  # a clone without git-lfs: all weights are pointers
        for path in files:
            path.write_text(LFS_POINTER)
        return "git-lfs pointers"
    if way == 7:
        return _planted(draw, place, folder)
    if sharded:
        return _spoiled_index(draw, place, folder)
    path = draw.choice([folder / "config.json", folder / "generation_config.json"])
    tree = json.loads(path.read_text())
    note = spoil(draw, tree)
    path.write_text(to_json(tree), encoding="utf-8", errors="surrogatepass")
    return f"{path.name}: {note}"


def spoil_header(draw: random.Random, path: Path) -> str:
    """Change the table of a safetensors file, whose data stays."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    table = json.loads(data[8 : 8 + size])
    names = [name for name in table if name != "__metadata__"]
    if not names:
        return "it holds no tensors"
    name, way = draw.choice(names), draw.randrange(6)
    about = table[name]
    if way == 0:
        about["dtype"] = draw.choice(("F64", "I64", "BOOL", "F8_E4M3", "X", "", 1, None))
    elif way == 1:
        about["shape"] = draw.choice(([], [0], [1], [-1], [2**62], [2**31, 2**31], "x", [1.5]))
    elif way == 2:
        about["data_offsets"] = draw.choice(([0, 0], [0, 2**60], [-4, 0], [8, 4], [], [0], "x"))
    elif way == 3:
        other = draw.choice(names)
        table[name], table[other] = table[other], table[name]
    elif way == 4:
        del table[name]
    else:
        spoil(draw, table)
    header = to_json(table, indent=None).encode("utf-8", "surrogatepass")
    length = draw.choice((len(header), len(header), len(header), 0, len(header) + 1, 2**63))
    path.write_bytes(struct.pack("<Q", length) + header + data[8 + size :])
    return f"{path.name}: header of {name} (way {way}), length {length}"


def _planted(draw: random.Random, place: Place, folder: Path) -> str:
    """Pickles that would run something, where a loader might look for weights."""
    for path in folder.glob("*.safetensors*"):
        if draw.randrange(2):
            path.unlink()
    pickle = f"cposix\nmkdir\n(V{place.marker}\ntR.".encode()
    name = draw.choice(
        (
            "pytorch_model.bin",
            "model.bin",
            "model.safetensors",
            "pytorch_model.pt",
            "adapter_model.bin",
        )
    )
    (folder / name).write_bytes(pickle)
    if draw.randrange(2):
        shards = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
        (folder / draw.choice((INDEX, "pytorch_model.bin.index.json"))).write_text(
            json.dumps(shards)
        )
    if draw.randrange(3) == 0:
        plant_code(place, folder.name)
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
        (folder / "config.json").write_text(json.dumps(config))
    return f"a pickle as {name}"


def _spoiled_index(draw: random.Random, place: Place, folder: Path) -> str:
    path = folder / INDEX
    text = path.read_text()
    index: dict[str, Any] = json.loads(text)
    names = [*index["weight_map"]]
    outside = place.folder / "outside.safetensors"
    shard = sorted(folder.glob("model-*.safetensors"))[0]

    def all_named(name: object) -> None:
        index["weight_map"] = dict.fromkeys(names, name)

    def linked() -> None:
        outside.write_bytes(shard.read_bytes())
        shard.unlink()
        shard.symlink_to(outside)

    def of_a_secret() -> None:
        place.secret()
        all_named("../secret.txt")

    changes: dict[str, Callable[[], object]] = {
        "a pickle": lambda: [(folder / "w.bin").write_bytes(b"\x80\x02]."), all_named("w.bin")],
        "outside": lambda: [shutil.copy(shard, outside), all_named("../" + outside.name)],
        "absolute": lambda: [shutil.copy(shard, outside), all_named(str(outside))],
        "a secret": of_a_secret,
        "missing": lambda: all_named("model-00009-of-00009.safetensors"),
        "itself": lambda: all_named(INDEX),
        "its folder": lambda: all_named("."),
        "a hostile name": lambda: all_named(hostile(draw)),
        "a hostile map": lambda: index.update(weight_map=hostile(draw)),
        "no map": lambda: index.pop("weight_map"),
        "a name missing": lambda: index["weight_map"].pop(draw.choice(names)),
        "a name more": lambda: index["weight_map"].update({"model.layers.9.x": shard.name}),
        "another shard": lambda: index["weight_map"].update({draw.choice(names): shard.name}),
        "spoilt": lambda: spoil(draw, index),
        "a linked shard": linked,
    }  # fmt: skip
    if draw.randrange(4) == 0:
        data, note = spoil_text(draw, text)
        path.write_bytes(data)
        return f"index: {note}"
    note = draw.choice([*changes])
    changes[note]()
    path.write_text(to_json(index), encoding="utf-8", errors="surrogatepass")
    assert SECRET not in path.read_text(encoding="utf-8", errors="replace")
    return f"index: {note}"
