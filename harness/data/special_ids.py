"""The ids that begin, end and fill up texts: a tokenizer's, in the place of a model config's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SpecialIds:
    """`special`: all ids that stand for no text."""

    bos: int | None
    eos: int
    pad: int | None
    unk: int | None
    special: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> SpecialIds:
        """A tokenizer's."""
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        special = {*tokenizer.all_special_ids, *(number for number, t in added if t.special)}
        return cls(
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
            tokenizer.unk_token_id,
            frozenset(special),
        )

    def in_place_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The three values of a config.json or generation_config.json.

        Presets have those of the published model's tokenizer: with another one, text would end
        where it does not, and not where it does. A value of the config stays where the tokenizer
        has none, and further ends of a text do (of turns in a chat), as long as they are special
        ids of this tokenizer too.
        """
        listed = config.get("eos_token_id")
        ends = [end for end in listed if self._fits(end)] if isinstance(listed, list) else []
        if self.eos not in ends:
            ends.insert(0, self.eos)
        return {
            "bos_token_id": self._or_given(self.bos, config.get("bos_token_id")),
            "eos_token_id": ends if len(ends) > 1 else self.eos,
            "pad_token_id": self._or_given(self.pad, config.get("pad_token_id")),
        }

    def _or_given(self, own: int | None, given: Any) -> int | None:
        return given if own is None and self._fits(given) else own

    def _fits(self, given: Any) -> bool:
        return isinstance(given, int) and given in self.special and given != self.unk
