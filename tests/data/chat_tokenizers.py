"""Small tokenizers of five chat styles, trained here, with conversations for them."""

import json
import random
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from harness.data.rendering import set_template, with_arguments
from tests.tables import beside


@dataclass(frozen=True)
class Style:
    eos: str
    special: Sequence[str]
    end: str
    """Last token of an assistant turn."""
    is_metaspace: bool = False


_TABLES = beside(__file__, "chat_tokenizers.toml")
STYLES = {name: Style(**row) for name, row in _TABLES["styles"].items()}
TOOLS, WORDS = _TABLES["tools"], _TABLES["words"]


def tokenizer_of(name: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a style, with its template or another one."""
    tokenizer = deepcopy(_trained(name))
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


@cache
def _trained(name: str) -> PreTrainedTokenizerFast:
    style = STYLES[name]
    special = ["<bos>", "<unk>", *style.special]
    backend = Tokenizer(models.BPE(unk_token="<unk>" if style.is_metaspace else None))
    if style.is_metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace()
        alphabet = sorted({*"".join(WORDS), *map(chr, range(32, 127)), "\n", "▁"})
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = (" ".join(map(str, chat)) for chat in chats(50, tools=True, seed=1))
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token=style.eos, unk_token="<unk>"
    )
    set_template(tokenizer, name)
    return tokenizer


def chats(count: int, *, tools: bool, seed: int = 0) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations of one to four questions, some with system turns and tool calls."""
    chooser = random.Random(seed)

    def said() -> str:
        words = " ".join(chooser.choice(WORDS) for _ in range(chooser.randint(1, 12))).strip()
        return words or "yes"

    for _ in range(count):
        turns: list[dict[str, Any]] = []
        if chooser.random() < 0.5:
            turns.append({"role": "system", "content": said()})
        for _ in range(chooser.randint(1, 4)):
            turns.append({"role": "user", "content": said()})
            if tools and chooser.random() < 0.5:
                call = {"name": "add", "arguments": {"a": chooser.randint(0, 9), "b": "é\n"}}
                calls = [{"type": "function", "function": call}] * chooser.randint(1, 2)
                content = chooser.choice(["", said()])
                turns.append({"role": "assistant", "content": content, "tool_calls": calls})
                turns += [{"role": "tool", "content": json.dumps({"sum": said()})}] * len(calls)
            turns.append({"role": "assistant", "content": said()})
        yield turns


def write_chats(path: Path, count: int, *, tools: bool) -> list[dict[str, Any]]:
    """Write conversations as JSON lines; arguments of calls are text, as in OpenAI's format."""
    more = {"tools": TOOLS} if tools else {}
    records = [{"messages": turns, **more} for turns in chats(count, tools=tools)]
    texts = [{**row, "messages": with_arguments(row["messages"], "text")} for row in records]
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return records
