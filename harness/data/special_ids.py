"""Special ids (bos, eos, pad) of a tokenizer, which replace those of a model config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SpecialIds:
    """A tokenizer's special ids; `special` holds all ids that are not text."""

    bos: int | None
    eos: int
    pad: int | None
    unk: int | None
    special: frozenset[int]
    end_of_turn: int | None = None
    """Last token of an assistant's turn in the chat template."""

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
            _end_of_turn(tokenizer),
        )

    def in_place_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the three values for a config.json or generation_config.json.

        Presets have the ids of the published model's tokenizer; with another tokenizer generation
        would stop at the wrong tokens. A value of the config stays if the tokenizer has none, and
        so do further eos ids (ends of turns in a chat), if they are special ids of this tokenizer
        too. The end of a turn in the tokenizer's chat template is always one.
        """
        listed = config.get("eos_token_id")
        ends = [end for end in listed if self._fits(end)] if isinstance(listed, list) else []
        if self.eos not in ends:
            ends.insert(0, self.eos)
        if self.end_of_turn is not None and self.end_of_turn not in ends:
            ends.append(self.end_of_turn)
        return {
            "bos_token_id": self._or_config(self.bos, config.get("bos_token_id")),
            "eos_token_id": ends if len(ends) > 1 else self.eos,
            "pad_token_id": self._or_config(self.pad, config.get("pad_token_id")),
        }

    def _or_config(self, own: int | None, config_id: Any) -> int | None:
        return config_id if own is None and self._fits(config_id) else own

    def _fits(self, config_id: Any) -> bool:
        return isinstance(config_id, int) and config_id in self.special and config_id != self.unk


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token with which the assistant's turn ends in the chat template: the one behind
    what it says, or the next role's if the template writes none there.
    """
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "therefore"}]
    for more in ([], [{"role": "user", "content": "so?"}]):
        try:
            text = str(tokenizer.apply_chat_template([*turns, *more], tokenize=False))
        except Exception:  # a template may raise anything
            return None
        _, separator, behind = text.rpartition("therefore")
        if separator and behind.strip():
            return _last_of_first(tokenizer.get_added_vocab(), behind.lstrip())
    return None


def _last_of_first(tokens: Mapping[str, int], text: str) -> int | None:
    """Return the last of the tokens with which a text begins, one behind the other."""
    last = None
    while begun := [token for token in tokens if text.startswith(token)]:
        last = max(begun, key=len)
        text = text[len(last) :]
    return None if last is None else tokens[last]
