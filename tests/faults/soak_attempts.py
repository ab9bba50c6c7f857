"""The attempts of the soak: layout, kind of interruption and moment, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# (JSON, ranks): number of ranks, ZeRO stage, offload and pipeline split all change.
LAYOUTS = [
    *(("zero0", 2), ("zero1", 1), ("zero1", 2), ("zero1", 4), ("zero2", 2), ("zero3", 2)),
    *(("zero3", 4), ("zero2_offload", 2), ("zero3_offload", 2), ("pipeline2", 2)),
    *(("pipeline2", 4), ("pipeline4", 4)),
]
REFERENCE = "zero1 x2"
REPEATED = 0.25
# A step that is skipped is another curve: the first one ends the attempt. Rate and epsilon are such
# that rounding stays rounding: with 3e-3 and 1e-8 Adam makes steps of it, and layouts are 1e-3
# apart after 100 steps; so, 1e-7 after 200.
WORDS = (
    *("optim.lr=1e-3", "optim.eps=1e-6"),
    *("optim.schedule=constant", "model.dropout=0.0", "ds.bf16.enabled=false"),
    *("model.overrides.num_hidden_layers=4", "guard.max_bad_steps=1"),
)
PLACES = {  # how often a place is passed between two saves, at most
    "in a step": 5,
    "in an evaluation": 2,
    "before a save": 2,
    "inside a file": 3,
    "after a file": 3,
    "before the manifest": 2,
    "before the rename": 2,
    "after the rename": 2,
    "before the pointer": 2,
    "before retention": 2,
    "recording a save": 2,
    "a line of metrics": 4,
    "any moment": 1500,  # milliseconds
}
ON_EVERY_RANK = ("in a step", "in an evaluation", "inside a file", "after a file", "any moment")
STARTS = {  # -> on which ranks; a run that ended there took no step
    **dict.fromkeys(("before the data", "before joining", "before the engine"), "any"),
    **dict.fromkeys(("before the folder", "before the plan"), "first"),
}
HANGS = ("guard.hang_floor_s=6", "guard.hang_factor=10", "guard.hang_first_s=60")
KINDS = {  # how often each is drawn
    "kill": 8,
    "term": 3,
    "usr1": 2,
    "hup": 2,
    "int": 1,
    "starting": 2,
    "raise": 2,
    "full disk": 3,
    "damage": 4,
    "nan": 3,
    "hang": 1,
}
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "a flipped bit": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "a cut file": lambda data: data[: len(data) // 2],
    "an empty file": lambda data: b"",
    "a lost file": lambda data: None,
}


@dataclass(frozen=True)
class Attempt:
    """One start of the run, and how it is interrupted."""

    number: int
    json: str
    ranks: int
    kind: str
    fault: dict[str, Any]
    damage: str | None
    """Damage done before to a file of the newest checkpoint."""

    @property
    def layout(self) -> str:
        """As the tables call it."""
        return f"{self.json} x{self.ranks}"

    @property
    def expected(self) -> list[set[int | None]]:
        """The exit codes that each rank may have."""
        if self.fault.get("do") == "kill":
            return [{-9} if rank == self.fault["rank"] else {1} for rank in range(self.ranks)]
        codes: dict[str, set[int | None]] = {
            "raise": {1, 74},  # 74 where it was raised within a save
            "full disk": {74},
            "nan": {76},
            "hang": {78},
        }
        return [codes.get(self.kind, {75})] * self.ranks


def drawn(seed: int, number: int, disk: Path | None) -> Attempt:
    """Attempt `number` of the story; `disk`: a file system to be filled, where there is one."""
    draw = random.Random(f"{seed}:{number}")
    # Now and then that of the attempt before, as after most interruptions elsewhere.
    whose = number - (draw.random() < REPEATED)
    json_name, ranks = random.Random(f"{seed}:{whose}:layout").choice(LAYOUTS)
    kinds = {kind: often for kind, often in KINDS.items() if disk or kind != "full disk"}
    (kind,) = draw.choices(list(kinds), list(kinds.values()))
    place = draw.choice(list(PLACES))
    if kind == "raise" and place == "any moment":  # a thread's, which ends that thread alone
        place = "in a step"
    rank = draw.randrange(ranks)
    fault: dict[str, Any] = {"at": place, "nth": draw.randint(1, PLACES[place]), "do": kind}
    fault["rank"] = rank if place in ON_EVERY_RANK else 0
    damage = None
    if kind == "damage":
        fault["do"], damage = "kill", draw.choice(list(DAMAGES))
    elif kind == "starting":
        fault |= {"at": draw.choice(list(STARTS)), "nth": 1}
        fault |= {"do": draw.choice(["term", "usr1", "hup", "int"])}
        if fault["do"] == "term" and fault["at"] in ("before the data", "before joining"):
            fault["do"] = "int"  # asked twice, a rank that has not met the others ends alone
        fault["rank"] = rank if STARTS[fault["at"]] == "any" else 0
    elif kind == "nan":
        fault = {"spoil": {"nan": draw.randint(1, 5)}}
    elif kind == "hang":
        fault = {"at": "in a step", "nth": draw.randint(5, 8), "do": "sleep", "seconds": 1000}
        fault["rank"] = rank
    elif kind == "full disk":
        fault = {"at": "after the room was checked", "nth": draw.randint(1, 3), "do": "fill"}
        fault |= {"rank": rank, "mount": str(disk)}
    return Attempt(number, json_name, ranks, kind, fault, damage)
