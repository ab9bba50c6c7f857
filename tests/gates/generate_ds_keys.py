"""Write harness/config/ds_keys.json: the keys of a DeepSpeed JSON, each with type and default.

Taken from the installed DeepSpeed's own config models and parsers, so that the floors below the
engine know its keys without importing it. Run again after a DeepSpeed upgrade:

    python -m tests.gates.generate_ds_keys

A section is {"keys": {...}}, with "free": true where any further key is taken. A key is
{"type": [JSON types], "default": ...} with, where DeepSpeed states them, "choices", "minimum",
"above" and "maximum". A number that DeepSpeed does not bound is at least 0, unless its default is
negative itself. Other keys are {"same_as": another name of the key}, {"replaced_by": the key in its
place, "becomes": what true is there} for what is deprecated, and {"removed": DeepSpeed's message}.

"defaults" holds what DeepSpeed takes for parameters that an optimizer or a scheduler section lacks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # some defaults depend on it, and it is quieter

import deepspeed
from deepspeed.runtime.config import (
    _REMOVED_TOP_LEVEL_CONFIG_KEYS,
    _REMOVED_ZERO_CONFIG_KEYS,
    DeepSpeedConfig,
)

from harness.launch.ranks import REPOSITORY
from tests.gates.ds_keys.by_hand import READ_ELSEWHERE
from tests.gates.ds_keys.defaults import optimizer_defaults, scheduler_defaults
from tests.gates.ds_keys.nodes import Node, leaf
from tests.gates.ds_keys.sections import Recorder, all_sections

OUTPUT = REPOSITORY / "harness" / "config" / "ds_keys.json"


def build_keys() -> Node:
    """The whole table, nested as the JSON is."""
    top = Recorder()
    DeepSpeedConfig._initialize_params(object.__new__(DeepSpeedConfig), top)
    sections = all_sections()
    keys: Node = {}
    for key, default in sorted({**top.asked, **READ_ELSEWHERE, **sections}.items()):
        keys[key] = sections.get(key) or leaf(key, default)
    keys["bfloat16"] = {"same_as": "bf16"}
    keys |= _removed(_REMOVED_TOP_LEVEL_CONFIG_KEYS)
    keys["zero_optimization"]["keys"] |= _removed(_REMOVED_ZERO_CONFIG_KEYS)
    defaults = {"optimizer": optimizer_defaults(), "scheduler": scheduler_defaults()}
    return {"deepspeed": deepspeed.__version__, "keys": keys, "defaults": defaults}


def _removed(messages: Mapping[str, str]) -> Node:
    """The keys that DeepSpeed refuses by name, with its message but for the link."""
    link = re.compile(r"\s*See https\S+\s*$")
    return {key: {"removed": link.sub("", text).strip()} for key, text in messages.items()}


def as_text() -> str:
    """The exact content of ds_keys.json."""
    return json.dumps(build_keys(), indent=1) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(as_text(), encoding="utf-8")
    print(f"wrote {OUTPUT}")
