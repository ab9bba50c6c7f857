"""Reads the advice in a message, and applies it to the arguments that caused the message.

Advice begins with a verb after a colon or semicolon: "...: use 1 or 2, or leave it out". Each
option that it names becomes words: KEY=VALUE sets a key, -KEY removes it, -?KEY removes it if
present, OLD>NEW renames it. advice.toml lists phrases that leave a key or a value open.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

from harness.config.ds_json import ds_keys
from harness.config.run_config import RunConfig

VERBS = (
    "set|use|remove|leave|keep|name|write|make|give|change|lower|raise|take|move|put|merge|convert|"
    "choose|add|increase|extend|fix|rewrite|list|did you mean|"
    "the nearest valid values are"
)
ADVICE = re.compile(rf"(?:or )?(?:{VERBS})\b")
_FIELDS, _TOPS = "|".join(RunConfig.model_fields), "|".join(ds_keys()["keys"])
_KEY = rf"(?:(?:ds\.)?(?:{_FIELDS}|{_TOPS})(?:\.\w+)+|(?:{_TOPS})\b(?!\.))"
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|\[[^]]*\]|\{(?:[^{}]|\{[^{}]*\})*\}|[\w$./:-]*[\w/])"
_IT = r"(?:it|this|that|that key|the section)"
_A_KEY, _ASSIGNED = re.compile(_KEY), re.compile(rf"{_KEY}={_VALUE}")
_OF_THE_JSON = re.compile(rf"(?:{_TOPS})\b")
# Removed from messages: origins of values, and counts of rows.
_BESIDE = re.compile(
    r" \((?:[\w.]+: [^()]*|command line(?:, command line.*)?)\)$"
    r"| \([\d,]+ of [\d,]+ lines read; this is the first\)"
)
_QUOTED = re.compile(rf"'({_KEY}=[\[{{][^']*)'")  # for a shell
_ORIGIN = re.compile(rf"(?:\(|command line, |([\w.]+): )command line: ({_KEY})\)")
_SAME = re.compile(rf", but {_KEY} is ({_VALUE})")
_DOES = re.compile(
    rf"(?:\(|[:;] )({_KEY}={_VALUE}) (?:can|reads|leaves|names|splits|learns|makes)\b"
)
_WAYS = re.compile(rf", or |, (?=(?:{VERBS})\b)")
# Phrases that are complete.
_SETS = re.compile(
    rf"(?:(?:use|set) )?({_KEY}={_VALUE}(?: and {_KEY}={_VALUE})*)"
    rf"(?: without ({_KEY}.*)|,? (?:to|for|with) .*|, too)?"
)
_SETS_TO = re.compile(rf"set ({_KEY}) to ({_VALUE})(?: or (?:more|less)|, too)?")
_USES = re.compile(
    rf"(?:use|set it to|the nearest valid values are) ({_VALUE})(?: and ({_VALUE}))?(?: or more)?"
)
_ONE_OF = re.compile("(?:use|set it to) one of (.+)")
_AS_IN = re.compile(rf"(?:name|leave) .*, as in ({_KEY}={_VALUE})")
_REMOVES = re.compile(rf"(?:remove|leave) (?:({_IT})|{_KEY})(?: and {_KEY})*(?: out)?")
_MEANS = re.compile(r"did you mean ([\w.-]+)\??")
_LEAVES_OPEN = re.compile(rf"\bset ({_KEY})(?![\w.=]| to | above )")


def _in_words(phrase: str) -> re.Pattern[str]:
    return re.compile("((?:(?! or |, ).)+?)".join(map(re.escape, phrase.split("..."))))


_BOOK = {
    _in_words(phrase): [words] if isinstance(words, str) else words
    for phrase, words in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}


class NoWay(AssertionError):
    """Advice that cannot be followed as worded."""


class Message:
    """A message about a command line, and its advice."""

    def __init__(self, text: str) -> None:
        self.text = text
        bare = _QUOTED.sub(r"\1", _BESIDE.sub("", text))
        self.key = (re.match(r"[\w.]*\w", bare.removeprefix("data.path: ")) or [""])[0]
        self._others = [key for key in _A_KEY.findall(bare) if key != self.key]
        parts = re.split("[:;] ", bare)
        self.phrases = [part.removeprefix("or ") for part in parts if ADVICE.match(part)]
        self.phrases += _DOES.findall(bare) + re.findall(r"; (\d+ would be)$", bare)

    @property
    def kind(self) -> str:
        """The message with its values replaced."""
        return re.sub(r"\d[\d,.]*|'[^']*'|\[[^]]*\]", "N", self.text)

    @property
    def left_open(self) -> list[str]:
        """The keys that it says to set, without a value."""
        return [of_line(key) for phrase in self.phrases for key in _LEAVES_OPEN.findall(phrase)]

    def ways(self) -> Iterator[str]:
        """Yield the words of each option that the message names. Raises NoWay."""
        for phrase in self.phrases:
            before = ""
            for part in _WAYS.split(phrase):
                before, words = self._read(part, before, part.split(" or "))
                yield from words

    def _read(self, part: str, before: str, parts: list[str]) -> tuple[str, list[str]]:
        """Return a phrase, possibly begun by words of the previous one, and its options' words."""
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
        for pattern, words in _BOOK.items():
            if match := pattern.fullmatch(phrase):
                section = self.own.rpartition(".")[0]
                same = _SAME.search(self.text)
                names = {"key": self.own, "section": section, "other": same and _plain(same[1])}
                return [text.format(phrase, *match.groups(), **names) for text in words]
        return None

    def _worded(self, phrase: str) -> list[str] | None:
        """Return the words of a complete phrase."""
        own = self.own
        if match := _SETS.fullmatch(phrase):
            left = [f"-?{of_line(key)}" for key in _A_KEY.findall(match[2] or "")]
            return [" ".join([*map(_assigned, _ASSIGNED.findall(match[1])), *left])]
        if match := _USES.fullmatch(phrase):
            return [f"{own}={_plain(value)}" for value in match.groups() if value]
        if match := _SETS_TO.fullmatch(phrase):
            return [f"{of_line(match[1])}={_plain(match[2])}"]
        if match := _ONE_OF.fullmatch(phrase):
            return [f"{own}={_plain(value)}" for value in match[1].split(", ")]
        if match := _AS_IN.fullmatch(phrase):
            return [_assigned(match[1])]
        if match := _REMOVES.fullmatch(phrase):
            named = [f"-?{of_line(key)}" for key in _A_KEY.findall(phrase)]
            return [" ".join([f"-{own}", *named] if match[1] else named)]
        if phrase in ("remove one of them", "keep one"):
            return [f"-{own}", f"-{of_line(self._others[-1])}"]
        if match := _MEANS.fullmatch(phrase):
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
        """The key at the beginning of the message, or the JSON's that its value comes from."""
        if " is not a key that DeepSpeed knows" in self.text:
            return f"ds.{self.key}"
        origins = (match.groups() for match in _ORIGIN.finditer(self.text))
        of_json = (origin for key, origin in origins if key in (None, self.key))
        return of_line(next(of_json, self.key))


