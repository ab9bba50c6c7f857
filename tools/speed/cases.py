"""The timed cases: a base of key=value, swept over values, or made faster rung by rung."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

ALIASES = {"micro_batch": "train.micro_batch", "seq_len": "data.seq_len", "model": "model.name"}
"""Short names for --sweep."""
LADDER: dict[str, dict[str, str | None]] = {
    "eager": {"model.attention": "eager", "ds.optimizer.params.fused": "false"},
    "sdpa": {"model.attention": "sdpa"},
    "flash": {"model.attention": "flash_attention_2"},
    "fused optimizer": {"ds.optimizer.params.fused": None},
    "liger": {"model.kernels": "liger"},
    "compile": {"model.compile": "true"},
    "checkpointing": {"model.checkpointing": "full"},
}
"""Each on top of those before it that ran; None takes a key away."""


@dataclass(frozen=True)
class Case:
    """One way to train: a name, and what is set."""

    name: str
    settings: dict[str, str]

    def on_top(self, rung: str) -> Case:
        """The same with a rung of the ladder."""
        changes = LADDER[rung]
        kept = {key: value for key, value in self.settings.items() if key not in changes}
        return Case(rung, kept | {key: value for key, value in changes.items() if value})


def swept(base: dict[str, str], sweeps: Iterable[str]) -> Iterator[Case]:
    """Every combination of `key=v1,v2,...`; the base alone without any.

    Raises ValueError for a sweep without values.
    """
    axes = []
    for text in sweeps:
        key, _, values = text.partition("=")
        if not all(values.split(",")):
            raise ValueError(f"--sweep {text}: it must be KEY=VALUE,VALUE,...")
        axes.append([(ALIASES.get(key, key), value) for value in values.split(",")])
    for combination in itertools.product(*axes):
        name = " ".join(f"{key}={value}" for key, value in combination) or "base"
        yield Case(name, {**base, **dict(combination)})
