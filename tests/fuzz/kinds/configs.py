"""Run configs: TOML files."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

from tests.fuzz.case import Case, Place
from tests.fuzz.files import replace_file
from tests.fuzz.trees import spoil, spoil_text
from tests.fuzz.values import hostile, toml_document

# Values that every key takes, alone and together.
TREE: dict[str, dict[str, list[Any]]] = {
    "model": {
        "name": ["tiny", "llama-1b", "gpt2-124m", "mixtral-8x7b"],
        "checkpointing": ["none", "full", "selective", 2],
        "activation_offload": [False],
        "reversible": [False],
        "mlp_tiles": [1],
        "attention": ["sdpa", "eager"],
        "dropout": [0.0, 0.1],
        "stochastic_depth": [0.0, 0.2],
        "overrides": [{}, {"num_hidden_layers": 2}, {"initializer_range": 0.01}],
    },
    "data": {"seq_len": [64, 128], "held_out": [0.02, 0.1], "prefetch": [0, 2]},
    "train": {
        "steps": [0, 1, 300],
        "global_batch": [8, 48],
        "micro_batch": [2, 4],
        "seed": [0, 17],
        "label_smoothing": [0.0, 0.1],
    },
    "ramp": {"batch_from": [2, 4], "batch_tokens": [1000, 100_000]},
    "optim": {
        "name": ["adamw", "lion", "muon", "adagrad", "sgd"],
        "lr": [1e-3, 3e-4],
        "betas": [[0.9, 0.999], [0.8, 0.95]],
        "groups": [[], [{"pattern": "embed|wte", "lr_multiplier": 0.5}]],
        "clip_norm": [0.0, 1.0],
        "schedule": ["cosine", "linear", "wsd", "polynomial", "cosine_restarts", "inverse_sqrt"],
        "warmup_steps": [0, 20],
        "min_lr_ratio": [0.0, 0.1],
    },
    "eval": {"every": [0, 50], "samples": [8, 96]},
    "save": {"every": [0, 100], "keep": [1, 3], "async": [False, True]},
    "log": {"every": [1, 10]},
    "profile": {"steps": ["1:2"]},
    "sample": {"tokens": [0, 48], "prompt": ["def main"]},
    "guard": {"max_bad_steps": [10], "spikes": ["log", "skip"], "spike_window": [32, 128]},
    "run": {"dir": ["runs/first"]},
    "resume": {"allow": [[], ["optim.lr"]]},
}


def valid_tree(draw: random.Random) -> dict[str, dict[str, Any]]:
    """A run config of a few sections with a few keys that `--dry-run` accepts."""
    tree: dict[str, dict[str, Any]] = {}
    for section in draw.sample([*TREE], draw.randrange(2, 7)):
        keys = draw.sample([*TREE[section]], draw.randrange(1, len(TREE[section]) + 1))
        tree[section] = {key: deepcopy(draw.choice(TREE[section][key])) for key in keys}
    if "ramp" in tree:  # its keys need each other, and batches that it divides
        tree["ramp"] = {"batch_from": 8, "batch_tokens": 10_000}
        tree.setdefault("train", {}).update(global_batch=48, micro_batch=2)
    if "profile" in tree:
        tree.setdefault("train", {})["steps"] = 300
    if tree.get("optim", {}).get("name") not in (None, "adamw", "lion"):
        tree["optim"].pop("betas", None)
    return tree


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """A TOML file, named by --config, planned and not run."""
    path = place.folder / "run.toml"
    tree = valid_tree(draw)
    argv = ["--config", path.name, "--dry-run"]
    if valid:
        path.write_text(toml_document(tree))
        return Case(argv, "valid", valid=True)
    way = draw.randrange(8)
    if way < 4:
        note = spoil(draw, tree)
        path.write_text(toml_document(tree), encoding="utf-8", errors="surrogatepass")
    elif way < 5:  # any key of the file, whatever its section
        section = draw.choice([*TREE])
        key = draw.choice([*TREE[section]])
        value = hostile(draw)
        tree.setdefault(section, {})[key] = value
        note = f"{section}.{key} is {value!r:.60}"
        path.write_text(toml_document(tree), encoding="utf-8", errors="surrogatepass")
    elif way < 7:
        data, note = spoil_text(draw, toml_document(tree))
        path.write_bytes(data)
    else:
        note = replace_file(draw, path)
    return Case(argv, note)
