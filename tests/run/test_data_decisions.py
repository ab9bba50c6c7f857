"""Decisions about a run's data, once all ranks have read it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from harness.errors import ConfigError
from harness.plan.command import parse_command, plan_from
from harness.run.data_decisions import _require_same_data, require_same_settings
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


@ranks(2)
def test_ranks_that_were_started_with_other_settings_are_refused_on_all() -> None:
    rank = dist.get_rank()
    environ = {"DS_ACCELERATOR": "cpu", "RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}

    def plan(*words: str) -> Any:
        return plan_from(
            parse_command(["model.name=tiny", f"run.dir=runs/{rank}", *words]), environ
        )

    require_same_settings(plan("optim.lr=0.01"))
    for words in ([f"optim.lr=0.0{rank + 1}"], [f"ds.zero_optimization.stage={rank + 1}"]):
        key = words[0].partition("=")[0]
        with pytest.raises(ConfigError, match=f"rank 1 has other settings than rank 0: .*{key} is"):
            require_same_settings(plan(*words))
