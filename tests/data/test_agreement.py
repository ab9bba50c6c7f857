"""A dry run rejects what the run rejects, in the same words, and nothing else."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config.run_file import load_run_config
from harness.data.build import build_data
from harness.data.glance import glances
from harness.data.spec import DataSpec
from harness.errors import ConfigError
from tests.data.batchings import PROPERTY
from tests.data.conftest import problems_of
from tests.tiers import rest_in_gate

_GOOD = ("the model reads a long question", "a word or two " * 9, "and answers it, in a word\n")
_TEXT = st.sampled_from([*4 * _GOOD, "", "\u00e9\0", None, 7, ["a", "word"]])


def _of(key: str, role: str, value: str) -> st.SearchStrategy[dict[str, Any]]:
    roles = st.sampled_from([("user", "assistant"), ("human", "gpt"), ("system", "tool"), ("", "")])
    turns = st.tuples(roles, _TEXT, _TEXT).map(
        lambda drawn: [
            {role: one, value: text} for one, text in zip(drawn[0], drawn[1:], strict=True)
        ]
    )
    return st.fixed_dictionaries({key: turns}, optional={"tools": st.just([])})


_RECORDS = (
    st.fixed_dictionaries({"text": _TEXT}, optional={"language": st.sampled_from(["de", "en"])}),
    _of("messages", "role", "content"),
    _of("conversations", "from", "value"),
    st.fixed_dictionaries({"prompt": _TEXT, "completion": _TEXT}),
    st.fixed_dictionaries({"instruction": _TEXT, "output": _TEXT}, optional={"input": _TEXT}),
    st.fixed_dictionaries({"content": _TEXT, "title": _TEXT}),
)


def _repeated(lines: list[str]) -> list[str]:
    return lines * (1 + 30 // len(lines))


_LINES = st.one_of(
    *(st.lists(record.map(json.dumps), min_size=2).map(_repeated) for record in _RECORDS),
    st.lists(st.one_of(*_RECORDS).map(json.dumps), max_size=6),
    st.lists(st.sampled_from(['{"text": "cut', "[]", "7", '{"text": 1}{', ""]), max_size=3),
)


def _or_none(*words: str) -> st.SearchStrategy[str]:
    return st.sampled_from([*[""] * 3 * len(words), *words])


_WORDS = st.tuples(
    st.sampled_from(["data.seq_len=16", "data.seq_len=32 data.held_out=0.5"]),
    _or_none("data.batching=padded", "data.packing=whole", "data.too_long=drop"),
    _or_none("data.min_tokens=4", "data.max_tokens=8", "train.carry_state=true"),
    _or_none("""data.columns='{text="content"}'""", "data.learn=all", "data.bos=off"),
    _or_none("data.bad_rows=skip", """data.where='{language="de"}'"""),
    _or_none("data.template=chatml", "data.template=mistral", "data.format=text"),
).map(" ".join)


@pytest.mark.parametrize("examples", rest_in_gate("data", [20, 400]))
def test_dry_run_and_run_agree(
    examples: int, tokenizer_dir: str, chatml_dir: str, folders: Iterator[Path]
) -> None:
    agreed = {"accepted": 0, "rejected": 0}

    @settings(PROPERTY, max_examples=examples)
    @given(lines=_LINES, words=_WORDS, tokenizer=st.sampled_from([tokenizer_dir, chatml_dir, ""]))
    def agree(lines: list[str], words: str, tokenizer: str) -> None:
        folder = next(folders)
        (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
        own = [f"data.path={folder}/rows.jsonl", *[f"data.tokenizer={tokenizer}"] * bool(tokenizer)]
        try:
            assignments = [*own, f"data.cache_dir={folder}/cache", *shlex.split(words)]
            run = load_run_config(None, assignments)
            spec = DataSpec.of_run(run, {})
        except ConfigError:  # keys that exclude each other
            return
        of_run = problems_of(build_data, spec)
        assert problems_of(glances, spec) == of_run
        agreed["rejected" if of_run else "accepted"] += 1

    agree()
    assert min(agreed.values()) >= examples / 20, agreed
