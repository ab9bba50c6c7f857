"""Templates of 50 families: ids are apply_chat_template's; words that occur once tell the turns."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harness.data.chat_tokens import ChatEncoder
from harness.data.rendering import with_arguments
from harness.data.tokenizer_files import SpecialIds
from harness.files.chat import chat_of
from harness.files.turns import turns_of
from tests.data.chat_tokenizers import TOOLS
from tests.tables import beside

TEMPLATES = Path(__file__).with_name("templates")
_TOKENS = re.compile(
    r"<\|[^|<> ']+\|?>|<[^|<> ']+\|>|<\uff5c[^\uff5c<>]+\uff5c>|\[/?[A-Z_]+\]|\[\|[a-z]+\|\]"
    r"|\[gMASK\]|<sop>|\]~!?b\[|\]~b\]|\[e~\[|<SPECIAL_\d+>|</?seed:\w+>|</?role>"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value|start_of_turn|end_of_turn)>"
)


@dataclass(frozen=True)
class Family:
    """A row of families.toml."""

    name: str
    eos: str
    prompts: Sequence[str]
    ends: Sequence[str]
    stops: Sequence[str]
    calls: str = "written"
    several: str = "written"
    arguments: str = "object"
    thoughts: str = "lost"
    bos: str | None = None
    markers: str = "tokens"
    is_closed: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text()


FAMILIES = {
    name: Family(name, **{"ends": ends, "stops": ends, **row})
    for name, row in tomllib.loads((TEMPLATES / "families.toml").read_text()).items()
    for ends in [row.get("ends", [row["eos"]])]
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with bytes, a few merges, and the tokens of the family's template."""
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


Turns = list[dict[str, Any]]
family = pytest.mark.parametrize("name", FAMILIES)
CONVERSATIONS: dict[str, Turns] = beside(__file__, "conversations.toml")["conversations"]


