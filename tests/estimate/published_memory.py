"""Published runs, and what the estimator says of each."""

from __future__ import annotations

import json
import tempfile
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness.estimate.held import GIB, Held, Interval
from harness.estimate.rank_timeline import RankTimeline
from harness.estimate.reserved import WHOLE_MODEL
from harness.estimate.timeline import estimate_memory
from harness.layout.world import World
from harness.plan.command import Command, plan_from

Shows = Literal["allocated", "reserved", "driver"]
PUBLISHED = Path(__file__).parent / "published" / "memory.toml"
_PER_NODE = 8
_USERS_OWN = "PYTORCH_ALLOC_CONF=backend:native"  # then the harness sets nothing
_EXPANDING = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class Published:
    """A row of published.toml, which says what each key means."""

    name: str
    source: str
    gpu: str
    gpus: int
    settings: tuple[str, ...]
    ds: dict[str, Any]
    shows: Shows
    complete: bool
    gib: float | None = None
    ran: bool | None = None
    plain_allocator: bool = False
    starts_whole: bool = False
    foreach_adam: bool = False
    keeps_logits: bool = False
    lacks: tuple[str, ...] = ()
    doubt: str = ""
    but: str = ""


@dataclass(frozen=True)
class Card:
    """A published run and its estimate."""

    row: Published
    interval: Interval
    verdict: str

    @property
    def error(self) -> float | None:
        """Of the interval's middle, above 0 where too much was estimated."""
        return None if self.row.gib is None else self.interval.middle / GIB / self.row.gib - 1

    @property
    def is_above(self) -> bool:
        """True if more was published, its last digit rounded, than the interval allows for."""
        if self.row.gib is None:
            return False
        digits = len(str(self.row.gib).partition(".")[2])
        least = self.row.gib - (0.5 if self.row.gib == int(self.row.gib) else 0.5 * 0.1**digits)
        return least * GIB > self.interval.high

    @property
    def is_false_fit(self) -> bool:
        """True if it was said to fit and did not."""
        return self.row.ran is False and self.verdict == "fits"


def published(path: Path = PUBLISHED) -> list[Published]:
    """Return the rows of a file."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["run"]
    return [
        Published(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()})
        for row in rows
    ]


def carded(row: Published) -> Card:
    """Return the estimate beside a published run. Raises ConfigError if it cannot be planned."""
    world = World(
        world_size=row.gpus,
        local_world_size=min(row.gpus, _PER_NODE),
        accelerator="cuda",
        gpu=row.gpu,
        allocators=_USERS_OWN if row.plain_allocator else _EXPANDING,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds.json"
        path.write_text(json.dumps(row.ds))
        settings = list(row.settings)
        if not any(text.startswith("train.global_batch=") for text in settings):
            (size,) = (t for t in settings if t.startswith("train.micro_batch="))
            settings.append(f"train.global_batch={row.gpus * int(size.partition('=')[2])}")
        plan = plan_from(Command(path, assignments=tuple(settings)), world=world, estimating=True)
    assert plan.estimate is not None, f"{row.name}: not estimated"
    estimate = plan.estimate
    if row.foreach_adam:
        zero = replace(estimate.inputs.zero, torch_adam=True, fused_adam=False)
        estimate = estimate_memory(replace(estimate.inputs, zero=zero), estimate.device_bytes)
    rank = _as_published(row, estimate.worst)
    verdict = "unknown device"
    if estimate.device_bytes is not None:
        verdict = rank.verdict(estimate.device_bytes)
    low, high = _interval(row, rank)
    if row.ran is not False and estimate.device_bytes is not None:  # no device shows more
        high = max(low, min(high, estimate.device_bytes))
    return Card(row, Interval(low, high), verdict)


def _interval(row: Published, rank: RankTimeline) -> Interval:
    if row.shows == "allocated":
        return rank.allocated
    return rank.reserved if row.shows == "reserved" else rank.shown


def _as_published(row: Published, rank: RankTimeline) -> RankTimeline:
    """Return the rank with what the publishing run held besides, and without what it did not."""
    run = rank.inputs
    parts = [part for part in rank.parts if part.component not in row.lacks]
    # No evaluation, save or loading of the harness's.
    parts = [replace(p, phases=p.phases - {"evaluation", "save"}) for p in parts]
    if row.starts_whole:
        others = sum(p.bytes for p in parts if "build" in p.phases and p.place == "device")
        size = run.element_bytes * run.parameters - others
        parts.append(Held(WHOLE_MODEL, max(0, size), frozenset({"build"}), "read"))
    if row.keeps_logits:
        size = run.element_bytes * run.shape.vocab_size * run.tokens
        lives = frozenset({"loss", "backward_first", "backward_last"})
        parts.append(Held("logits kept by the caller", size, lives, "read"))
    return RankTimeline(rank.rank, run, tuple(parts))
