"""Token counts of a dry run, with the run's tokenizer if it is on this machine, otherwise from the
number of bytes. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.config.data_section import DataConfig
from harness.config.run_config import run_and_step
from harness.errors import ConfigError, Unusable
from harness.files.chat import Chat, read_template
from harness.files.pieces import Ids, Piece
from harness.files.regular_file import read_json

# Bytes per token of a tokenizer that is trained on its text, by log2 of its vocabulary size: the
# mean of Python's library (11 MB: 1.90, 3.00, 3.74, 4.09) and of English manuals and Markdown
# (3 MB: 1.71, 2.87, 3.85, 4.39).
_BYTES_PER_TOKEN = ((9, 1.80), (11, 2.94), (13, 3.79), (15, 4.24))
_OF_ENGLISH = 4.0  # bytes per token of a tokenizer that is not here
_AROUND_A_TURN = 5  # tokens of a chat template: start, role, line break, end, line break
# Limits that keep a dry run fast.
_MOST_CHARACTERS, _MOST_OF_A_TEXT = 1 << 19, 1 << 16
_MOST_JSON_BYTES = 1 << 26
_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)

Row = Chat | Ids | list[Piece]
Rows = Sequence[Row]


class TokenCounter:
    """Counts the tokens of documents as the run would."""

    def __init__(self, data: DataConfig, init_from: str | None = None) -> None:
        """`init_from`: initial weights, whose tokenizer is used if data.tokenizer names none."""
        self._data, self._source = data, data.tokenizer or init_from

    def lengths(self, documents: Rows) -> list[int]:
        """Return the number of tokens of each document, including the one that ends it; if there
        are many documents, only of some at even intervals.
        """
        if documents and isinstance(documents[0], Ids):
            return [len(document.ids) for document in documents if isinstance(document, Ids)]
        written = [self._written(document) for document in documents]
        size = sum(min(len(text), _MOST_OF_A_TEXT) for text, _ in written)
        written = written[:: math.ceil(size / _MOST_CHARACTERS) or 1]
        counts = self._counts([text for text, _ in written])
        return [count + more for count, (_, more) in zip(counts, written, strict=True)]

    def bytes_per_token(self, texts: Sequence[str]) -> float:
        """Return the mean number of bytes per token, in these texts if the tokenizer is here."""
        size = sum(len(text.encode()) for text in texts)
        return size / max(sum(self._counts(texts)), 1) if size else _OF_ENGLISH

    def _counts(self, texts: Sequence[str]) -> list[int]:
        if self._encoder is None:
            return [math.ceil(len(text.encode()) / self._usual) for text in texts]
        cut = [text[:_MOST_OF_A_TEXT] for text in texts]
        encoded = self._encoder.encode_batch_fast(cut, add_special_tokens=False)
        return [
            round(len(one.ids) * len(text) / max(len(part), 1))
            for one, text, part in zip(encoded, texts, cut, strict=True)
        ]

    @property
    def _usual(self) -> float:
        """Usual bytes per token, by the vocabulary size if a tokenizer is trained on the data."""
        if self._source is not None:
            return _OF_ENGLISH
        size, points = math.log2(self._data.vocab_size), _BYTES_PER_TOKEN
        (low, least), (high, most) = next(
            (pair for pair in pairwise(points) if size <= pair[1][0]), points[-2:]
        )
        size = min(max(size, low - 1), high + 1)
        return least + (most - least) * (size - low) / (high - low)

    def _written(self, document: Row) -> tuple[str, int]:
        """Return a document's text, and the number of its tokens that are not in the text."""
        if isinstance(document, list):
            return "".join(piece.text for piece in document), 1
        assert isinstance(document, Chat), "documents of token ids have no text"
        try:
            text = self._render(document) if self._encoder is not None else ""
        except Exception:  # a template may raise anything, which the run reports
            text = ""
        if text:
            return text, not text.rstrip().endswith(self._ends)
        said = "\n".join(message["content"] or "" for message in document.messages)
        return said, 1 + _AROUND_A_TURN * len(document.messages)

    @cached_property
    def _encoder(self) -> Any:
        """The tokenizer of a tokenizer.json; None if there is none here."""
        path = self._file("tokenizer.json")
        if path is None:
            return None
        from tokenizers import Tokenizer  # only if needed: it takes as long as the rest of a plan

        try:
            encoder = Tokenizer.from_file(str(path))
        except Exception:  # the run reports it
            return None
        encoder.no_truncation()
        encoder.no_padding()
        encoder.encode_special_tokens = bool(self._settings.get("split_special_tokens"))
        return encoder

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """The tokenizer's added tokens. The run appends no end token to a conversation that ends
        with one of them.
        """
        added = self._encoder.get_added_tokens_decoder().values()
        return tuple(token.content for token in added)

    @cached_property
    def _render(self) -> Callable[[Chat], str]:
        """Function that renders a conversation with the chat template; returns "" without one."""
        source = self._template()
        if not source:
            return lambda chat: ""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        loops = ["jinja2.ext.loopcontrols"]
        made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=loops)
        made.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        made.globals["strftime_now"] = date.today().strftime
        compiled = made.from_string(_GENERATION.sub(_as_condition, source))
        special = {
            name: token.get("content") if isinstance(token, Mapping) else token
            for name, token in self._settings.items()
            if name.endswith("_token")
        }

        def render(chat: Chat) -> str:
            return compiled.render(messages=chat.messages, tools=chat.tools, **special)

        return render

    def _template(self) -> str:
        if self._data.template is not None:
            return read_template(self._data.template)
        if path := self._file("chat_template.jinja"):
            return path.read_text(encoding="utf-8")
        template = self._settings.get("chat_template") or ""
        if isinstance(template, list):  # several by name
            by_name = {named["name"]: named["template"] for named in template}
            template = by_name.get("default", "")
        return str(template)

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        path = self._file("tokenizer_config.json")
        try:
            settings: Any = read_json(path, _MOST_JSON_BYTES, links=True) if path else {}
        except (OSError, Unusable, ConfigError):
            return {}
        return settings if isinstance(settings, dict) else {}

    def _file(self, name: str) -> Path | None:
        """Return a file of the tokenizer: in its folder, that of a run, or the hub's cache."""
        if self._source is None:
            return None
        folder = run_and_step(self._source)[0]
        for path in (folder / "tokenizer" / name, folder / name):
            if path.is_file():
                return path
        if folder.exists() or not _HUB_ID.fullmatch(self._source):
            return None
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(self._source, name)
        except ValueError:  # not a name that the hub allows
            return None
        return Path(cached) if isinstance(cached, str) else None


def _as_condition(tag: re.Match[str]) -> str:
    """Return a tag without effect in place of {% generation %}, which jinja2 does not know."""
    return f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}"
