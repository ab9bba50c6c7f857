"""Configs, tensor names and tensor layout of an export that transformers 4 and 5 can read.

Version 5 moved rotary settings into `rope_parameters` and renamed keys, but still reads the old
ones. Version 4, vLLM and llama.cpp know only the old ones and silently use defaults otherwise.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

TOKENIZER_CONFIG = "tokenizer_config.json"

# Keys of transformers 4 for rotary settings of model types that do not use the common ones.
_THETA, _LOCAL_THETA, _PARTIAL = "rope_theta", "rope_local_base_freq", "partial_rotary_factor"
_OTHER_PLACES: dict[str, dict[str, str]] = {
    "gpt_neox": {_THETA: "rotary_emb_base", _PARTIAL: "rotary_pct"},
    "gpt_neox_japanese": {_THETA: "rotary_emb_base", _PARTIAL: "rotary_pct"},
    "modernbert-decoder": {_THETA: "global_rope_theta", _LOCAL_THETA: "local_rope_theta"},
}
# Keys of transformers 4 and llama.cpp that version 5 does not write, and what they are called now.
_OLD_NAMES = {"gpt2": {"n_ctx": "n_positions"}, "qwen3_moe": {"num_experts": "num_experts"}}
# Keys of published configs for what transformers' class always does.
_CONSTANTS = {"deepseek_v3": {"scoring_func": "sigmoid"}}
# The only scaling keys that version 4's Phi-3 accepts.
_LONGROPE = ("type", "short_factor", "long_factor")
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Tokenizers of transformers 4 that add bos and eos according to flags, ignoring tokenizer.json.
_FLAGGED = ("CodeLlama", "Cohere", "GPTNeoX", "Gemma", "Llama")
_BARE = (["a"], ["<0x61>"])  # an "a" without a space in front


def rewrite_config(folder: Path, config: PretrainedConfig, source: Mapping[str, Any]) -> list[str]:
    """Rewrite the config.json that version 5 wrote for `config` so that both versions read it;
    return a note if that is impossible.

    `source`: the config.json of the initial weights; the aliases it uses are kept.
    """
    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    written.pop("quantization_config", None)  # weights are exported in the run's precision
    values = _for_both(config, written, source)
    again = type(config).from_dict(json.loads(json.dumps(values)))  # as version 5 reads it
    is_read = _rotary(again) == _rotary(config)
    write_json(path, values if is_read else written)
    return [] if is_read else ["only transformers 5 reads the rotary settings of config.json"]


def _for_both(
    config: PretrainedConfig, written: Mapping[str, Any], source: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a config.json that both versions read as `config`; `written` is version 5's."""
    values = dict(written)
    for key, value in written.items():
        if isinstance(value, Mapping) and isinstance(
            inner := getattr(config, key, None), PretrainedConfig
        ):
            values[key] = _for_both(inner, value, _table(source.get(key)))
        elif _is_default_infinity(config, key, value):
            del values[key]  # version 4 cannot read an infinite number
    if (dtype := values.get("dtype")) is not None:
        values["torch_dtype"] = dtype
    # Aliases: those used in `source` and those that other readers know.
    names = {name: name for name in source.keys() & config.attribute_map.keys()}
    names |= _OLD_NAMES.get(config.model_type, {})
    aliases = {old: getattr(config, new) for old, new in names.items() if hasattr(config, new)}
    constants = _CONSTANTS.get(config.model_type, {})
    return {**_old_rotary(config), **aliases, **constants, **values}


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_default_infinity(config: PretrainedConfig, key: str, value: Any) -> bool:
    """Return True for a default of the config's class that JSON cannot represent."""
    numbers = value if isinstance(value, list) else [value]
    if not any(isinstance(number, Mapping) and "__float__" in number for number in numbers):
        return False
    return bool(getattr(type(config)(), key, math.nan) == getattr(config, key))


