"""A model of the same architecture with a thousandth of the weights, and a part of its data.

Everything that makes an architecture stays: tied or untied embeddings, queries per key, heads wider
than the hidden size, a mixture of experts, the order of kinds of layers. Only its size goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.config.ds_file import PREFIX, load_ds_json
from harness.config.run_file import load_run_config
from harness.data.corpus import find_corpus
from harness.errors import ConfigError
from harness.files.file_kinds import format_of
from harness.layout.expert import ExpertPlan
from harness.layout.families import SIZE_KEYS, Family, family_of
from harness.plan.command import Command
from harness.plan.model_config import load_model_config

MOST_BYTES = 4 * 2**20
MOST_FILES = 256


def excerpt(path: str, folder: Path, format: str | None = None, split: str | None = None) -> str:
    """`path` itself, where it is small or holds token ids, which are read where they lie; else a
    copy under `folder` of the beginnings of the first files of its split, with their names.

    Raises ConfigError where there is no text, as a run would.
    """
    corpus = find_corpus(path, format, split=split)
    if corpus.kind == "indexed" or corpus.num_bytes() <= MOST_BYTES:
        return path
    files = corpus.files[:MOST_FILES]
    for file in files:
        inside = file.relative_to(corpus.path) if corpus.path.is_dir() else Path(file.name)
        copy = folder / inside
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(format_of(file, format).excerpt(file, MOST_BYTES // len(files)))
    return str(folder if corpus.path.is_dir() else folder / corpus.path.name)


MIXTURE = "mixtral-8x7b"
_OF_THE_MODEL = ("model.name=", "model.init_from=", "model.overrides")


def with_experts(asked: Command) -> tuple[Command, str | None]:
    """Return the command with experts that its JSON can divide, and the preset that brings them;
    the command as it is, and None, where nothing is divided, its own model has experts, or it
    cannot be read, as planning will say.
    """
    words = asked.assignments
    of_ds = (word.removeprefix(PREFIX) for word in words if word.startswith(PREFIX))
    ds, problems = load_ds_json(asked.deepspeed_path, of_ds)
    if problems or not ds.value("expert_parallel.enabled"):
        return asked, None
    try:
        own = [word for word in words if not word.startswith(PREFIX)]
        config, _ = load_model_config(load_run_config(asked.config_path, own))
    except ConfigError:
        return asked, None
    try:
        ExpertPlan.of(config)
        return asked, None
    except ValueError:
        others = [word for word in words if not word.startswith(_OF_THE_MODEL)]
        return replace(asked, assignments=(*others, f"model.name={MIXTURE}")), MIXTURE


HIDDEN_SIZE = 64  # of all query heads together, as near as the number of heads allows
MOST_HEADS_PER_KEY = 16
WINDOW = 16  # tokens; shorter than a rehearsed sample, so that it bites
EXPERTS = 4

LAYERS, HIDDEN = SIZE_KEYS["layers"], SIZE_KEYS["hidden"]
_HEADS, _KEY_HEADS = SIZE_KEYS["heads"], SIZE_KEYS["kv_heads"]
_WIDTHS = (
    *SIZE_KEYS["width"],
    *("word_embed_proj_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
_ROPE = ("rope_scaling", "rope_parameters")


def shrunk(config: Mapping[str, Any], layers: int, vocab_size: int) -> dict[str, Any]:
    """A config of at most `vocab_size` tokens and about `layers` decoder layers, never more than
    the model has, and as many as it takes to show each kind of layer.

    Raises ValueError for a config that does not name its sizes, or that brings its own code.
    """
    if "auto_map" in config:
        raise ValueError("its code comes with its repository, so nobody knows which sizes may go")
    small = dict(config)
    problems = [
        f"{' or '.join(names)} is missing"
        for names in (LAYERS, HIDDEN, _HEADS)
        if _key(config, names) is None
    ]
    if problems:
        raise ValueError("; ".join(problems))
    small |= _heads(config)
    small |= _widths(config, small)
    small |= _experts(config)
    small |= _layers(config, layers)
    small |= _windows(config)
    small |= _vocabulary(config, vocab_size)
    return small


def size_of(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The value under the first of synonyms that is set."""
    key = _key(config, names)
    return None if key is None else int(config[key])


def _key(config: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(config.get(name), int)), None)