class Read:
    """A conversation of a family: its text, and which characters are learned."""

    def __init__(
        self, name: str, turns: Turns, tools: Any = None, learn: str = "assistant"
    ) -> None:
        self.family, self.tokenizer, self.turns = FAMILIES[name], tokenizer_of(name), turns
        # Rows have arguments as text, as in OpenAI's format.
        chat = chat_of(turns_of(with_arguments(turns, "text"), "messages"), tools)
        encoder = ChatEncoder(self.tokenizer, learn)
        rendered = encoder.render(chat)
        self.notes = [note for _, note in rendered.notes]
        (encoded,) = encoder.encode([rendered])
        self.ids = encoded.ids
        given = with_arguments(turns, self.family.arguments)
        self.text = self.tokenizer.apply_chat_template(given, tools=tools, tokenize=False)
        self.plain = self.tokenizer(
            self.text, add_special_tokens=False, return_offsets_mapping=True
        )
        self.marks = [False] * len(self.text)
        self.learned = {place for run in encoded.learned for place in range(*run)}
        for place, (start, stop) in enumerate(self.plain["offset_mapping"]):
            for at in range(start, stop):
                self.marks[at] |= place in self.learned

    @property
    def is_closed(self) -> bool:
        """True if nothing was added after the template's output."""
        return len(self.ids) == len(self.plain["input_ids"])

    def places(self, word: str) -> list[range]:
        return [range(*found.span()) for found in re.finditer(re.escape(word), self.text)]

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the start and stop of each run of learned characters."""
        for found in re.finditer("1+", "".join(str(int(mark)) for mark in self.marks)):
            yield found.span()

    def check_ids(self) -> None:
        more = [] if self.is_closed else [self.tokenizer.eos_token_id]
        assert self.ids == [*self.plain["input_ids"], *more]

    def check_turn(self, words: list[str], place: int) -> None:
        """Assert that a turn is learned from the end of the prompt to its own end."""
        at = self.places(words[-1])[place]
        start, stop = next(run for run in self.runs() if run[0] <= at.start < run[1])
        assert self.text[:start].endswith(tuple(self.family.prompts))
        if self.family.name != "gptoss":
            prompts = filter(None, self.family.prompts)
            assert not any(prompt in self.text[start:stop] for prompt in prompts)
        ends = [self.text.find(end, at.stop) for end in self.family.ends]
        places = zip(ends, self.family.ends, strict=True)
        found = [(place, end) for place, end in places if place >= 0]
        if not found:
            assert stop == len(self.text)
            assert not self.is_closed
            assert len(self.ids) - 1 in self.learned
            return
        first, end = min(found)
        assert all(self.marks[start : first + len(end)])
        assert (
            stop == first + len(end)
            or not self.text[first + len(end) :].replace(self.family.eos, "").strip()
        )


def words_of(turn: dict[str, Any], family: Family) -> list[str]:
    """Return the words of a turn, in the order of the template."""
    if turn["role"] != "assistant":
        return [re.search(r"\w+(?=\?| there|\.)", turn["content"])[0]]  # type: ignore[index]
    calls = [call["function"]["arguments"]["city"] for call in turn.get("tool_calls", [])]
    calls = calls[:1] if family.several == "first" else calls
    text = re.findall(r"(?:is |I )(\w+)", turn["content"])
    thoughts = re.findall(r"I (\w+)", turn.get("reasoning_content", ""))
    return [*thoughts, *text, *calls]


@family
@pytest.mark.parametrize("title", CONVERSATIONS)
def test_each_turn_is_learned_where_the_conversation_has_it(name: str, title: str) -> None:
    turns = CONVERSATIONS[title]
    tools = TOOLS if any("tool_calls" in turn for turn in turns) else None
    family = FAMILIES[name]
    reason = "is rejected by" if tools and family.calls == "refused" else family.refused.get(title)
    if reason:
        with pytest.raises(ValueError, match=reason):
            Read(name, turns, tools)
        return
    read = Read(name, turns, tools)
    read.check_ids()
    seen: dict[str, int] = {}
    learned = 0
    for turn in turns:
        words = words_of(turn, family)
        place = seen.get(words[-1], 0)
        seen[words[-1]] = place + 1
        is_own = turn["role"] == "assistant"
        if not is_own or (turn.get("tool_calls") and family.calls == "ignored"):
            runs = (run for word in words for run in read.places(word))
            assert not any(read.marks[at] for run in runs for at in run)
            left_out = f"{turn['role']} turns that the template leaves out" in read.notes
            assert is_own or left_out or all(map(read.places, words))
            continue
        for word in words:
            assert all(all(read.marks[run.start : run.stop]) for run in read.places(word))
        assert read.places(words[-1])
        read.check_turn(words, place)
        learned += 1
    assert len([*read.runs()]) == learned
    if turns[-1]["role"] == "user":
        behind = read.places("bora")[-1].stop
        assert not any(read.marks[behind:])
        assert len(read.ids) - 1 not in read.learned or read.is_closed
    elif title == "thoughts":
        assert bool(read.places("ponder")) == (family.thoughts == "written")


@family
def test_the_ids_are_those_of_apply_chat_template(name: str) -> None:
    for title in ("single", "multi", "thoughts"):
        read = Read(name, CONVERSATIONS[title])
        ids = read.tokenizer.apply_chat_template(CONVERSATIONS[title])["input_ids"]
        assert read.ids[: len(ids)] == ids
        assert read.is_closed == FAMILIES[name].is_closed


@family
def test_the_last_turn_alone_is_learned(name: str) -> None:
    read = Read(name, CONVERSATIONS["multi"], learn="last")
    assert len([*read.runs()]) == 1
    read.check_turn(["coda"], 0)


@family
def test_what_a_template_leaves_out_is_counted(name: str) -> None:
    family = FAMILIES[name]
    read = Read(name, CONVERSATIONS["thoughts"])
    lost = 2 - sum(bool(read.places(word)) for word in ("muse", "ponder"))
    assert read.notes.count("assistant turns whose thoughts the template leaves out") == lost
    if family.calls == "refused" or "text beside a call" in family.refused:
        return
    read = Read(name, CONVERSATIONS["text beside a call"], TOOLS)
    kinds = beside(__file__, "families.toml")["kinds"]
    assert [note for note in read.notes if "calls" in note] == kinds[family.calls]


@family
def test_generation_stops_where_a_turn_ends(name: str) -> None:
    ids = SpecialIds.of(tokenizer_of(name)).in_place_of({"eos_token_id": None})["eos_token_id"]
    listed = ids if isinstance(ids, list) else [ids]
    for end in FAMILIES[name].stops:
        assert tokenizer_of(name).convert_tokens_to_ids(end) in listed
