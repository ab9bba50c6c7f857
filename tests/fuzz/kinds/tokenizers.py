"""Tokenizers: the folder of data.tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.fuzz.case import Case, Place
from tests.fuzz.files import replace_file, spoil_file
from tests.fuzz.kinds.models import plant_code
from tests.fuzz.trees import spoil, spoil_text
from tests.fuzz.values import hostile, to_json

_TEMPLATE = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    "{{ cycler.__init__.__globals__.os.popen('touch executed') }}"
)


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """The base's tokenizer, of which something is spoiled; used for a step of training."""
    folder = place.copied(place.base.tokenizer)
    note = "valid" if valid else _spoiled(draw, place, folder)
    words = place.training("data.tokenizer=tokenizer")
    return Case(words, note, valid=valid)


def _spoiled(draw: random.Random, place: Place, folder: Path) -> str:
    path = draw.choice(sorted(folder.glob("*.json")))
    tree: dict[str, Any] = json.loads(path.read_text())
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    way = draw.randrange(9)
    if way == 0:
        return spoil_file(draw, path)
    if way == 1:
        data, note = spoil_text(draw, path.read_text())
        path.write_bytes(data)
        return f"{path.name}: {note}"
    if way == 2:
        return f"{path.name}: {replace_file(draw, path)}"
    if way == 3:  # code of its own, and a template that would run something
        config |= {
            "tokenizer_class": draw.choice(("XTokenizer", "PreTrainedTokenizerFast", "Nothing")),
            "auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]},
            "chat_template": _TEMPLATE,
        }
        config_path.write_text(json.dumps(config))
        plant_code(place, folder.name)
        return "code of its own"
    if way == 4:
        key = draw.choice(
            [*config, "eos_token", "bos_token", "model_max_length", "tokenizer_class"]
        )
        config[key] = hostile(draw)
        config_path.write_text(to_json(config), encoding="utf-8", errors="surrogatepass")
        return f"{key} of {config_path.name} is {config[key]!r:.60}"
    if way == 5:
        shallow = {key: value for key, value in tree.items() if key != "model"}
        note = spoil(draw, shallow)
        path.write_text(to_json({**tree, **shallow}), encoding="utf-8", errors="surrogatepass")
        return f"{path.name}: {note}"
    if way == 6:
        tree = json.loads((folder / "tokenizer.json").read_text())
        return _spoil_vocabulary(draw, tree, folder / "tokenizer.json")
    note = spoil(draw, tree)
    path.write_text(to_json(tree), encoding="utf-8", errors="surrogatepass")
    return f"{path.name}: {note}"


def _spoil_vocabulary(draw: random.Random, tree: dict[str, Any], path: Path) -> str:
    vocabulary, merges = tree["model"]["vocab"], tree["model"]["merges"]
    name = draw.choice([*vocabulary])
    way = draw.randrange(6)
    if way == 0:
        vocabulary[name] = draw.choice((-1, 10**6, 2**31, 2**63, "x", None, vocabulary["</s>"]))
    elif way == 1:
        del vocabulary[name]
    elif way == 2:
        vocabulary.clear()
    elif way == 3 and merges:
        merges[draw.randrange(len(merges))] = draw.choice((["x", "yy"], "a b c", [], None, 1))
    elif way == 4:
        tree["model"]["type"] = draw.choice(("Unigram", "WordPiece", "WordLevel", "X", None))
    else:
        del vocabulary["</s>"]
    path.write_text(json.dumps(tree))
    return f"vocabulary, way {way}, {name!r}"
