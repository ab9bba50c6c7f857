"""deepspeed.initialize receives exactly the JSON of plan.json."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest

from harness.config.ds_file import read_ds_json
from tests.engine.engines import engine_of
from tests.ranks import ranks
from tests.shipped import DS_CONFIGS


@pytest.mark.parametrize(
    ("name", "keys", "optim"),
    [
        ("zero1", {}, {}),
        ("zero3", {"steps_per_print": 5}, {"name": "lion"}),
        ("zero1", {"pipeline": {"stages": 2}}, {"clip_value": 1.0}),
        ("fp16", {"scheduler": {"type": "WarmupLR"}}, {}),
    ],
)
@ranks(2)
def test_the_engine_changes_nothing_of_the_plans_json(
    name: str, keys: dict[str, Any], optim: dict[str, Any]
) -> None:
    import deepspeed

    received, initialize = [], deepspeed.initialize

    def spied(**arguments: Any) -> Any:
        received.append(json.dumps(arguments["config"]))  # DeepSpeed may change it
        return initialize(**arguments)

    ds = {**read_ds_json(DS_CONFIGS / f"{name}.json"), "bf16": {"enabled": False}, **keys}
    with mock.patch.object(deepspeed, "initialize", spied):
        engine = engine_of(ds, optim=optim)
    assert [json.loads(text) for text in received] == [engine.plan.to_json()["deepspeed"]]
    engine.close()
