"""Decisions about a run's data, once all ranks have read it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from harness.errors import ConfigError
from harness.run.data_decisions import _require_same_data
from tests.ranks import ranks


def data_of(*sources: tuple[str, str | None]) -> Any:
    """Return data of sources with these fingerprints and dates."""
    made = [SimpleNamespace(facts=SimpleNamespace(fingerprint=f), day=day) for f, day in sources]
    return SimpleNamespace(sources=made, set_sources=())


@ranks(2)
def test_ranks_that_read_other_token_ids_are_refused_on_all() -> None:
    rank = dist.get_rank()
    day = f"2026-01-3{rank}"
    _require_same_data(rank, data_of(("ids", None), ("more", day)))  # of the same ids
    with pytest.raises(ConfigError, match="rank 1 has other token ids than rank 0: documents or"):
        _require_same_data(rank, data_of(("ids", None), (f"more{rank}", "2026-01-31")))
    with pytest.raises(ConfigError) as caught:
        _require_same_data(rank, data_of(("ids", None), (f"more{rank}", day)))
    assert caught.value.problems == [
        "rank 1 has other token ids than rank 0: its chat template writes the date 2026-01-31, "
        "that of rank 0 2026-01-30: start again, or set data.date=2026-01-30"
    ]
