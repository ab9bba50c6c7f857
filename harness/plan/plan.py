"""The Plan: everything that is decided before a device is touched, as plain frozen data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal

from harness.config.curriculum import Curriculum
from harness.config.optim_and_schedule import Schedule
from harness.config.run_config import RunConfig
from harness.estimate.timeline import Estimate
from harness.layout.grid import Grid
from harness.layout.shape import Shape
from harness.layout.share import Share
from harness.layout.world import World

Event = dict[str, Any]
Precision = Literal["fp32", "bf16", "fp16"]

NOT_TRAINED = "not_trained"
"""Kind of the event with the reason why train.py would refuse a plan made for its estimate."""


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a device is touched."""

    config: RunConfig
    """The run config, with the values adopted from the JSON."""
    deepspeed: dict[str, Any]
    """The resolved JSON, passed unchanged to zero.Init and deepspeed.initialize."""
    deepspeed_given: dict[str, Any]
    """The JSON as the user wrote it."""
    deepspeed_source: str
    world: World
    grid: Grid
    model_config: dict[str, Any]
    """Hugging Face config, with model.overrides and model.dropout applied."""
    model_source: str
    """"preset NAME", or the path or hub id the config came from."""
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
    """Bounds of the pipeline stages over the model's units (layout/stages.py); None without."""
    events: tuple[Event, ...] = ()
    estimate: Estimate | None = None
    """Memory estimate; None for an architecture that the planner does not know."""

    @property
    def share(self) -> Share:
        """This rank's share of tokens and weights, and its groups of ranks."""
        return Share(self.grid, self.world.rank)

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None under train.epochs, until the data is counted."""
        return self.config.train.num_steps(self.curriculum, self.config.data.seq_len)

    @cached_property
    def curriculum(self) -> Curriculum:
        """Batch size and sequence length over the run."""
        return self.config.curriculum

    def schedule(self, total_steps: int) -> Schedule:
        """Return the learning rate over a run of `total_steps` optimizer steps."""
        return Schedule(self.config.optim, total_steps)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, for plan.json."""
        return {
            **{
                f.name: getattr(self, f.name)
                for f in fields(self)
                if f.name not in ("config", "shape")
            },
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "run": self.config.model_dump(mode="json"),
            "run_set": self.config.origins(),
            "world": asdict(self.world),
            "grid": {**asdict(self.grid), "data": self.grid.data},
            "steps": self.steps,
            "events": list(self.events),
        }
