"""The Plan: everything decided before a device is used, as frozen plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from harness.config.assignments import BY_RANKS, DECIDED
from harness.config.batch import BatchSizes, Curriculum
from harness.config.ds_json import DsJson, Event, value_of
from harness.config.optim_and_schedule import Schedule
from harness.config.run_config import RunConfig, known_keys
from harness.config.run_file import with_values
from harness.errors import Problems
from harness.estimate.hardware import Precision
from harness.estimate.step_time.calibration import Site
from harness.estimate.timeline import Estimate
from harness.layout.expert import ExpertPlan
from harness.layout.grid import Cutter, Grid, Place, Share
from harness.layout.recompute import REVERSIBLE, Checkpointing, loss_chunk
from harness.layout.shape import Shape
from harness.layout.stages import Bounds
from harness.layout.tensor import TensorPlan
from harness.layout.world import World

FLOATING = ("model.name", "model.kernels", "model.compile", "train.micro_batch")
"""Decided keys that are decided anew at each start."""
NOT_TRAINED = "not_trained"
"""Kind of the event that says why train.py would reject a plan made for its estimate."""


@dataclass(frozen=True)
class Counts:
    """Size of the data that a run trains on."""

    examples: int
    """Rows of the user's data: conversations, pairs or documents."""
    windows: int
    """Rows that steps read: windows of data.seq_len packed tokens, or examples (data.batching)."""
    is_masked: bool
    """True if prompts are masked from the loss."""
    most_windows: int | None = None
    """Maximum number of windows of a run, if the sources of a mixture run out; None: unlimited."""
    is_rough: bool = False
    """True if the data has not been tokenized yet."""


@dataclass(frozen=True)
class Facts:
    """What a plan depends on that only the data and the device tell (`make.with_facts`)."""

    counts: Counts | None = None
    ids: int = 0
    """Token ids of the tokenizer; pretrained weights with fewer vocabulary rows get new ones."""
    has_documents: bool = False
    """True if batches hold the starts of documents."""
    attention: tuple[str, str] | None = None
    """The implementation for "auto" and why, if the planned one fails on this device."""


