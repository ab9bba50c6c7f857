"""Shrinks a job's model to a thousandth of its weights, and takes a part of its data.

All traits of the architecture stay: tied or untied embeddings, queries per key, heads wider than
the hidden size, a mixture of experts, the order of layer kinds. Only sizes shrink.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.config.ds_json import PREFIX, load_ds_json
from harness.config.run_file import load_run_config
from harness.data.spec import tokenizer_of
from harness.errors import ConfigError
from harness.files.corpus import find_corpus
from harness.files.data_format import BadLines
from harness.files.file_kinds import FORMATS, format_of
from harness.files.splits import ALL, TO_EVALUATE
from harness.layout.expert import ExpertPlan
from harness.layout.families import SIZE_KEYS, Family, default_kv_heads, family_of
from harness.plan.command import Command
from harness.plan.model_config import load_model_config
from harness.plan.plan import Plan

MOST_BYTES = 4 * 2**20
MOST_FILES = 256
_OF_RECORDS = "jsonl"  # format and suffix of copied records
VOCAB_SIZE = 8192  # of the tokenizer that is trained if the job has none


def excerpt(path: str, folder: Path, format: str | None = None, split: str | None = None) -> str:
    """Return `path` itself if the corpus is small or holds token ids. Otherwise copy the beginnings
    of the first files of its split to `folder`, records as JSON lines, and return that path.

    Raises ConfigError if there is no text, as a run would.
    """
    corpus = find_corpus(path, format, split=split)
    if corpus.kind == "indexed" or corpus.num_bytes() <= MOST_BYTES:
        return path
    files, copy = corpus.files[:MOST_FILES], folder
    for file in files:
        inside = file.relative_to(corpus.path) if corpus.path.is_dir() else Path(file.name)
        records = format_of(file, format).records
        copy = folder / (inside if records is None else f"{inside}.{_OF_RECORDS}")
        copy.parent.mkdir(parents=True, exist_ok=True)
        size = MOST_BYTES // len(files)
        if records is None:
            with file.open("rb") as opened:  # whole lines, and at least one
                copy.write_bytes(b"".join(opened.readlines(size)))
            continue
        with copy.open("w", encoding="utf-8") as lines:
            for _, record in records(file, BadLines()):
                lines.write(json.dumps(record, default=str) + "\n")
                if lines.tell() >= size:
                    break
    return str(folder if corpus.path.is_dir() else copy)


def data_keys(real: Plan, folder: Path) -> dict[str, Any]:
    """Return the run config keys for the job's tokenizer and an excerpt of its data in `folder`."""
    keys: dict[str, Any] = {}
    data = real.config.data

    def first(path: str, name: str, format: str | None, split: str | None) -> dict[str, Any]:
        shown = excerpt(path, folder / "data" / name, format, split)
        if shown == path:
            return {"path": path, **({} if split in (None, TO_EVALUATE) else {"split": split})}
        keys["data.cache_dir"] = str(folder / "cache")
        named = {"format": _OF_RECORDS} if format and FORMATS[format].records else {}
        return {"path": shown, "split": ALL, **named}  # only files of the split were copied

    if data.vocab_size < VOCAB_SIZE:
        keys["data.vocab_size"] = data.vocab_size
    if data.path is not None:
        own = first(data.path, "", data.format, data.split)
        keys |= {f"data.{key}": value for key, value in own.items()}
    if data.mix:  # no limits: the excerpts of the sources have fewer samples
        keys["data.mix"] = [
            {
                **source.model_dump(
                    exclude_none=True, exclude={"epochs", "min_tokens", "max_tokens"}
                ),
                "name": source.label,
                **first(
                    source.path,
                    source.label,
                    source.format or data.format,
                    source.split or data.split,
                ),
            }
            for source in data.mix
        ]
    sets: dict[str, Any] = {}
    for name, source in data.eval_path.items():
        shown = first(
            source.path, f"sets/{name}", source.format or data.format, source.split or TO_EVALUATE
        )
        changes = {"split": None, **shown, "min_tokens": None, "max_tokens": None}
        sets[name] = source.model_copy(update=changes).model_dump()
    if sets:
        keys["data.eval_path"] = sets[""] if isinstance(sets.get(""), str) else sets
    if tokenizer := data.tokenizer or tokenizer_of(real.config.model.init_from):
        keys["data.tokenizer"] = tokenizer
    return keys


MIXTURE = "mixtral-8x7b"
_OF_THE_MODEL = ("model.name=", "model.init_from=", "model.overrides")


def with_experts(asked: Command) -> tuple[Command, str | None]:
    """Return the command with a preset whose experts its JSON can divide, and the preset's name.

    The command is unchanged and the name None if the JSON divides no experts, if the model has
    experts, or if it cannot be read, which planning then reports.
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


HIDDEN_SIZE = 64  # all query heads together, as near as the number of heads allows
MOST_HEADS_PER_KEY = 16
WINDOW = 16  # tokens; shorter than a rehearsed sample, so that it takes effect
EXPERTS = 4
_MULTIPLE = 8  # divides each tensor-parallel rank's part of a width, as grouped_mm requires

LAYERS, HIDDEN = SIZE_KEYS["layers"], SIZE_KEYS["hidden"]
_HEADS, _KEY_HEADS = SIZE_KEYS["heads"], SIZE_KEYS["kv_heads"]
_WIDTHS = (
    *SIZE_KEYS["width"],
    *("word_embed_proj_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
_ROPE = ("rope_scaling", "rope_parameters")


def shrunk(
    config: Mapping[str, Any], layers: int, vocab_size: int, tensor: int = 1, sequence: int = 1
) -> dict[str, Any]:
    """Return a config with at most `vocab_size` tokens and about `layers` decoder layers: never
    more than the model has, but enough to include each kind of layer.

    `tensor`, `sequence`: ranks that divide its widths and heads. Raises ValueError for a config
    that lacks its sizes, or that comes with its own code.
    """
    if "auto_map" in config:
        raise ValueError(
            "its code comes with its repository, so it is unknown which sizes can shrink"
        )
    small = dict(config)
    problems = [
        f"{' or '.join(names)} is missing"
        for names in (LAYERS, HIDDEN, _HEADS)
        if _key(config, names) is None
    ]
    if problems:
        raise ValueError("; ".join(problems))
    small |= _heads(config, tensor * sequence)
    small |= _widths(config, small, _MULTIPLE * tensor)
    small |= _experts(config)
    small |= _layers(config, layers)
    small |= _windows(config)
    small |= _vocabulary(config, vocab_size)
    return small


def write_weights(config: Mapping[str, Any], folder: Path) -> None:
    """Write random weights of a small model to `folder`, as the base of adapters."""
    import torch  # which planning does not need
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from harness.models.skeleton import hf_config

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(dict(config)), dtype=torch.float32)
    model.save_pretrained(folder)


def size_of(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the value of the first key in `names` that is set; None if none is."""
    key = _key(config, names)
    return None if key is None else int(config[key])


def _sizes(config: Mapping[str, Any], *names: tuple[str, ...]) -> list[int]:
    return [size_of(config, synonyms) or 1 for synonyms in names]


def _key(config: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(config.get(name), int)), None)


def _family(config: Mapping[str, Any]) -> Family:
    return family_of(config["model_type"])


def _head_dim(config: Mapping[str, Any]) -> int:
    hidden, heads = _sizes(config, HIDDEN, _HEADS)
    return int(config.get("head_dim") or _family(config).head_dim or hidden // heads)


def _heads(config: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return fewer and narrower heads and the hidden size; query groups that share a key stay.

    `ranks` divide the heads; they divide the key heads, too, or share them.
    """
    heads, hidden = _sizes(config, _HEADS, HIDDEN)
    default = default_kv_heads(config, _family(config))
    key_heads = size_of(config, _KEY_HEADS) or default or heads
    if config.get("multi_query"):  # Falcon's and GPTBigCode's key for a single key head
        key_heads = 1
    group = min(heads // key_heads or 1, MOST_HEADS_PER_KEY)
    least = min(key_heads, 4 if group == 1 else 2)
    divisible = (
        n
        for n in range(least, key_heads + 1)
        if n * group % ranks == 0 and (n % ranks == 0 or ranks % n == 0)
    )
    few_keys = next(divisible, least)
    few = few_keys * group
    head_dim = max(8, HIDDEN_SIZE // few // 8 * 8)  # even, for rotary positions
    # Most models' query heads are together as wide as the hidden size; Gemma's and Qwen's are not.
    ratio = hidden / (heads * _head_dim(config))
    values: dict[str, Any] = {
        str(_key(config, _HEADS)): few,
        str(_key(config, HIDDEN)): max(8, round(few * head_dim * ratio / 8) * 8),
    }
    if (name := _key(config, _KEY_HEADS) or (_KEY_HEADS[0] if default else None)) is not None:
        values[name] = few_keys
    if config.get("head_dim") or _family(config).head_dim:
        values["head_dim"] = head_dim
    if "query_pre_attn_scalar" in config:
        values["query_pre_attn_scalar"] = head_dim
    for name in _ROPE:
        if isinstance(rope := config.get(name), Mapping):
            values[name] = {
                key: value[: max(1, len(value) * head_dim // _head_dim(config))]
                if isinstance(value, list)  # one factor for each pair of a head's dimensions
                else value
                for key, value in rope.items()
            }
    return values


def _widths(config: Mapping[str, Any], small: Mapping[str, Any], multiple: int) -> dict[str, Any]:
    """Return the widths of MLPs and experts, in proportion to the hidden size."""
    (was,), (now,) = _sizes(config, HIDDEN), _sizes(small, HIDDEN)
    return {
        name: max(multiple, round(config[name] * now / was / multiple) * multiple)
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
    """Return fewer layers, with every list that has an entry per layer."""
    name = _key(config, LAYERS)
    assert name is not None
    count = min(config[name], max(wanted, 2, *_shows_every_kind(config, config[name])))
    values: dict[str, Any] = {name: count}
    for key, value in config.items():
        if isinstance(value, list) and len(value) == config[name]:
            values[key] = value[:count]
    if "max_window_layers" in config:  # layers from this one on slide: all, some or none
        first = config["max_window_layers"]
        values["max_window_layers"] = count if first >= config[name] else min(first, 1)
    if dense := config.get("mlp_only_layers"):
        values["mlp_only_layers"] = [layer for layer in dense if layer < count - 1] or [0]
    return values


def _shows_every_kind(config: Mapping[str, Any], count: int) -> Iterator[int]:
    """Yield the number of layers that each setting needs to show all its kinds."""
    yield int(config.get("decoder_sparse_step") or 1)
    yield int(config.get("sliding_window_pattern") or 1)
    for value in config.values():
        if isinstance(value, list) and len(value) == count:
            yield 1 + max(value.index(kind) for kind in value)


def _windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a short window. An explicit null disables it; without the key, the family's default
    applies.
    """
    window = config.get("sliding_window", _family(config).sliding_window)
    return {"sliding_window": min(window, WINDOW)} if isinstance(window, int) else {}


def _vocabulary(config: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return a smaller vocabulary; special tokens outside it become 0."""
    size = min(config.get("vocab_size") or most, most)
    tokens = {
        key: 0
        for key, value in {**_family(config).tokens, **config}.items()
        if key.endswith("_token_id") and isinstance(value, int) and value >= size
    }
    return {**tokens, "vocab_size": size}
