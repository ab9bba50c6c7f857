"""Messages of a run about its data before it begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.run.settle_data import _vocabulary


def said(source: str, tokenizer: str | None, used: int = 8192) -> list[dict[str, Any]]:
    config = SimpleNamespace(
        model=SimpleNamespace(init_from=source), data=SimpleNamespace(tokenizer=tokenizer)
    )
    plan: Any = SimpleNamespace(config=config, model_config={"vocab_size": 50_257})
    data: Any = SimpleNamespace(vocab_size=used)
    return _vocabulary(plan, data)


@pytest.mark.parametrize("source", ["export", "run", "owner/model", "bare"])
def test_unused_rows_name_the_tokenizer_that_fits(tmp_path: Path, source: str) -> None:
    own = source if source == "owner/model" else str(tmp_path / source)
    if source in ("export", "bare"):
        Path(own).mkdir()
    if source == "export":
        (tmp_path / "export" / "tokenizer.json").write_text("{}")
    if source == "run":  # as its run folder has it
        fits = tmp_path / "run" / "tokenizer"
        fits.mkdir(parents=True)
        (fits / "tokenizer.json").write_text("{}")
    else:
        fits = Path(own)
    (event,) = said(own, "other")
    message = event["message"]
    assert event["kind"] == "unused_rows"
    assert message.startswith("8,192 of 50,257 rows of the vocabulary are used: data.tokenizer is ")
    if source == "bare":
        assert f"{own}, which brought the weights, has none: set data.tokenizer to" in message
    else:
        assert f"set data.tokenizer={fits}, or leave the key away" in message
    assert "has no larger one: no text uses the other rows" in said(own, None)[0]["message"]
    assert said(own, "other", used=50_000) == []
