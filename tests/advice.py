"""Reads the advice in a message, and follows it in the line of words that caused the message.

Advice begins with a verb behind a colon or semicolon: "...: use 1 or 2, or leave it out". Each way
out that it names becomes words: KEY=VALUE sets a key, -KEY removes one, -?KEY where it is there,
OLD>NEW renames one. Phrases that leave a key or a value open are in advice.toml.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

from harness.config.ds_keys import ds_keys
from harness.config.run_config import RunConfig

_BOOK: dict[str, str | list[str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
VERBS = (
    "set|use|remove|leave|keep|name|write|make|give|change|lower|raise|take|move|put|merge|convert|"
    "choose|add|increase|extend|mend|did you mean|the nearest that do are"
)
ADVICE = re.compile(rf"(?:or )?(?:{VERBS})\b")
_FIELDS = "|".join(RunConfig.model_fields)
_TOPS = "|".join(ds_keys()["keys"])
_KEY = rf"(?:(?:ds\.)?(?:{_FIELDS}|{_TOPS})(?:\.\w+)+|(?:{_TOPS})\b(?!\.))"
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|\[[^]]*\]|[\w./:-]*[\w/])"
_ASSIGNED = rf"{_KEY}={_VALUE}"
_IT = r"it|this|that|that key|the section"
_OF_THE_JSON = re.compile(rf"(?:{_TOPS})\b")


class NoWay(AssertionError):
    """Advice that cannot be followed as it is worded."""


class Message:
    """A message about a line of words, and what it advises."""

    def __init__(self, text: str) -> None:
        self.text = text
        origins = r" \((?:[\w.]+: [^()]*|command line(?:, command line.*)?)\)$"
        bare = re.sub(origins, "", text)
        self.key = (re.match(r"[\w.]*\w", bare.removeprefix("data.path: ")) or [""])[0]
        self._others = [key for key in re.findall(_KEY, bare) if key != self.key]
        self.phrases = [
            part.removeprefix("or ") for part in re.split(r"[:;] ", bare) if ADVICE.match(part)
        ]
        self.phrases += re.findall(rf"\(({_ASSIGNED} can)\)", bare)
        self.phrases += re.findall(r"; (\d+ would be)$", bare)

    @property
    def kind(self) -> str:
        """The message without its values."""
        return re.sub(r"\d[\d,.]*|'[^']*'|\[[^]]*\]", "N", self.text)

    def ways(self) -> Iterator[str]:
        """Yield the words of each way out that the message names. Raises NoWay."""
        for phrase in self.phrases:
            before = ""
            for part in re.split(", or ", phrase):
                before, words = self._read(part, before, re.split(" or ", part))
                yield from words

    def _read(self, part: str, before: str, parts: list[str]) -> tuple[str, list[str]]:
        """Return a phrase, and the words of its ways; it may begin with words of one `before`."""
        said = before.split()
        for length in (0, *reversed(range(1, len(said)))):
            whole = " ".join([*said[:length], part])
            if (words := self._in_book(whole)) is None:
                words = self._worded(whole)
            if words is not None:
                return whole, words
        if len(parts) < 2:
            raise NoWay(f"advice.toml lacks {part!r} of: {self.text}")
        every: list[str] = []
        for one in parts:
            before, words = self._read(one, before, [one])
            every += words
        return before, every

    def _in_book(self, phrase: str) -> list[str] | None:
        for said, words in _BOOK.items():
            pattern = "((?:(?! or |, ).)+?)".join(map(re.escape, said.split("...")))
            if match := re.fullmatch(pattern, phrase):
                own = self.own
                names = {"key": own, "section": own.rpartition(".")[0], "other": self._other_value}
                texts = [words] if isinstance(words, str) else words
                return [text.format(phrase, *match.groups(), **names) for text in texts]
        return None

    def _worded(self, phrase: str) -> list[str] | None:
        """Return the words of a phrase that says everything itself."""
        own = self.own
        if match := re.fullmatch(
            rf"(?:use|set) ({_ASSIGNED}(?: and {_ASSIGNED})*)( without {_KEY}.*|,? (?:to|for|with) .*|, too)?",
            phrase,
        ):
            sets = [_assigned(word) for word in re.findall(_ASSIGNED, match[1])]
            left = re.findall(_KEY, match[2] or "") if " without " in phrase else []
            return [" ".join([*sets, *(f"-?{of_line(key)}" for key in left)])]
        if match := re.fullmatch(
            rf"(?:use|set it to|the nearest that do are) ({_VALUE})( and {_VALUE})?( or more)?",
            phrase,
        ):
            values = [match[1], *([match[2].removeprefix(" and ")] if match[2] else [])]
            return [f"{own}={_plain(value)}" for value in values]
        if match := re.fullmatch(rf"set ({_KEY}) to ({_VALUE})(?: or (?:more|less))?", phrase):
            return [f"{of_line(match[1])}={_plain(match[2])}"]
        if match := re.fullmatch("(?:use|set it to) one of (.+)", phrase):
            return [f"{own}={_plain(value)}" for value in match[1].split(", ")]
        if match := re.fullmatch(rf"({_ASSIGNED}) can", phrase):
            return [_assigned(match[1])]
        if re.fullmatch(rf"(?:remove|leave) (?:{_IT}|{_KEY})(?: and {_KEY})*(?: out)?", phrase):
            first = [f"-{own}"] if re.match(rf"\w+ (?:{_IT})\b", phrase) else []
            return [" ".join([*first, *(f"-?{of_line(key)}" for key in re.findall(_KEY, phrase))])]
        if re.fullmatch("remove one of them|keep one", phrase):
            return [f"-{own}", f"-{of_line(self._others[-1])}"]
        if match := re.fullmatch(r"did you mean ([\w.-]+)\??", phrase):
            return [self._meant(match[1])]
        return None

    def _meant(self, name: str) -> str:
        """Return the words for another name of a key, or another value."""
        if " is not a key of the run config" in self.text:
            return f"{self.key}>{name}"
        if " is not a" in self.text or " changes nothing" in self.text:
            is_override = self.key.startswith("model.overrides.")
            return f"{self.own}>{f'model.overrides.{name}' if is_override else of_line(name)}"
        return f"{self.own}={name}"

    @property
    def own(self) -> str:
        """The key that the message begins with, or the JSON's that its value comes from."""
        before = rf"\(|command line, |{re.escape(self.key)}: "
        origin = re.search(rf"(?:{before})command line: ({_KEY})\)", self.text)
        is_json = " is not a key that DeepSpeed knows" in self.text
        return f"ds.{self.key}" if is_json else of_line(origin[1] if origin else self.key)

    @property
    def _other_value(self) -> str:
        """The value of another key that means the same."""
        other = re.search(rf", but {_KEY} is ({_VALUE})", self.text)
        return _plain(other[1]) if other else ""


