"""One rank of a run under the simulator: the real loop, on a device that has streams.

`main` takes a file that `Job.write` made; each rank writes its Seen to OUT.RANK.json.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gates.streams.cells import DISCARDED


@dataclass(frozen=True)
class Job:
    """One run."""

    arguments: list[str]
    """Of train.py."""
    measured: int
    """Step of which waits are counted."""
    discards: bool
    synchronizes: bool
    """False if nobody waits for the whole device, nor for its gradients (gradients.py)."""
    out: str

    def write(self) -> Path:
        """Write it where the ranks read it."""
        path = Path(f"{self.out}.job.json")
        path.write_text(json.dumps(asdict(self)))
        return path


@dataclass(frozen=True)
class Wait:
    """Waits of the host in one step, at one line."""

    phase: str
    """data, micro-batches, step, log or verdict."""
    place: str
    kind: str
    count: int


@dataclass(frozen=True)
class Seen:
    """Observations of a rank's run."""

    races: dict[str, int]
    reuses: dict[str, int]
    waits: list[Wait]
    micro_batches: int
    optimizer: str

    @classmethod
    def read(cls, path: Path) -> Seen:
        """Read what a rank wrote."""
        values = json.loads(path.read_text())
        return cls(**{**values, "waits": [Wait(**wait) for wait in values["waits"]]})


def main(argv: list[str]) -> int:
    """Train under the simulator; return the run's exit code."""
    job = Job(**json.loads(Path(argv[0]).read_text()))
    from harness import loop, train
    from harness.engine.deepspeed_0_19 import gradients
    from harness.engine.pipeline import PipelineEngine
    from harness.engine.zero import ZeroEngine
    from harness.guard.judge import Spike
    from harness.run import build, reporting, step
    from tests.gates.streams.simulated import Device, simulated

    devices: list[Device] = []
    waits: list[Counter[tuple[str, str, str]]] = []
    micro_batches: list[int] = []
    optimizers: list[str] = []

    def joined(*args: Any) -> Any:
        place = join(*args)
        devices.append(stack.enter_context(simulated(job.synchronizes)))
        return place

    def next_step(run: Any) -> Any:
        seen, number = devices[0].timeline.waits, run.state.step + 1
        if number == job.measured:
            seen.clear()
        elif number == job.measured + 1:
            waits.append(Counter(seen))
        with devices[0].timeline.during("data"):
            step = taken(run)
        for batch in step.batches:  # as the thread that reads ahead does for a GPU
            for tensor in (
                *(batch.input_ids, batch.labels, batch.position_ids),
                batch.bounds.places,
            ):
                if tensor is not None:
                    devices[0].pin(tensor)
        micro_batches.append(len(step.batches))
        optimizers.append(type(run.engine.engine.optimizer).__name__)
        return step

    def judged(run: Any, number: int, *args: Any) -> Any:
        spike = look(run, number, *args)
        return Spike("loss", 1.0, 0.0, 0.1) if number == DISCARDED and job.discards else spike

    join, taken, look = build.join, loop.next_step, step.look_for_spike
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(build, "join", joined))
        stack.enter_context(mock.patch.object(loop, "next_step", next_step))
        stack.enter_context(mock.patch.object(step, "look_for_spike", judged))
        if not job.synchronizes:
            stack.enter_context(mock.patch.object(gradients, "settle_gradients"))
        for owner, name, phase in (
            (loop, "take_step", "step"),
            (ZeroEngine, "accumulate", "micro-batches"),
            (PipelineEngine, "accumulate", "micro-batches"),
            (loop, "log_or_evaluate", "log"),
            (reporting, "evaluated", "evaluation"),
            (loop, "ask", "verdict"),
            (loop, "save_if_due", "save"),
        ):
            stack.enter_context(_during(devices, owner, name, phase))
        code = train.main(job.arguments)
    if code == 0:
        memory = devices[0].memory
        host_waits = [Wait(*of, count) for of, count in sorted(waits[0].items())]
        seen = Seen(
            dict(memory.races), dict(memory.reuses), host_waits, micro_batches[-1], optimizers[-1]
        )
        Path(f"{job.out}.{os.environ['RANK']}.json").write_text(json.dumps(asdict(seen)))
    return code


@contextlib.contextmanager
def _during(devices: list[Any], owner: Any, name: str, phase: str) -> Iterator[None]:
    """Within this, waits in a function of the harness count to a phase."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with devices[0].timeline.during(phase):
            return original(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield
