"""Published GPU memory lies within the estimate's interval (docs/memory.md, pytest -s)."""

import statistics
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.ds_json import DsJson
from harness.config.run_file import load_run_config
from harness.estimate.activations import attention_copies
from harness.estimate.hardware import GPUS
from harness.estimate.memory_item import GIB, Interval, MemoryItem
from harness.estimate.reserved import WHOLE_MODEL
from harness.estimate.timeline import RankTimeline, Totals, estimate_memory
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from tests.estimate.runs import run_of

_FILE = Path(__file__).parent / "published" / "memory.toml"
ROWS: list[dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))["run"]
_PER_NODE = 8
_USERS_OWN = "PYTORCH_ALLOC_CONF=backend:native"  # then the harness sets nothing
_EXPANDING = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class Card:
    """A published run, a table of memory.toml, with its estimate."""

    row: dict[str, Any]
    interval: Interval
    verdict: str

    @property
    def error(self) -> float | None:
        """Relative error of the interval's middle, above 0 if too much was estimated."""
        return sum(self.interval) / 2 / GIB / self.row["gib"] - 1 if "gib" in self.row else None

    @property
    def is_above(self) -> bool:
        """True if the published number, rounded to its last digit, exceeds the interval."""
        if (gib := self.row.get("gib")) is None:
            return False
        digits = len(str(gib).partition(".")[2])
        least = gib - (0.5 if gib == int(gib) else 0.5 * 0.1**digits)
        return least * GIB > self.interval.high

    @property
    def is_false_fit(self) -> bool:
        """True if it was predicted to fit but did not."""
        return self.row.get("ran") is False and self.verdict == "fits"


def planned(row: dict[str, Any]) -> Plan:
    """Return the plan of a published run."""
    world = World(
        world_size=row["gpus"],
        local_world_size=min(row["gpus"], _PER_NODE),
        accelerator="cuda",
        gpu=row["gpu"],
        allocators=_EXPANDING if row.get("expandable") else _USERS_OWN,
    )
    settings = ["model.kernels=none", "model.compile=false", *row["settings"]]
    if not any(text.startswith("train.global_batch=") for text in settings):
        (size,) = (t for t in settings if t.startswith("train.micro_batch="))
        settings.append(f"train.global_batch={row['gpus'] * int(size.partition('=')[2])}")
    ds = DsJson(row["ds"], "published")
    return make_plan(load_run_config(None, settings), ds, world, estimating=True)


def carded(row: dict[str, Any]) -> Card:
    """Return a published run with its estimate."""
    estimate = planned(row).estimate
    assert estimate is not None, row["name"]
    if row.get("foreach_adam"):
        zero = replace(estimate.inputs.zero, torch_adam=True, fused_adam=False)
        estimate = estimate_memory(replace(estimate.inputs, zero=zero), estimate.device_bytes)
    rank, device = _as_published(row, estimate.worst), estimate.device_bytes
    low, high = _interval(row, rank)
    if device is None:
        return Card(row, Interval(low, high), "unknown device")
    if row.get("ran") is not False:  # no device can show more
        high = max(low, min(high, device))
    return Card(row, Interval(low, high), rank.verdict(device))


def _interval(row: dict[str, Any], rank: RankTimeline) -> Interval:
    if row["shows"] == "allocated":
        # A layer's backward pass may take half more temporaries than are counted.
        temporaries = (p.bytes for p in rank.parts if p.component == "backward temporaries")
        more = max(temporaries, default=0) // 2 + attention_copies(rank.inputs).bytes
        return Interval(rank.peak, rank.peak + more)
    return rank.reserved if row["shows"] == "reserved" else rank.shown


def _as_published(row: dict[str, Any], rank: RankTimeline) -> RankTimeline:
    """Return the rank with the published run's memory: more of one part, less of another."""
    run = rank.inputs
    parts = [part for part in rank.parts if part.component not in row.get("lacks", ())]
    # Without the harness's evaluation, save and loading.
    parts = [replace(p, phases=p.phases - {"evaluation", "save"}) for p in parts]
    if row.get("starts_whole"):
        others = sum(p.bytes for p in parts if "build" in p.phases and p.place == "device")
        size = run.element_bytes * run.parameters - others
        parts.append(MemoryItem(WHOLE_MODEL, max(0, size), frozenset({"build"}), "read"))
    if row.get("keeps_logits"):
        size = run.element_bytes * run.shape.vocab_size * run.tokens
        lives = frozenset({"loss", "backward_first", "backward_last"})
        parts.append(MemoryItem("logits kept by the caller", size, lives, "read"))
    return replace(rank, states=Totals(tuple(parts)), batch=Totals((), rank.batch.copies))


@pytest.fixture(scope="module")
def cards() -> list[Card]:
    return [carded(row) for row in ROWS]


def test_nothing_published_is_above_its_interval_or_wrongly_fits(cards: list[Card]) -> None:
    for card in cards:
        if not card.row.keys() & {"gib", "ran"}:
            continue
        row, (low, high) = card.row, card.interval
        figure = "ran" if row.get("ran") else "ran out"
        figure = f"{row['gib']} GiB {row['shows']}" if "gib" in row else figure
        doubt = f"  in doubt: {row['doubt']}" if "doubt" in row else ""
        interval = f"{low / GIB:.2f} to {high / GIB:.2f}"
        print(f"{row['name']}: {figure}, {interval}, {card.verdict}{doubt}")
    trusted = [card for card in cards if "doubt" not in card.row]
    assert not [card.row["name"] for card in trusted if card.is_false_fit]
    above = [card.row for card in trusted if card.is_above]
    assert above == [card.row for card in trusted if "above" in card.row]
    assert len(above) <= len(trusted) / 10
    errors = [abs(card.error) for card in trusted if card.error is not None]
    assert statistics.median(errors) <= 0.065
    assert max(errors) <= 0.18


def test_rows_are_told_apart_and_of_known_gpus() -> None:
    assert len({row["name"] for row in ROWS}) == len(ROWS)
    assert {row["gpu"] for row in ROWS} <= GPUS.keys()
    assert all(("gib" in row) + ("ran" in row) <= 1 for row in ROWS)
    assert all(row.keys() & {"gib", "ran", "seconds"} for row in ROWS)


def test_published_memory_check_notices_wrong_estimates() -> None:
    assert Card({"gib": 20.0}, Interval(0, int(19.4 * GIB)), "fits").is_above
    assert Card({"ran": False}, Interval(0, 0), "fits").is_false_fit


MIB = 2**20
NEOX = {"model_type": "gpt_neox", "vocab_size": 50_000, "hidden_size": 4096}
NEOX |= {"intermediate_size": 16_384, "num_hidden_layers": 32, "num_attention_heads": 32}
NEOX |= {"max_position_embeddings": 512, "tie_word_embeddings": False}
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


def test_published_zero_2_bucket_of_1e8_saves_its_double() -> None:
    """DeepSpeed#1302, indices 0 and 3: 21,152 and 19,625 MiB; the copy was not made then."""
    large, small = ({"overlap_comm": True, "reduce_bucket_size": n} for n in (500e6, 100e6))

    def saved(name: str) -> float:
        return component(name, **large) - component(name, **small)

    assert saved("gradient buckets") == pytest.approx(1527, rel=0.001)
    assert saved("communication copy") == pytest.approx(762.9, rel=0.001)


@pytest.mark.parametrize(
    ("half", "resident", "peak"), [(False, 25.74, 31.38), (True, 16.17, 18.93)]
)
def test_published_zero_3_on_four_gpus_by_dtype(half: bool, resident: float, peak: float) -> None:
    """DeepSpeedExamples, training/bf16_master_weight: 6.86B parameters, 512 tokens."""
    keys = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True} if half else {}
    run = run_of(NEOX, ranks=4, seq_len=512, checkpointing="full", stage=3, **keys)
    assert run.shape.parameters == pytest.approx(6.86e9, rel=0.001)
    worst = estimate_memory(run).worst
    parts = worst.phase("between_steps")
    states = ("parameters", "persistent parameters", "master", "moments", "gradients")
    assert sum(parts[name] for name in states) / GIB == pytest.approx(resident, rel=0.015)
    assert worst.total("between_steps") / GIB == pytest.approx(resident, rel=0.05)
    assert worst.peak / GIB == pytest.approx(peak, rel=0.1)
