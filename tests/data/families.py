"""Chat templates that behave as those of published families, each with a small tokenizer."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).with_name("templates")
_TOKENS = re.compile(
    r"<\|[^|<> ']+\|>|<\uff5c[^\uff5c]+\uff5c>|\[/?[A-Z_]+\]|\[gMASK\]|<sop>"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value|start_of_turn|end_of_turn)>"
)


@dataclass(frozen=True)
class Family:
    """A row of families.toml."""

    name: str
    eos: str
    ends: tuple[str, ...]
    prompt: str
    calls: str
    arguments: str
    thoughts: str
    bos: str | None = None
    markers: str = "tokens"

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text()


FAMILIES = {
    name: Family(name, **{**row, "ends": tuple(row["ends"])})
    for name, row in tomllib.loads((TEMPLATES / "families.toml").read_text()).items()
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, a few joined ones, and those of the family's template."""
    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("e", "r"), ("i", "n"), ("o", "."), ("Ġ", "i"), ("}", "}")]
    vocab = [*alphabet, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({token: n for n, token in enumerate(vocab)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    ends = [token for end in family.ends for token in _TOKENS.findall(end)]
    special = {*ends, family.eos, *([family.bos] if family.bos else [])}
    if family.markers == "tokens":
        special |= {*_TOKENS.findall(family.template)}
    backend.add_special_tokens(sorted(special))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=family.bos, eos_token=family.eos
    )
    tokenizer.chat_template = family.template
    return tokenizer