def _family(config: Mapping[str, Any]) -> Family:
    return family_of(config["model_type"])


def _head_dim(config: Mapping[str, Any]) -> int:
    hidden, heads = size_of(config, HIDDEN), size_of(config, _HEADS)
    assert hidden
    assert heads
    return int(config.get("head_dim") or _family(config).head_dim or hidden // heads)


def _heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Heads, their width, and the hidden size; the groups of queries that share a key stay."""
    heads, hidden = size_of(config, _HEADS), size_of(config, HIDDEN)
    assert heads
    assert hidden
    key_heads = size_of(config, _KEY_HEADS) or heads
    if config.get("multi_query"):  # Falcon's and GPTBigCode's word for one key head
        key_heads = 1
    group = min(heads // key_heads or 1, MOST_HEADS_PER_KEY)
    few_keys = min(key_heads, 4 if group == 1 else 2)
    few = few_keys * group
    head_dim = max(8, HIDDEN_SIZE // few // 8 * 8)  # even, for rotary positions
    # Most models' query heads are together as wide as the hidden size; Gemma's and Qwen's are not.
    ratio = hidden / (heads * _head_dim(config))
    values: dict[str, Any] = {
        str(_key(config, _HEADS)): few,
        str(_key(config, HIDDEN)): max(8, round(few * head_dim * ratio / 8) * 8),
    }
    if (name := _key(config, _KEY_HEADS)) is not None:
        values[name] = few_keys
    if config.get("head_dim") or _family(config).head_dim:
        values["head_dim"] = head_dim
    if "query_pre_attn_scalar" in config:
        values["query_pre_attn_scalar"] = head_dim
    for name in _ROPE:
        if isinstance(rope := config.get(name), Mapping):
            values[name] = {
                key: value[: max(1, len(value) * head_dim // _head_dim(config))]
                if isinstance(value, list)  # a factor for each pair of a head's dimensions
                else value
                for key, value in rope.items()
            }
    return values


def _widths(config: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Of MLPs and experts, in proportion to the hidden size."""
    was, now = size_of(config, HIDDEN), size_of(small, HIDDEN)
    assert was
    assert now
    return {
        name: max(8, round(config[name] * now / was / 8) * 8)
        for name in _WIDTHS
        if isinstance(config.get(name), int)
    }


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    name = _key(config, SIZE_KEYS["experts"])
    if name is None:
        return {}
    chosen = min(config.get("num_experts_per_tok") or 1, 2)
    return {name: min(config[name], EXPERTS), "num_experts_per_tok": chosen}


def _layers(config: Mapping[str, Any], wanted: int) -> dict[str, Any]:
    """Their number, and every list that has an entry for each of them."""
    name = _key(config, LAYERS)
    assert name is not None
    count = min(config[name], max(wanted, 2, *_shows_every_kind(config, config[name])))
    values: dict[str, Any] = {name: count}
    for key, value in config.items():
        if isinstance(value, list) and len(value) == config[name]:
            values[key] = value[:count]
    if "max_window_layers" in config:  # layers from there on slide: all, some or none
        first = config["max_window_layers"]
        values["max_window_layers"] = count if first >= config[name] else min(first, 1)
    if dense := config.get("mlp_only_layers"):
        values["mlp_only_layers"] = [layer for layer in dense if layer < count - 1] or [0]
    return values


def _shows_every_kind(config: Mapping[str, Any], count: int) -> Iterator[int]:
    """Of how many layers each list needs its first entries to have all kinds in them."""
    yield int(config.get("decoder_sparse_step") or 1)
    yield int(config.get("sliding_window_pattern") or 1)
    for value in config.values():
        if isinstance(value, list) and len(value) == count:
            yield 1 + max(value.index(kind) for kind in value)


def _windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """An explicit null switches the window off; an absent key leaves the family's default."""
    window = config.get("sliding_window", _family(config).sliding_window)
    return {"sliding_window": min(window, WINDOW)} if isinstance(window, int) else {}


def _vocabulary(config: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Its size, and the special tokens that would fall out of it."""
    size = min(config.get("vocab_size") or most, most)
    tokens = {
        key: 0
        for key, value in {**_family(config).tokens, **config}.items()
        if key.endswith("_token_id") and isinstance(value, int) and value >= size
    }
    return {**tokens, "vocab_size": size}