def _old_rotary(config: PretrainedConfig) -> dict[str, Any]:
    """Return a config's rotary settings in transformers 4's form."""
    settings = _table(getattr(config, "rope_parameters", None))
    if not settings:
        return {}
    by_layer = {kind: values for kind, values in settings.items() if isinstance(values, Mapping)}
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
    scaling = {key: value for key, value in settings.items() if key not in (_THETA, _PARTIAL)}
    if config.model_type.startswith("phi3"):
        scaling["type"] = kind
        return {key: scaling[key] for key in _LONGROPE if key in scaling}
    return scaling


def _rotary(config: PretrainedConfig) -> dict[str, Any]:
    """Return the rotary settings of a config and its nested configs, by the new keys only."""
    settings = dict(_table(getattr(config, "rope_parameters", None)))
    if settings.get("type") == settings.get("rope_type"):
        settings.pop("type", None)  # the old name of rope_type
    inner = {key: v for key, v in vars(config).items() if isinstance(v, PretrainedConfig)}
    return {**settings, **{key: _rotary(v) for key, v in inner.items()}}


def rewrite_tokenizer_config(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Rewrite a folder's tokenizer_config.json so that both versions open its tokenizer.

    llama.cpp's converter reads tokens that a SentencePiece model lacks only here, and assumes that
    such a tokenizer puts a bos token and a space before every text unless this file denies it.
    """
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
    tokens = getattr(tokenizer, "added_tokens_decoder", {})
    values["added_tokens_decoder"] = {n: token.__getstate__() for n, token in tokens.items()}
    has_pieces = (folder / "tokenizer.model").is_file()
    if has_pieces and tokenizer.tokenize("a") in _BARE:
        values["add_prefix_space"] = False
    if has_pieces or name.removesuffix("Tokenizer") in _FLAGGED:
        ids = tokenizer("a").input_ids
        flags = {
            "add_bos_token": ids[:1] == [tokenizer.bos_token_id],
            "add_eos_token": ids[-1:] == [tokenizer.eos_token_id],
        }
        values = {**flags, **values}
    write_json(path, values)


def write_json(path: Path, values: Mapping[str, Any], *, ascii: bool = False) -> None:
    """Write a JSON file of an export, with sorted keys; `ascii`: escape all other characters."""
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=ascii) + "\n"
    path.write_text(text, encoding="utf-8")


Tensors = dict[str, torch.Tensor]
# Read(name, offset, out) fills flat `out` with a tensor's elements from `offset` on.
Read = Callable[[str, int, torch.Tensor], None]


@dataclass(frozen=True)
class _Part:
    """Tensors of the model that are converted together to the folder's tensors `made` (on meta).

    `rows`: the number of rows of a single source to convert at a time (experts, one after another).
    """

    sources: Tensors
    made: Tensors
    rows: int | None = None

    @property
    def is_renamed(self) -> bool:
        """True for a single tensor that is renamed without conversion."""
        source, made = next(iter(self.sources.values())), next(iter(self.made.values()))
        return len(self.sources) == len(self.made) == 1 and source is made


class HubLayout:
    """The tensors that `model.save_pretrained` would write, for a model whose weights are on meta.

    transformers 5 stores some architectures differently in memory than in files (all experts of a
    mixture in one tensor), and converts the whole model when it saves. This class finds the
    smallest sets of tensors that can be converted independently, so that only one set at a time is
    in memory.
    """

    def __init__(self, model: PreTrainedModel, piece_bytes: int) -> None:
        self._model, self._piece_bytes = model, piece_bytes
        first = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
        state: Tensors = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        for name in model._keys_to_ignore_on_save or ():
            state.pop(name, None)
        state = remove_tied_weights_from_state_dict(state, model)
        self.names_of_sources = {n: first[id(model.get_parameter_or_buffer(n))] for n in state}
        """Maps each name in the file to the name in the model; tied weights have several names."""
        if getattr(model, "_weight_conversions", None) is None:  # else recomputed for every part
            every = get_model_conversion_mapping(model, add_legacy=False)
            every = [c for c in every if not isinstance(c, PrefixChange)]  # as transformers does
            vars(model)["_weight_conversions"] = every or None
        self.tensors: Tensors = self._converted(state)
        """The tensors to write, on meta, in shard order."""
        self._parts = [self._by_rows(part) for part in self._find_parts(state)]

    def pieces(self, read: Read) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield (name, offset, elements from there on) of all tensors: chunks of about
        `piece_bytes` of unconverted tensors, and otherwise the smallest sets that can be converted
        independently.
        """
        for part in self._parts:
            if part.is_renamed:
                yield from self._renamed(part, read)
            elif part.rows is not None:
                yield from self._rows(part, part.rows, read)
            else:
                sources = {
                    name: torch.empty_like(t, device="cpu") for name, t in part.sources.items()
                }
                for name, tensor in sources.items():
                    read(self.names_of_sources[name], 0, tensor.view(-1))
                yield from ((name, 0, tensor) for name, tensor in self._converted(sources).items())

    def _renamed(self, part: _Part, read: Read) -> Iterator[tuple[str, int, torch.Tensor]]:
        ((name, whole),), (target,) = part.sources.items(), part.made
        chunk = max(1, self._piece_bytes // whole.itemsize)
        for offset in range(0, whole.numel(), chunk):
            piece = torch.empty(min(chunk, whole.numel() - offset), dtype=whole.dtype)
            read(self.names_of_sources[name], offset, piece)
            yield target, offset, piece

    def _rows(self, part: _Part, most: int, read: Read) -> Iterator[tuple[str, int, torch.Tensor]]:
        ((name, whole),) = part.sources.items()
        names, row = list(part.made), whole[0].numel()
        for start in range(0, len(whole), most):
            count = min(most, len(whole) - start)
            rows = torch.empty((count, *whole.shape[1:]), dtype=whole.dtype)
            read(self.names_of_sources[name], start * row, rows.view(-1))
            for number, value in enumerate(self._converted({name: rows}).values()):
                block, index = divmod(number, count)
                yield names[block * len(whole) + start + index], 0, value

    def _by_rows(self, part: _Part) -> _Part:
        """Return the part, set to be converted a few rows at a time if it is large and its rows can
        be converted independently.
        """
        whole = next(iter(part.sources.values()))
        if len(part.sources) > 1 or whole.ndim < 3 or whole.nbytes <= self._piece_bytes:
            return part
        names, length = list(part.made), len(whole)
        blocks, rest = divmod(len(names), length)
        count = max(1, self._piece_bytes // whole[0].nbytes)
        few = self._converted({n: t[:count] for n, t in part.sources.items()})
        expected = [names[b * length + i] for b in range(blocks) for i in range(count)]
        if rest or list(few) != expected or not _agree(few, part.made):
            return part
        return _Part(part.sources, part.made, count)

    def _find_parts(self, state: Tensors) -> list[_Part]:
        remaining, parts = dict(state), []
        for same in (lambda n: n, lambda n: n.rpartition(".")[0], _layer, lambda n: ""):
            groups: dict[str, Tensors] = defaultdict(dict)
            for name, tensor in remaining.items():
                groups[same(name)][name] = tensor
            for group in groups.values():
                try:
                    made = self._converted(group)
                except (LookupError, RuntimeError, ValueError):  # its counterpart is missing
                    continue
                if _agree(made, self.tensors):
                    parts.append(_Part(group, made))
                    remaining = {name: t for name, t in remaining.items() if name not in group}
        made_names = [name for part in parts for name in part.made]
        if sorted(made_names) != sorted(self.tensors):
            return [_Part(state, self.tensors)]
        return parts

    def _converted(self, tensors: Tensors) -> Tensors:
        if self._model._weight_conversions is None:
            return tensors
        reverted: Tensors = revert_weight_conversion(self._model, dict(tensors))
        return reverted


def _agree(some: Tensors, every: Tensors) -> bool:
    return all(
        name in every and (t.shape, t.dtype) == (every[name].shape, every[name].dtype)
        for name, t in some.items()
    )


def _layer(name: str) -> str:
    """Return a name up to its first number: `model.layers.3.mlp.up` -> `model.layers.3`."""
    words = name.split(".")
    at = next((place for place, word in enumerate(words) if word.isdigit()), -1)
    return ".".join(words[: at + 1])