def of_line(key: str) -> str:
    """Return a key as a line of words has it."""
    return f"ds.{key}" if _OF_THE_JSON.match(key) else key


def _assigned(word: str) -> str:
    key, _, value = word.partition("=")
    return f"{of_line(key)}={_plain(value)}"


def _plain(value: str) -> str:
    return {"True": "true", "False": "false"}.get(value, value.strip("\"'"))


def followed(line: str, words: str) -> str:
    """Return a line of words after advice was followed. Raises NoWay if that changes nothing."""
    before = shlex.split(line)
    after = before
    for word in shlex.split(words):
        old, is_renamed, new = word.partition(">")
        if is_renamed:
            after = [
                new + of[len(old) :] if f"{of}=".startswith((f"{old}=", f"{old}.")) else of
                for of in after
            ]
            continue
        key, is_set, _ = word.partition("=")
        bare = key.removeprefix("-").removeprefix("?")
        kept = [of for of in after if not f"{of.partition('=')[0]}.".startswith(f"{bare}.")]
        if not is_set and len(kept) == len(after) and not key.startswith("-?"):
            raise NoWay(f"there is no {bare} to remove")
        after = [*kept, word] if is_set else kept
    if sorted(after) == sorted(before):
        raise NoWay(f"{words} is so already")
    return shlex.join(after)