def of_line(key: str) -> str:
    """Return a key as written on the command line."""
    return f"ds.{key}" if _OF_THE_JSON.match(key) else key


def _assigned(word: str) -> str:
    key, _, value = word.partition("=")
    return shlex.quote(f"{of_line(key)}={_plain(value)}")


def _plain(value: str) -> str:
    return {"True": "true", "False": "false"}.get(value, value.strip("\"'"))


def followed(line: str, words: str) -> str:
    """Return a command line with advice applied. Raises NoWay if that changes nothing."""
    before = shlex.split(line)
    after = before
    for word in shlex.split(words):
        old, is_renamed, new = word.partition(">")
        if is_renamed:
            after = [
                new + option[len(old) :]
                if f"{option}=".startswith((f"{old}=", f"{old}."))
                else option
                for option in after
            ]
            continue
        key, is_set, _ = word.partition("=")
        bare = key.removeprefix("-").removeprefix("?")
        kept = [
            option for option in after if not f"{option.partition('=')[0]}.".startswith(f"{bare}.")
        ]
        if not is_set and len(kept) == len(after) and not key.startswith("-?"):
            raise NoWay(f"there is no {bare} to remove")
        after = [*kept, word] if is_set else kept
    if sorted(after) == sorted(before):
        raise NoWay(f"{words} is so already")
    return shlex.join(after)
