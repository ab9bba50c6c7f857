"""Records of preferences in the forms of public datasets."""

from typing import Any

import pytest

from harness.files.preferences import read_preference
from tests.tables import beside

TABLES = beside(__file__, "preferences.toml")


@pytest.mark.parametrize("case", TABLES["read"], ids=lambda case: case["name"])
def test_both_sides_follow_the_common_prompt(case: dict[str, Any]) -> None:
    pair, notes = read_preference(case["record"], case.get("columns", {}), "dpo")
    assert pair.rejected is not None
    for side, answer in zip((pair, pair.rejected), case["answers"], strict=True):
        *prompt, last = (message["content"] for message in side.messages)
        assert (prompt, last) == (case["prompt"], answer)
        assert side.learned() == [len(prompt)]
    assert sorted(name for _, name in notes) == sorted(case.get("notes", []))


@pytest.mark.parametrize("case", TABLES["refused"], ids=lambda case: case["problem"][:30])
def test_a_record_that_is_no_pair_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=case["problem"]):
        read_preference(case["record"], {}, "dpo")
