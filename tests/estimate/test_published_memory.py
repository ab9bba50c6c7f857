"""Published GPU memory lies within the estimate's interval, and published differences are close to
the estimated ones (docs/memory.md). pytest -s shows each run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from harness.estimate.activations import attention_copies
from harness.estimate.hardware import GPUS
from harness.estimate.memory_item import GIB, Interval, MemoryItem
from harness.estimate.rank_timeline import RankTimeline
from harness.estimate.reserved import WHOLE_MODEL
from harness.estimate.timeline import estimate_memory
from harness.layout.world import World
from harness.plan.command import Command, plan_from
from tests.estimate.runs import run_of

Shows = Literal["allocated", "reserved", "driver"]
PUBLISHED = Path(__file__).parent / "published" / "memory.toml"
_PER_NODE = 8
_USERS_OWN = "PYTORCH_ALLOC_CONF=backend:native"  # then the harness sets nothing
_EXPANDING = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class Published:
    """A row of published.toml, which explains each key."""

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
    """A published run with its estimate."""

    row: Published
    interval: Interval
    verdict: str

    @property
    def error(self) -> float | None:
        """Relative error of the interval's middle, above 0 if too much was estimated."""
        middle = sum(self.interval) / 2
        return None if self.row.gib is None else middle / GIB / self.row.gib - 1

    @property
    def is_above(self) -> bool:
        """True if the published number, rounded to its last digit, exceeds the interval."""
        if self.row.gib is None:
            return False
        digits = len(str(self.row.gib).partition(".")[2])
        least = self.row.gib - (0.5 if self.row.gib == int(self.row.gib) else 0.5 * 0.1**digits)
        return least * GIB > self.interval.high

    @property
    def is_false_fit(self) -> bool:
        """True if it was predicted to fit but did not."""
        return self.row.ran is False and self.verdict == "fits"


def published(path: Path = PUBLISHED) -> list[Published]:
    """Return the rows of a file."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["run"]
    return [
        Published(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()})
        for row in rows
    ]


def carded(row: Published) -> Card:
    """Return a published run with its estimate. Raises ConfigError if it cannot be planned."""
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
    if row.ran is not False and estimate.device_bytes is not None:  # no device can show more
        high = max(low, min(high, estimate.device_bytes))
    return Card(row, Interval(low, high), verdict)


def _interval(row: Published, rank: RankTimeline) -> Interval:
    if row.shows == "allocated":
        # A layer's backward pass may take half more temporaries than are counted.
        temporaries = (p.bytes for p in rank.parts if p.component == "backward temporaries")
        more = max(temporaries, default=0) // 2 + attention_copies(rank.inputs).bytes
        return Interval(rank.peak, rank.peak + more)
    return rank.reserved if row.shows == "reserved" else rank.shown


def _as_published(row: Published, rank: RankTimeline) -> RankTimeline:
    """Return the rank with the additional memory of the published run, and without what that run
    lacked.
    """
    run = rank.inputs
    parts = [part for part in rank.parts if part.component not in row.lacks]
    # Without the harness's evaluation, save and loading.
    parts = [replace(p, phases=p.phases - {"evaluation", "save"}) for p in parts]
    if row.starts_whole:
        others = sum(p.bytes for p in parts if "build" in p.phases and p.place == "device")
        size = run.element_bytes * run.parameters - others
        parts.append(MemoryItem(WHOLE_MODEL, max(0, size), frozenset({"build"}), "read"))
    if row.keeps_logits:
        size = run.element_bytes * run.shape.vocab_size * run.tokens
        lives = frozenset({"loss", "backward_first", "backward_last"})
        parts.append(MemoryItem("logits kept by the caller", size, lives, "read"))
    return RankTimeline(rank.rank, run, tuple(parts))


@pytest.fixture(scope="module")
def cards() -> list[Card]:
    return [carded(row) for row in published()]


def test_nothing_published_is_above_its_interval_or_wrongly_fits(cards: list[Card]) -> None:
    for card in cards:
        row, (low, high) = card.row, card.interval
        figure = f"{row.gib} GiB {row.shows}" if row.gib else ("ran" if row.ran else "ran out")
        doubt = f"  in doubt: {row.doubt}" if row.doubt else ""
        print(f"{row.name}: {figure}, {low / GIB:.2f} to {high / GIB:.2f}, {card.verdict}{doubt}")
    trusted = [card for card in cards if not card.row.doubt]
    assert not [card.row.name for card in trusted if card.is_above or card.is_false_fit]
    errors = [abs(card.error) for card in trusted if card.error is not None]
    assert statistics.median(errors) <= 0.05
    assert max(errors) <= 0.18


def test_rows_are_told_apart_and_of_known_gpus() -> None:
    rows = published()
    assert len({row.name for row in rows}) == len(rows)
    assert {row.gpu for row in rows} <= GPUS.keys()
    assert all((row.gib is None) != (row.ran is None) for row in rows)


def test_what_is_wrong_is_noticed(cards: list[Card]) -> None:
    good = next(card for card in cards if card.row.gib and not card.row.doubt)
    assert good.row.gib
    low = replace(good, interval=Interval(0, int((good.row.gib - 0.1) * GIB)))
    assert low.is_above
    out = replace(good, row=replace(good.row, gib=None, ran=False), verdict="fits")
    assert out.is_false_fit


MIB = 2**20
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 50_000,
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""Layers of 12 h^2 weights between two vocabulary matrices: 6.86B parameters."""


def component(name: str, **keys: object) -> float:
    """Return the MiB of a component in the backward pass of ZeRO 2 on eight ranks."""
    run = run_of("llama-1b", ranks=8, seq_len=512, checkpointing="full", stage=2, **keys)
    worst = estimate_memory(run).worst
    return worst.phase("backward_first")[name] / MIB


def test_zero_2_without_overlap_saves_a_bucket() -> None:
    """DeepSpeed#1302, indices 0 and 2: 21,152 and 20,198 MiB."""
    name = "gradient buckets"
    saved = component(name, overlap_comm=True) - component(name, overlap_comm=False)
    assert saved == pytest.approx(954, rel=0.001)


def test_zero_2_with_a_bucket_of_1e8_saves_two_times_what_it_is_smaller() -> None:
    """DeepSpeed#1302, indices 0 and 3: 21,152 and 19,625 MiB. The copy that is reduced also
    shrinks; DeepSpeed did not make it at that time.
    """
    large, small = ({"overlap_comm": True, "reduce_bucket_size": n} for n in (500e6, 100e6))

    def saved(name: str) -> float:
        return component(name, **large) - component(name, **small)

    assert saved("gradient buckets") == pytest.approx(1527, rel=0.001)
    assert saved("communication copy") == pytest.approx(762.9, rel=0.001)


@pytest.mark.parametrize(
    ("half", "resident", "peak"), [(False, 25.74, 31.38), (True, 16.17, 18.93)]
)
def test_zero_3_on_four_gpus_with_fp32_and_with_16_bit_master_weights(
    half: bool, resident: float, peak: float
) -> None:
    """DeepSpeedExamples, training/bf16_master_weight: 6.86B parameters, one sample of 512 tokens,
    checkpointing.
    """
    keys = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True} if half else {}
    run = run_of(NEOX, ranks=4, seq_len=512, checkpointing="full", stage=3, **keys)
    assert run.shape.parameters == pytest.approx(6.86e9, rel=0.001)
    worst = estimate_memory(run).worst
    parts = worst.phase("between_steps")
    states = ("parameters", "persistent parameters", "master", "moments", "gradients")
    assert sum(parts[name] for name in states) / GIB == pytest.approx(resident, rel=0.015)
    assert worst.total("between_steps") / GIB == pytest.approx(resident, rel=0.05)
    assert worst.peak / GIB == pytest.approx(peak, rel=0.1)
