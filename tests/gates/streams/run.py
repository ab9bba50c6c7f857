"""Runs the real loop on a device with streams, and states the conditions that it must meet.

`main` is one rank: it reads a file written by `Job.write`, and writes its Seen to OUT.RANK.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from harness.launch.fork_server import Zygote
from harness.plan.machine import libaio_problems
from tests.gates.models import LEARNED
from tests.gates.streams.cells import BETWEEN_STEPS, DISCARDED, MEASURED, STEPS, Cell
from tests.tables import beside

HOT = ("data", "micro-batches", "step", "log", "verdict")  # the phases of every step
# Waits of the harness other than for the log line: (phase, file) -> why the step needs it.
DECIDES = {(phase, file): why for phase, file, why in beside(__file__, "waits.toml")["decides"]}
LOGS = ("log", "harness/run/meter.py")  # once for each line of metrics


@dataclass(frozen=True)
class Job:
    """One run."""

    arguments: list[str]
    """Arguments of train.py."""
    measured: int
    """The step whose waits are counted."""
    discards: bool
    defect: str | None
    out: str

    def write(self) -> Path:
        """Write the job to the file that the ranks read."""
        path = Path(f"{self.out}.job.json")
        path.write_text(json.dumps(asdict(self)))
        return path


@dataclass(frozen=True)
class Wait:
    """The host's waits in one step at one line."""

    phase: str
    """One of data, micro-batches, step, log and verdict."""
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
    kernels: dict[str, int]
    """Kernels of a step, by phase, without the model's."""
    moved: dict[str, float]
    """Bytes that they read and write, per element of Adam's first moment, by phase."""

    @classmethod
    def read(cls, path: Path) -> Seen:
        """Return the observations that a rank wrote."""
        values = json.loads(path.read_text())
        return cls(**{**values, "waits": [Wait(**wait) for wait in values["waits"]]})


@dataclass(frozen=True)
class Row:
    """A cell with its ranks' observations."""

    cell: Cell
    ranks: list[Seen] = field(default_factory=list)
    skipped: str = ""
    """The reason why this machine cannot run it."""
    failure: str = ""
    """How the run failed."""

    @property
    def races(self) -> Counter[str]:
        """Conflicting accesses without an order, over all ranks, by their two places."""
        return sum((Counter(seen.races) for seen in self.ranks), Counter())

    @property
    def reuses(self) -> Counter[str]:
        """Blocks that another stream could still use when they were freed, by two places."""
        return sum((Counter(seen.reuses) for seen in self.ranks), Counter())

    @property
    def problems(self) -> list[str]:
        """The conditions that are violated."""
        problems = [self.failure] if self.failure else []
        problems += [f"race: {race}" for race in self.races]
        problems += [f"reused too early: {reuse}" for reuse in self.reuses]
        problems += [text for seen in self.ranks for text in _own_waits(seen.waits)]
        if self.cell in BETWEEN_STEPS:
            most = max((between(seen.moved) for seen in self.ranks), default=0)
            problems += [f"a step moves {most:.1f} bytes per parameter"] * (most > MOST_MOVED)
        return sorted(set(problems))


MOST_MOVED = 45.0
"""Bytes per parameter that the kernels between two steps may move: 1.5 times what is needed."""


def between(counts: Mapping[str, float]) -> float:
    """Return what is counted outside micro-batches and saves."""
    return sum(counts.get(phase, 0) for phase in HOT if phase != "micro-batches")


def hot(waits: Iterable[Wait], *phases: str) -> list[Wait]:
    """Return the waits in these phases of a step, or in all of them."""
    return [wait for wait in waits if wait.phase in (phases or HOT)]


def _own_waits(waits: list[Wait]) -> list[str]:
    """Return the harness's unnecessary waits in a step."""
    own = [wait for wait in hot(waits) if wait.place.startswith("harness/")]
    counts: Counter[tuple[str, str]] = Counter()
    for wait in own:
        counts[wait.phase, wait.place.partition(":")[0]] += wait.count
    return [
        f"the harness waits {count} times in {phase}: {file}"
        for (phase, file), count in counts.items()
        if not ((phase, file) in DECIDES and phase == "micro-batches")
        and count > ((phase, file) in (*DECIDES, LOGS))
    ]


LIMIT_S = 1800.0
VOCAB_SIZE = 512
_WORDS = "the model reads a text and learns which word follows another".split()  # noqa: SIM905


