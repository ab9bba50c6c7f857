"""Configs of an export for readers of transformers 5, and of 4 and what was built on it.

Version 5 moved rotary settings into `rope_parameters`, renamed keys, and reads the old places, too.
Version 4, vLLM and llama.cpp know the old ones alone, and take a default without a word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

TOKENIZER_CONFIG = "tokenizer_config.json"
_OF_NO_EXPORT = ("quantization_config",)  # weights are written in the run's precision

# Places of transformers 4 for rotary settings, by model type, where they are not the usual ones.
_THETA, _LOCAL_THETA, _PARTIAL = "rope_theta", "rope_local_base_freq", "partial_rotary_factor"
_OTHER_PLACES: dict[str, dict[str, str]] = {
    "gpt_neox": {_THETA: "rotary_emb_base", _PARTIAL: "rotary_pct"},
    "gpt_neox_japanese": {_THETA: "rotary_emb_base", _PARTIAL: "rotary_pct"},
    "modernbert-decoder": {_THETA: "global_rope_theta", _LOCAL_THETA: "local_rope_theta"},
}
# Names of transformers 4 that version 5 has as second names of others, and does not write.
_OLD_NAMES = {"qwen3_moe": ("num_experts",)}
# Its Phi-3 refuses any other key beside these.
_LONGROPE = ("type", "short_factor", "long_factor")
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Tokenizers of transformers 4 that add bos and eos by these flags, whatever tokenizer.json says.
_FLAGGED = ("CodeLlama", "Cohere", "GPTNeoX", "Gemma", "Llama")


def rewrite_config(folder: Path, config: PretrainedConfig, source: Mapping[str, Any]) -> list[str]:
    """Rewrite the config.json that version 5 wrote of `config`, so that both versions read it;
    return a note if there is no such file.

    `source`: the config.json that the model came with, whose second names of keys stay.
    """
    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    for key in _OF_NO_EXPORT:
        written.pop(key, None)
    values = _for_both(config, written, source)
    is_read = _reads_the_same(config, values)
    _write(path, values if is_read else written)
    return [] if is_read else ["config.json has rotary positions that only transformers 5 reads"]


def _for_both(
    config: PretrainedConfig, written: Mapping[str, Any], source: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config.json that both versions read as `config`; `written`: version 5's."""
    values = dict(written)
    for key, value in written.items():
        if isinstance(value, Mapping) and isinstance(
            inner := getattr(config, key, None), PretrainedConfig
        ):
            values[key] = _for_both(inner, value, _table(source.get(key)))
        elif _is_default_infinity(config, key, value):
            del values[key]  # version 4 knows no name of an infinite number
    if (dtype := values.get("dtype")) is not None:
        values["torch_dtype"] = dtype
    added = {**_old_rotary(config), **_old_names(config, source)}
    for key, value in added.items():
        values.setdefault(key, value)
    return values


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_default_infinity(config: PretrainedConfig, key: str, value: Any) -> bool:
    """Return True for a default of the config's class that JSON has no number for."""
    numbers = value if isinstance(value, list) else [value]
    if not any(isinstance(number, Mapping) and "__float__" in number for number in numbers):
        return False
    return bool(getattr(type(config)(), key, math.nan) == getattr(config, key))


def _old_rotary(config: PretrainedConfig) -> dict[str, Any]:
    """Return the rotary settings of a config as transformers 4 has them."""
    settings = _table(getattr(config, "rope_parameters", None))
    if not settings:
        return {}
    by_layer = {kind: of for kind, of in settings.items() if isinstance(of, Mapping)}
    whole = by_layer.get(_FULL, settings if not by_layer else {})
    old: dict[str, Any] = {}
    if by_layer and _SLIDING in by_layer:
        old[_LOCAL_THETA] = by_layer[_SLIDING].get(_THETA)
    old |= {key: whole[key] for key in (_THETA, _PARTIAL) if key in whole}
    places = _OTHER_PLACES.get(config.model_type, {})
    old |= {place: old[key] for key, place in places.items() if key in old}
    old = {key: value for key, value in old.items() if value is not None}
    return {**old, "rope_scaling": _old_scaling(config, whole)}


def _old_scaling(config: PretrainedConfig, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return None
    scaling = {key: of for key, of in settings.items() if key not in (_THETA, _PARTIAL)}
    if config.model_type.startswith("phi3"):
        scaling["type"] = kind
        return {key: scaling[key] for key in _LONGROPE if key in scaling}
    return scaling


def _old_names(config: PretrainedConfig, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by second names: those of the source, and those that version 4 reads."""
    names = {*_OLD_NAMES.get(config.model_type, ()), *(source.keys() & config.attribute_map.keys())}
    return {name: getattr(config, name) for name in sorted(names) if hasattr(config, name)}


def _reads_the_same(config: PretrainedConfig, values: Mapping[str, Any]) -> bool:
    """Return True if version 5 finds the same rotary settings in `values` as in `config`."""
    again = type(config).from_dict(json.loads(json.dumps(values)))
    return _rotary(again) == _rotary(config)


def _rotary(config: PretrainedConfig) -> dict[str, Any]:
    """Return the rotary settings of a config and of those within it, by the new names alone."""
    settings = dict(_table(getattr(config, "rope_parameters", None)))
    if settings.get("type") == settings.get("rope_type"):
        settings.pop("type", None)  # what the first was called before
    inner = {key: of for key, of in vars(config).items() if isinstance(of, PretrainedConfig)}
    return {**settings, **{key: _rotary(of) for key, of in inner.items()}}


def rewrite_tokenizer_config(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Rewrite tokenizer_config.json of a folder so that both versions open its tokenizer."""
    path = folder / TOKENIZER_CONFIG
    if not path.is_file():
        return
    values = json.loads(path.read_text(encoding="utf-8"))
    extra = values.pop("extra_special_tokens", None)
    named = {**_table(values.pop("model_specific_special_tokens", None)), **_table(extra)}
    if isinstance(extra, list) and extra:
        values.setdefault("additional_special_tokens", extra)
    if named:
        values["extra_special_tokens"] = named
    name = str(values.get("tokenizer_class", "")).removesuffix("Fast")
    if name == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if name.removesuffix("Tokenizer") in _FLAGGED:
        ids = tokenizer("a").input_ids
        flags = {
            "add_bos_token": ids[:1] == [tokenizer.bos_token_id],
            "add_eos_token": ids[-1:] == [tokenizer.eos_token_id],
        }
        values = {**flags, **values}
    _write(path, values)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