@dataclass(frozen=True)
class Plan:
    """Everything decided before a device is used."""

    config: RunConfig
    """The run config, with values adopted from the JSON."""
    deepspeed: dict[str, Any]
    """The resolved JSON, for zero.Init and deepspeed.initialize. If the counted data changes the
    plan, plan/make.py resolves it again; only engine/swap.py (a folder on NVMe) changes it."""
    deepspeed_given: dict[str, Any]
    """The JSON as the user wrote it."""
    deepspeed_set: dict[str, Any]
    """Keys of deepspeed_given that `ds.key=value` set on the command line, with their values."""
    deepspeed_source: str
    world: World
    grid: Grid
    model_config: dict[str, Any]
    """Hugging Face config with the run config's changes: model.overrides, dropouts, model.context
    and model.reversible."""
    model_source: str
    """"preset NAME", or the path or hub id that the config came from."""
    shape: Shape | None
    """None for an architecture that the planner does not know."""
    precision: Precision
    zero_stage: int
    global_batch: int
    """Samples per optimizer step over all ranks."""
    micro_batch: int
    """Samples per rank and forward pass."""
    grad_accum: int
    """Micro-batches per optimizer step."""
    stages: tuple[int, ...] | None = None
    """Bounds of the pipeline stages over the model's units (layout/stages.py), or None."""
    divides_residuals: bool = False
    """True if tensor-parallel ranks divide the residual stream by tokens."""
    attention_why: str = ""
    """Reason for the choice of model.attention=auto; "" if the user chose."""
    site: Site | None = None
    """Rates from plan.rates for predicting the time of a step; None: built-in tables."""
    stored: dict[str, Any] = field(default_factory=dict)
    """vocab_size and quantization_config of model.init_from's files, if they differ from
    model_config."""
    events: tuple[Event, ...] = ()
    code: dict[str, Any] | None = None
    """The file of run.code: its path, sha256, and what it adds; None without one."""
    asked: RunConfig = field(default_factory=RunConfig)
    """The run config as the user wrote it."""
    estimate: Estimate | None = None
    """Memory estimate; None for an architecture that can be neither counted nor traced."""
    facts: Facts = field(default_factory=Facts)
    draft: Draft | None = field(default=None, repr=False, compare=False)
    """Both configs as this machine's files complete them: the plan's source if facts change."""

    @cached_property
    def share(self) -> Share:
        """This rank's share of tokens and weights, and its groups of ranks."""
        cutters: dict[Place, Cutter] = {}
        if self.grid.expert > 1:
            cutters["expert"] = ExpertPlan.of(self.model_config).cut
        if self.grid.tensor > 1:
            cutters["tensor"] = TensorPlan.of(self.model_config).cut
        return Share(self.grid, self.world.rank, cutters)

    @cached_property
    def loss_chunk(self) -> int:
        """Entries of a rank's vocabulary per chunk of logits in the loss; 0: all."""
        vocab_size, places = self.model_config.get("vocab_size") or 0, self.grid.tensor
        if places > 1 and TensorPlan.of(self.model_config).divides_vocabulary(places):
            vocab_size //= places
        tokens = self.micro_batch * self.seq_len // self.grid.sequence
        return loss_chunk(self.config.model.loss_chunk, vocab_size, tokens)

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that share the tokens of each row, a divisor of its length."""
        return self.grid.sequence * (self.grid.tensor if self.divides_residuals else 1)

    @property
    def settled(self) -> dict[str, Any]:
        """Keys that the user left open, with the values that were decided, for plan.json: they hold
        whenever the run goes on (plan/settled.py).
        """
        origins = {"train.global_batch": BY_RANKS, **self.config.origins()}  # other ranks round it
        decided = {key for key, origin in origins.items() if origin in DECIDED}
        decided.add("model.attention")  # the kernel stays, whoever chose it
        return {key: self.config.get(key) for key in sorted(decided.difference(FLOATING))}

    @property
    def checkpointing(self) -> Checkpointing:
        """Activation checkpointing of decoder layers; reversible layers have their own kind."""
        is_reversible = self.model_config.get(REVERSIBLE)
        return REVERSIBLE if is_reversible else self.config.model.checkpointing

    @property
    def products(self) -> Precision:
        """The precision of matrix products, which torch_autocast changes."""
        is_cast = value_of(self.deepspeed, "torch_autocast.enabled") is True
        return "bf16" if is_cast else self.precision

    @property
    def seq_len(self) -> int:
        """Tokens of a window (data.seq_len)."""
        return self.config.data.seq_len

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None with train.epochs, until the data is counted."""
        return self.config.train.num_steps(self.curriculum, self.seq_len)

    @cached_property
    def curriculum(self) -> Curriculum:
        """Batch size and sequence length over the run."""
        return self.config.curriculum

    def schedule(self, total_steps: int) -> Schedule:
        """Return the learning rate schedule of a run of `total_steps` optimizer steps."""
        return Schedule(self.config.optim, total_steps, self.config.own.given)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, for plan.json."""
        return {
            **{
                f.name: getattr(self, f.name)
                for f in fields(self)
                if f.name not in ("config", "asked", "shape", "facts", "draft")
            },
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "run": self.config.model_dump(mode="json"),
            "run_set": self.config.origins(),
            "settled": self.settled,
            "world": asdict(self.world),
            "site": None if self.site is None else asdict(self.site),
            "grid": {**asdict(self.grid), "data": self.grid.data},
            "steps": self.steps,
            "loss_chunk": self.loss_chunk,
            "events": list(self.events),
        }


@dataclass
class Draft:
    """Both configs and the world, with the results of the passes so far.

    A pass takes only the draft. It reports problems without repairing them, so that later passes
    can find more.
    """

    config: RunConfig
    ds: DsJson
    world: World
    estimating: bool = False
    """True if the plan is made only for its memory estimate."""
    here: bool = False
    """True if the plan is for this machine; its compilers, packages and data are then checked."""
    facts: Facts = field(default_factory=Facts)
    chosen: dict[str, Any] = field(default_factory=dict)
    """Values for keys that are open, by the estimates of a plan without them (plan/speed.py)."""
    precision: Precision = "fp32"
    grid: Grid = field(init=False)
    curriculum: Curriculum = field(init=False)
    batch: BatchSizes | None = None
    """None until a step's samples are divided, or if they do not divide."""
    model_config: dict[str, Any] = field(default_factory=dict)
    model_source: str = ""
    stored: dict[str, Any] = field(default_factory=dict)
    """As in Plan."""
    shape: Shape | None = None
    attention_why: str = ""
    """Reason for the choice of model.attention=auto; "" if the user chose."""
    stages: Bounds | None = None
    divides_residuals: bool = False
    site: Site | None = None
    events: list[Event] = field(default_factory=list)
    problems: Problems = field(init=False)

    def __post_init__(self) -> None:
        self.grid = Grid(self.world.world_size)
        self.curriculum = Curriculum(self.config.train.global_batch)
        self.problems = Problems(self._look_up)

    def decide(self, values: Mapping[str, Any], origin: str) -> None:
        """Set keys of the run config that the user left open. Raises ConfigError."""
        self.config = with_values(self.config, values, dict.fromkeys(values, origin))

    def note(self, kind: str, message: str) -> None:
        """Add an event."""
        self.events.append({"kind": kind, "message": message})

    def refuse_layout(self, key: str, why: str, use: str = "") -> None:
        """Add a problem of the layout; only an event if the plan is made for its estimate."""
        if self.estimating:
            self.note(NOT_TRAINED, self.problems.worded(key, why, use))
        else:
            self.problems.add(key, why, use)

    def origin(self, key: str) -> str:
        """Return the origin of a key, in either config."""
        return self._look_up(key)[1]

    def origins(self, keys: Iterable[str]) -> str:
        """Return the origins of some keys as text: "train.steps: run.toml, ..."."""
        return ", ".join(f"{key}: {self.origin(key)}" for key in keys)

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None with train.epochs, until the data is counted."""
        return self.config.train.num_steps(self.curriculum, self.config.data.seq_len)

    def _look_up(self, key: str) -> tuple[object, str]:
        if key in known_keys():
            return self.config.get(key), self.config.origin(key)
        return self.ds.look_up(key)