def prepare(folder: Path) -> None:
    """Write the models and the text that all cells read."""
    for name in ("llama", "mixtral"):
        (folder / name).mkdir(exist_ok=True)
        config = {**LEARNED[name], "vocab_size": VOCAB_SIZE}
        (folder / name / "config.json").write_text(json.dumps(config))
    draw = random.Random(0)
    texts = [" ".join(draw.choices(_WORDS, k=draw.randrange(5, 60))) for _ in range(400)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    _write_weights(folder / "llama", folder / "llama_weights", folder / "text.jsonl")


def _write_weights(model: Path, folder: Path, corpus: Path) -> None:
    """Write a model with weights and a tokenizer, for which adapters are trained."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from harness.data.tokenizer import train_tokenizer
    from harness.files.corpus import find_corpus

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    made.to(torch.bfloat16).save_pretrained(folder)
    train_tokenizer([find_corpus(str(corpus))], folder, VOCAB_SIZE)


def row_of(zygote: Zygote, cell: Cell, folder: Path, defect: str | None = None) -> Row:
    """Run a cell, maybe with a defect, unless `folder` has it or this machine cannot."""
    if cell.needs_libaio and (problems := libaio_problems()):
        return Row(cell, skipped="; ".join(problems))
    out = folder / f"{cell.name}{'-control' if defect else ''}"
    results = [Path(f"{out}.{rank}.json") for rank in range(cell.ranks)]
    if all(path.exists() for path in results):
        return Row(cell, [Seen.read(path) for path in results])
    run_dir = f"run.dir={out}-run"
    shutil.rmtree(f"{out}-run", ignore_errors=True)  # left by a run that was ended
    # Twice the steps, so that the measured step has the same position between saves, evaluations
    # and checks.
    for before in (0, STEPS) if cell.resumes else (0,):
        arguments = [*cell.command(folder, before + STEPS), run_dir]
        measured = before + MEASURED
        job = Job(arguments, measured, cell.discards, defect, str(out))
        how = {"main": "tests.gates.streams.run", "limit_s": LIMIT_S, "patience_s": 30.0}
        logs = folder / f"{out.name}-logs"
        ended = zygote.run([str(job.write())], logs, ranks=cell.ranks, **how)
        if any(code != 0 for code in ended.codes):  # None: it was ended at its limit
            return Row(cell, failure=f"{cell.name} ended with {ended.codes}\n{ended.output}")
    shutil.rmtree(f"{out}-run")
    return Row(cell, [Seen.read(path) for path in results])


def main(argv: list[str]) -> int:
    """Train in the simulator; return the run's exit code."""
    job = Job(**json.loads(Path(argv[0]).read_text()))
    from harness import loop, train
    from harness.engine.deepspeed_0_19.internals import inner_optimizer
    from harness.engine.pipeline import PipelineEngine
    from harness.engine.zero import ZeroEngine
    from harness.guard.stability import Spike
    from harness.layout.world import World
    from harness.run import build, reporting, step
    from tests.gates.defects import planted
    from tests.gates.streams.simulated import Device, simulated

    devices: list[Device] = []
    waits: list[Counter[tuple[str, str, str]]] = []
    kernels: list[dict[str, int]] = []
    moved: list[dict[str, float]] = []
    micro_batches: list[int] = []
    optimizers: list[str] = []

    def joined(*args: Any) -> Any:
        place = join(*args)
        devices.append(stack.enter_context(simulated()))
        return place

    def next_step(run: Any) -> Any:
        seen, number = devices[0].timeline.waits, run.state.step + 1
        timeline = devices[0].timeline
        if number == job.measured:
            seen.clear()
            timeline.launches.clear()
            timeline.moved.clear()
        elif number == job.measured + 1:
            waits.append(Counter(seen))
            kernels.append(dict(timeline.launches))
            states = inner_optimizer(run.engine.engine).state.values()
            elements = sum(each["exp_avg"].numel() for each in states if "exp_avg" in each) or 1
            moved.append({phase: n / elements for phase, n in timeline.moved.items()})
        with devices[0].timeline.during("data"):
            step = taken(run)
        for batch in step.batches:  # as the prefetch thread does for a GPU
            read = (batch.input_ids, batch.labels, batch.position_ids, batch.bounds.places)
            for tensor in read:
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
        stack.enter_context(planted(job.defect, World.from_environ()))
        for owner, name, phase in (
            (loop, "take_step", "step"),
            (ZeroEngine, "accumulate", "micro-batches"),
            (PipelineEngine, "accumulate", "micro-batches"),
            (loop, "log_or_evaluate", "log"),
            (reporting, "evaluated", "evaluation"),
            (loop, "decide", "verdict"),
            (loop, "save_if_due", "save"),
        ):
            stack.enter_context(_during(devices, owner, name, phase))
        code = train.main(job.arguments)
    if code == 0:
        memory = devices[0].memory
        host_waits = [Wait(*call, count) for call, count in sorted(waits[0].items())]
        seen = Seen(
            *(dict(memory.races), dict(memory.reuses), host_waits),
            *(micro_batches[-1], optimizers[-1], kernels[0], moved[0]),
        )
        Path(f"{job.out}.{os.environ['RANK']}.json").write_text(json.dumps(asdict(seen)))
    return code


@contextlib.contextmanager
def _during(devices: list[Any], owner: Any, name: str, phase: str) -> Iterator[None]:
    """Count waits in a function of the harness under a phase."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with devices[0].timeline.during(phase):
            return original(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield
