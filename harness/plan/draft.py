"""The Draft: a plan being made, which passes once through all steps of plan/make.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from harness.config.batch import BatchSizes, Curriculum
from harness.config.ds_json import DsJson, Event
from harness.config.run_config import RunConfig, known_keys
from harness.errors import Problems
from harness.estimate.hardware import Precision
from harness.estimate.step_time.calibration import Site
from harness.layout.grid import Grid
from harness.layout.shape import Shape
from harness.layout.stages import Bounds
from harness.layout.world import World
from harness.plan.plan import NOT_TRAINED


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
    """True if the plan is for this machine, whose compilers are then checked."""
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
    site: Site | None = None
    events: list[Event] = field(default_factory=list)
    problems: Problems = field(init=False)

    def __post_init__(self) -> None:
        self.grid = Grid(self.world.world_size)
        self.curriculum = Curriculum(self.config.train.global_batch)
        self.problems = Problems(self._look_up)

    def note(self, kind: str, message: str) -> None:
        """Add an event."""
        self.events.append({"kind": kind, "message": message})

    def refuse_layout(self, key: str, why: str, use: str = "") -> None:
        """Add a problem of the layout; only an event if the plan is made for its estimate."""
        if self.estimating:
            self.note(NOT_TRAINED, self.problems.worded(key, why, use))
        else:
            self.problems.add(key, why, use)

    def asked(self, keys: Iterable[str]) -> str:
        """Return the origins of some keys as text: "train.steps: run.toml, ..."."""
        return ", ".join(f"{key}: {self._look_up(key)[1]}" for key in keys)

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None with train.epochs, until the data is counted."""
        return self.config.train.num_steps(self.curriculum, self.config.data.seq_len)

    def _look_up(self, key: str) -> tuple[object, str]:
        if key in known_keys():
            return self.config.get(key), self.config.origin(key)
        return self.ds.look_up(key)
