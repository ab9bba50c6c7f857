"""What a run keeps for its exports: the tokenizer's files and special ids, and the files that came
with its initial weights.
"""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as sentencepiece_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from harness.data.tokenizer import SENTENCEPIECE, SPACE, write_tokenizer
from harness.errors import Unusable
from harness.files.regular_file import open_regular

GENERATION = "generation_config.json"

# Files that transformers' tokenizers read and write, except code.
_NAMES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("*.model", "*.spm", "*.tiktoken", "vocab.*", "vocab-*.json", "merges.txt", "bpe.codes"),
    *("normalizer.json", "tekken.json", GENERATION),
)
_TEMPLATES = "additional_chat_templates"  # a folder of *.jinja
_COMPANIONS = "companions"  # a folder within that of the tokenizer
# Files of a model that an export writes itself, or that belong to another trainer.
_REPLACED = (
    *("config.json", "adapter_*", "*.safetensors*", "*.bin", "*.bin.index.json", "*.pt", "latest"),
    *("*.pth", "*.ckpt*", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "trainer_*.json", ".*", "*.py"),
)
_MOST_BYTES = 1 << 24


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder holds tokenizer files."""
    return any(any(folder.glob(name)) for name in _NAMES if name != GENERATION)


def copy_tokenizer(source: Path, folder: Path, with_code: bool = False) -> list[str]:
    """Copy a tokenizer's files. Return the names left out: links and other irregular files, unknown
    names and, unless `with_code`, code.

    A run from somebody else may hold anything, and the copy is shared.
    """
    left = _copy(source, folder, (*_NAMES, *(("*.py",) if with_code else ())))
    left = [name for name in left if name != _COMPANIONS]
    templates = source / _TEMPLATES
    if templates.is_dir() and not templates.is_symlink():
        (folder / _TEMPLATES).mkdir()
        within = _copy(templates, folder / _TEMPLATES, ("*.jinja",))
        left = [name for name in left if name != _TEMPLATES]
        left += [f"{_TEMPLATES}/{name}" for name in within]
    return left


def _copy(source: Path, folder: Path, patterns: tuple[str, ...]) -> list[str]:
    """Copy the regular files that match a pattern; return the names of all others."""
    left = []
    for path in sorted(source.iterdir()):
        try:
            if not any(map(path.match, patterns)):
                raise Unusable(path.name)
            file = open_regular(path)
        except Unusable:
            left.append(path.name)
            continue
        with file, (folder / path.name).open("xb") as copy:
            shutil.copyfileobj(file, copy)
    return left


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: Path, weights: str | None = None
) -> None:
    """Write a tokenizer's files, with its SentencePiece model if it has one.

    Converters to other formats (such as llama.cpp) read the pieces' scores only from that file,
    which save_pretrained leaves out. `weights`: a folder that may have it, model.init_from.
    """
    write_tokenizer(tokenizer, folder)
    for source in (getattr(tokenizer, "vocab_file", None), Path(weights or "none", SENTENCEPIECE)):
        if source and Path(source).is_file() and not (folder / SENTENCEPIECE).exists():
            model = Path(source).read_bytes()
            if has_pieces_of(tokenizer, model):
                (folder / SENTENCEPIECE).write_bytes(model)


def save_generation(model: PreTrainedModel, folder: Path, parent: Path | None) -> None:
    """Write the generation config that came with a model's weights, if any, beside the tokenizer.

    `parent`: the tokenizer folder of the run whose checkpoint the weights come from.
    """
    config = getattr(model, "generation_config", None)
    if config is not None and not config._from_model_config:
        config.to_json_file(folder / GENERATION)
    elif parent is not None and (parent / GENERATION).is_file():
        shutil.copyfile(parent / GENERATION, folder / GENERATION)


def save_companions(source: str | None, folder: Path, parent: Path | None) -> None:
    """Keep the files of the initial weights that an export does not write, beside the tokenizer:
    those of a processor, licences.

    `source`: model.init_from; `parent`: as in `save_generation`.
    """
    given = Path(source or "none")
    if not (given / "config.json").is_file():
        given = (parent or given) / _COMPANIONS
    if given.is_dir():
        (folder / _COMPANIONS).mkdir()
        copy_companions(given, folder / _COMPANIONS)


def copy_companions(source: Path, folder: Path) -> list[str]:
    """Copy the files of `source` that a model may need beside config, weights and tokenizer; return
    their names. Files that `folder` has are kept.
    """
    names = [
        path.name
        for path in source.iterdir()
        if not any(map(path.match, (*_REPLACED, *_NAMES))) and not (folder / path.name).exists()
        if path.is_file() and path.stat().st_size <= _MOST_BYTES
    ]
    left = {*_copy(source, folder, tuple(map(glob.escape, names)))}
    return [name for name in sorted(names) if name not in left]


def companions_of(tokenizer: Path) -> Path:
    """Return the folder that `save_companions` fills."""
    return tokenizer / _COMPANIONS


def has_pieces_of(tokenizer: PreTrainedTokenizerBase, model: bytes) -> bool:
    """Return True if `model` is a SentencePiece model whose pieces have the tokenizer's ids."""
    proto: Any = sentencepiece_model  # its classes are created at run time
    try:
        pieces = proto.ModelProto.FromString(model).pieces
    except Exception:  # protobuf's DecodeError, whose module depends on its implementation
        return False
    ids = tokenizer.get_vocab()
    # A tokenizer trained here keeps spaces; others use SentencePiece's character for them.
    return bool(pieces) and all(
        number in (ids.get(piece.piece), ids.get(piece.piece.replace(SPACE, " ")))
        for number, piece in enumerate(pieces)
    )


def brings_code(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the tokenizer's class came with its files and needs trust_remote_code."""
    return type(tokenizer).__module__.startswith("transformers_modules.")


@dataclass(frozen=True)
class SpecialIds:
    """A tokenizer's special ids. `special` holds all ids that are not text."""

    bos: int | None
    eos: int
    pad: int | None
    unk: int | None
    special: frozenset[int]
    ends_of_turns: tuple[int, ...] = ()
    """Last tokens of an assistant's turns in the chat template: of answers, and of calls."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> SpecialIds:
        """Return the special ids of a tokenizer."""
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        special = {*tokenizer.all_special_ids, *(number for number, t in added if t.special)}
        return cls(
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
            tokenizer.unk_token_id,
            frozenset(special),
            tuple(_ends_of_turns(tokenizer)),
        )

    def in_place_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the bos, eos and pad ids for a config.json or generation_config.json.

        Presets have the ids of the published model's tokenizer; with another tokenizer, generation
        would stop at the wrong tokens. A config value is kept if the tokenizer has none. Additional
        eos ids (ends of turns in a chat) are kept if they are special ids of this tokenizer too.
        The ends of turns in the tokenizer's chat template are always included.
        """
        listed = config.get("eos_token_id")
        ends = [end for end in listed if self._fits(end)] if isinstance(listed, list) else []
        if self.eos not in ends:
            ends.insert(0, self.eos)
        ends += [end for end in self.ends_of_turns if end not in ends]
        return {
            "bos_token_id": self._or_config(self.bos, config.get("bos_token_id")),
            "eos_token_id": ends if len(ends) > 1 else self.eos,
            "pad_token_id": self._or_config(self.pad, config.get("pad_token_id")),
        }

    def _or_config(self, own: int | None, config_id: Any) -> int | None:
        return config_id if own is None and self._fits(config_id) else own

    def _fits(self, config_id: Any) -> bool:
        return isinstance(config_id, int) and config_id in self.special and config_id != self.unk


def _ends_of_turns(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an assistant's turns in the chat template: behind an answer, and
    behind a call of a function.
    """
    if not tokenizer.chat_template:
        return []
    tokens = tokenizer.get_added_vocab()
    answer = {"role": "assistant", "content": "therefore"}
    behind = [
        _behind(tokenizer, [answer, *more]) for more in ([], [{"role": "user", "content": "so?"}])
    ]
    # The token behind the text, whether turns follow or not, or the marker of the next role.
    end = _last_of_first(tokens, *behind)
    end = end if end is not None else _last_of_first(tokens, behind[0] or behind[1])
    return [*dict.fromkeys(id_ for id_ in (end, _end_of_call(tokenizer, end)) if id_ is not None)]


def _end_of_call(tokenizer: PreTrainedTokenizerBase, end: int | None) -> int | None:
    """Return the token that ends a turn with a call, unless it is `end`: the last token of the turn
    if it does not also stand between two calls, otherwise the one in front of the result.
    """
    tokens: dict[str, int] = tokenizer.get_added_vocab()
    result = {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": "found"}
    for form in (dict, json.dumps):
        alone = _behind(tokenizer, [_calls(form, "therefore")]).rstrip()
        answered = _behind(tokenizer, [_calls(form, "therefore"), result])
        several = _behind(tokenizer, [_calls(form, "therefore", "thence")])
        last = max((token for token in tokens if alone.endswith(token)), key=len, default="")
        if not last or end in [tokens[token] for token in tokens if token in alone]:
            continue
        between, is_several, _ = several.partition("thence")
        if not is_several or last not in between:
            return tokens[last]
        rest = answered[len(alone) :].lstrip()
        following = max((token for token in tokens if rest.startswith(token)), key=len, default="")
        return tokens.get(following)
    return None


def _calls(form: Callable[..., object], *words: str) -> dict[str, Any]:
    """Return an assistant's turn with a call for each word; `form`: of the arguments."""
    functions = [{"name": "look", "arguments": form({"at": word})} for word in words]
    calls = [
        {"id": f"call{number:05}", "type": "function", "function": function}
        for number, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _behind(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]]) -> str:
    """Return what a template writes behind the word "therefore", or "" if it rejects the turns."""
    asked = {"role": "user", "content": "why?"}
    try:
        text = str(tokenizer.apply_chat_template([asked, *turns], tokenize=False))
    except Exception:  # a template may raise anything
        return ""
    return text.rpartition("therefore")[2].lstrip() if "therefore" in text else ""


def _last_of_first(tokens: Mapping[str, int], *texts: str) -> int | None:
    """Return the last of the consecutive tokens at the start of all texts."""
    last = None
    while begun := [token for token in tokens if all(text.startswith(token) for text in texts)]:
        last = max(begun, key=len)
        texts = tuple(text[len(last) :] for text in texts)
    return None if last is None else tokens[last]
