"""The stages of a rehearsal. Each runs a user's command in real processes; runs of one job are
compared step by step.
"""

import math
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, ExitCode
from harness.launch.ranks import ON_CPU, ON_CUDA, REPOSITORY, Ranks, place_of, started
from harness.layout.grid import Grid
from harness.layout.world import SHARES_GPU
from harness.plan.command import parse_command, plan_from
from harness.report.formatting import duration
from harness.runfolder import RunFolder
from tools.rehearsal.job import STEPS, Device, Job, shown

Command = Callable[[str, list[str]], list[str]]
"""(stage, arguments) -> the command line of every rank."""

SIGNAL = signal.SIGUSR1  # sent by batch systems ahead of the time limit
SIGNALLED_AFTER = 1  # steps
STEPS_ELSEWHERE = 2  # compared steps; rounding differences grow with every step
LIMIT_S = 1800.0  # per stage; a longer stage counts as a hang
_SAY_EVERY_S = 5.0
ENVIRONMENTS: dict[Device, dict[str, str]] = {"cpu": ON_CPU, "cuda": {**ON_CUDA, SHARES_GPU: "1"}}
# Seconds from the start of a rank that has a core to its end, and of an export. On a CPU measured:
# 2 cores of a virtual machine, 1 to 8 ranks; on a GPU guessed.
_RANK_S: dict[Device, float] = {"cpu": 17.0, "cuda": 30.0}
_EXPORT_S = 10.0
_TAIL_LINES = 25
_DIFFERENCES_SHOWN = 6


@dataclass(frozen=True)
class Done:
    """A stage that passed."""

    stage: str
    seconds: float
    seen: str


def expected_s(job: Job) -> dict[str, float]:
    """Return the guessed seconds of each stage; most are Python's imports in every rank."""
    cores = len(os.sched_getaffinity(0))
    ranks = dict.fromkeys(("train", "interrupt", "resume"), job.layout.world_size)
    other = {"elsewhere": job.other[0].world_size} if job.other else {}
    seconds = {
        stage: _RANK_S[job.device] * max(1.0, count / cores)
        for stage, count in {**ranks, **other}.items()
    }
    return {**seconds, "export": _EXPORT_S}


class StageFailed(Exception):
    """A stage failed: the reason, the output of its ranks, and the exit code."""

    stage = ""

    def __init__(self, why: str, output: str = "", code: int = 1) -> None:
        super().__init__(why)
        self.output = output
        self.code = code


def train_command(stage: str, arguments: list[str]) -> list[str]:
    """Return the command line of harness/train.py."""
    return [sys.executable, str(REPOSITORY / "harness" / "train.py"), *arguments]


@dataclass
class Rehearsal:
    """A rehearsal in `folder`, to which it writes the model, the JSON and the data.

    `say` receives a line every few seconds.
    """

    job: Job
    folder: Path
    say: Callable[[str], None] = print
    command: Command = train_command
    arguments: list[str] = field(default_factory=list)
    stopped_at: int = 0  # step at which the interrupted run was saved

    def __post_init__(self) -> None:
        self.arguments = self.job.write(self.folder)
        self._plan(self.job.layout, [])
        if self.job.other:
            self._plan(self.job.other[0], self.job.at_the_other())
        self.reference, self.resumed, self.moved = (
            RunFolder(self.folder / name) for name in ("reference", "resumed", "elsewhere")
        )

    def _plan(self, layout: Grid, more: list[str]) -> None:
        """Plan the small job in a layout, as its ranks will. Raises StageFailed if it is rejected,
        although the real job is accepted.
        """
        words = [*self.arguments, *more]
        try:
            plan_from(
                parse_command(words),
                {**os.environ, **self._on_device, **place_of(0, layout.world_size, 0)},
            )
        except ConfigError as error:
            failed = StageFailed(
                f"train.py accepts the job but not the rehearsal's own small job: {error}",
                f"planned as {shlex.join(words)}",
            )
            failed.stage = "plan"
            raise failed from None

    @property
    def _on_device(self) -> dict[str, str]:
        """The environment of the rehearsal's ranks."""
        return ENVIRONMENTS[self.job.device]

    def stages(self) -> Iterator[Done]:
        """Yield each stage when it is done. Raises StageFailed at the first failure."""
        stages = [self.train, self.interrupt, self.resume, self.export]
        stages += [self.elsewhere] if self.job.other else []
        expected, pace = expected_s(self.job), None
        for stage in stages:
            began, left_s = time.monotonic(), sum(expected.values())
            if pace:
                self.say(f"  about {duration(left_s * pace)} left")
            try:
                seen = stage()
            except StageFailed as failed:
                failed.stage = stage.__name__
                raise
            done = Done(stage.__name__, time.monotonic() - began, seen)
            guessed_s = expected.pop(done.stage)
            pace = pace or done.seconds / guessed_s
            yield done

    def train(self) -> str:
        """Train the reference run from the first step to the last."""
        self._run("train", self.reference, self.job.layout.world_size, ExitCode.DONE)
        lines = by_step(self.reference.read_metrics())
        last = lines.get(STEPS, {})
        applied = STEPS - last.get("skipped_steps", STEPS)
        if not isinstance(last.get("loss"), float) or not applied:
            raise StageFailed(
                f"{applied} of {STEPS} steps changed the weights, and the last loss is "
                f"{last.get('loss')}: nothing can be compared with it"
            )
        skipped = f", {STEPS - applied} skipped" if applied < STEPS else ""
        return (
            f"{STEPS} steps{skipped}: loss {float(lines[1]['loss']):.4f}, then {last['loss']:.4f}"
        )

    def interrupt(self) -> str:
        """Train the same run, stop it, and copy the resulting run folder."""
        self._run("interrupt", self.resumed, self.job.layout.world_size, ExitCode.STOPPED, SIGNAL)
        status = self.resumed.read_status() or {}
        step = status.get("step", 0)
        saved = self.resumed.checkpoints_dir / f"step-{step:08}"
        if status.get("outcome") != "stopped" or not 0 < step < STEPS or not saved.is_dir():
            raise StageFailed(f"status.json is {status}, and {saved} must be its checkpoint")
        self.stopped_at = step
        shutil.copytree(self.resumed.path, self.moved.path)
        return f"{SIGNAL.name} to one rank: all ended with code 75, saved at step {step}"

    def resume(self) -> str:
        """Resume the interrupted run to the end."""
        self._run("resume", self.resumed, self.job.layout.world_size, ExitCode.DONE)
        lines = self.resumed.read_metrics()
        expected = self.reference.read_metrics()
        equals, problems = (
            "equal the uninterrupted run's in every step, bit for bit",
            differing(lines, expected),
        )
        if problems and self.job.device == "cuda":  # its kernels may sum in another order
            steps = [*range(self.stopped_at + 1, STEPS + 1)]
            is_close, seen = closeness(lines, expected, steps, self.job.real.precision)
            equals, problems = f"within rounding: {seen}", [] if is_close else problems
        twice = done_twice(lines, self.stopped_at)
        if twice:
            problems.append(f"not taken once, by the right attempt: steps {twice}")
        if problems:
            more = len(problems) - _DIFFERENCES_SHOWN
            shown = problems[:_DIFFERENCES_SHOWN] + ([f"and {more} more"] if more > 0 else [])
            raise StageFailed("the resumed run is not the uninterrupted one: " + "; ".join(shown))
        loss = by_step(lines)[STEPS]["loss"]
        return (
            f"steps {self.stopped_at + 1} to {STEPS}, none twice; loss {loss:.4f} and gradient "
            f"norm {equals}"
        )

    def export(self) -> str:
        """Export the resumed run's weights and open them in transformers."""
        tool, out = REPOSITORY / "tools" / "export_hf.py", self.folder / "export"
        command = [sys.executable, str(tool), str(self.resumed.path), "--out", str(out)]
        command += ["--trust-remote-code"] if self.job.trust_remote_code else []
        logs = self.folder / "logs" / "export"
        with started(command, 1, Path.cwd(), logs, self._on_device) as ranks:
            parts = ranks.wait(LIMIT_S).last_line.split("; ")
            code = ranks.processes[0].returncode
        loss = next((part for part in parts if part.startswith("its probe loss is")), None)
        if code or loss is None:
            raise StageFailed(f"export_hf.py ended with code {code}", _tail(ranks))
        return f"opens in transformers; {loss}"

    def elsewhere(self) -> str:
        """Resume the interrupted run in another layout."""
        assert self.job.other
        layout = self.job.other[0]
        more = self.job.at_the_other()
        self._run("elsewhere", self.moved, layout.world_size, ExitCode.DONE, more=more)
        steps = [self.stopped_at + n for n in range(1, STEPS_ELSEWHERE + 1)]
        lines, expected = self.moved.read_metrics(), self.reference.read_metrics()
        if self.job.random_steps:
            # Before a resumed run continues, it compares the loss of the checkpoint's probe.
            return (
                f"resumes with {shown(layout)} and the same probe loss; dropout differs by "
                "rank, so "
                "the curve differs"
            )
        is_close, seen = closeness(lines, expected, steps, self.job.real.precision)
        if not is_close:
            raise StageFailed(f"on {shown(layout)}, {seen}")
        return f"resumes with {shown(layout)}: {seen}"

    def _run(
        self,
        stage: str,
        run: RunFolder,
        ranks: int,
        expected: ExitCode,
        stop: signal.Signals | None = None,
        more: list[str] | None = None,
    ) -> None:
        """Train on `ranks` ranks; send `stop` to the last one after a step. All must end as
        `expected`.
        """
        began = told_at = time.monotonic()
        command = self.command(stage, [*self.arguments, f"run.dir={run.path}", *(more or [])])
        logs = self.folder / "logs" / stage
        with started(command, ranks, Path.cwd(), logs, self._on_device) as group:

            def meanwhile() -> None:
                nonlocal told_at, stop
                step = max([0, *by_step(run.read_metrics())])
                if stop is not None and step >= SIGNALLED_AFTER:
                    group.processes[-1].send_signal(stop)
                    stop = None
                if (now := time.monotonic()) > told_at + _SAY_EVERY_S:
                    told_at = now
                    self.say(f"  {stage}: step {step} of {STEPS}, {now - began:.0f} s")

            group.wait(LIMIT_S, meanwhile)
            codes = [process.returncode for process in group.processes]
        if set(codes) == {int(expected)}:
            return
        late = f" (they had {LIMIT_S:g} s)" if time.monotonic() - began > LIMIT_S else ""
        refused = stage == "train" and set(codes) == {int(ExitCode.BAD_CONFIG)}
        raise StageFailed(
            f"its ranks ended with {codes}, not all with {int(expected)}{late}",
            f"{_tail(group)}\nstarted as {shlex.join(command)}",
            int(ExitCode.BAD_CONFIG) if refused else 1,
        )


def _tail(ranks: Ranks) -> str:
    """Return the last lines of the first rank that failed by itself, otherwise of rank 0."""
    codes = [process.returncode or 0 for process in ranks.processes]
    first = next((rank for rank, code in enumerate(codes) if code not in (0, 75) and code > 0), 0)
    lines = ranks.logs[first].read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([f"last output of rank {first}:", *(f"  {line}" for line in lines)])


# --- two runs of one job, by their metrics.jsonl ---

Line = dict[str, Any]

# Results of a step and its position in the run, but not its duration.
EXACT = (
    *("loss", "grad_norm", "learning_rate", "samples", "tokens"),
    *("loss_scale", "skipped_steps", "eval_loss"),
)


def differing(lines: list[Line], expected: list[Line]) -> list[str]:
    """Return every difference of two runs in EXACT, to the last bit, and steps that one run
    lacks.
    """
    here, there = by_step(lines), by_step(expected)
    problems = [
        f"step {step} is in only one of the two runs" for step in sorted(here.keys() ^ there.keys())
    ]
    for step in sorted(here.keys() & there.keys()):
        problems += [
            f"{key} of step {step} is {here[step].get(key)!r}, not {there[step].get(key)!r}"
            for key in EXACT
            if here[step].get(key) != there[step].get(key)
        ]
    return problems


def done_twice(lines: list[Line], stopped_at: int) -> list[int]:
    """Return the steps that the wrong attempt took: those up to `stopped_at` belong to the first,
    later ones to the second.
    """
    return [
        step
        for step, line in by_step(lines).items()
        if line["attempt"] != (1 if step <= stopped_at else 2)
    ]


def apart(ours: list[Line], expected: list[Line], steps: list[int], key: str) -> float:
    """Return the largest relative difference of `key` over these steps; NaN if one is not finite.

    A step that has null in both runs counts as equal.
    """
    here, there = by_step(ours), by_step(expected)
    worst = 0.0
    for step in steps:
        mine, theirs = (lines.get(step, {}).get(key, math.nan) for lines in (here, there))
        if mine is None and theirs is None:
            continue
        # Records have "inf" and "nan" as text.
        mine, theirs = (math.nan if value is None else float(value) for value in (mine, theirs))
        if not math.isfinite(mine - theirs):
            return math.nan
        worst = max(worst, abs(mine - theirs) / max(abs(theirs), 1e-30))
    return worst


def closeness(
    ours: list[Line], expected: list[Line], steps: list[int], precision: str
) -> tuple[bool, str]:
    """Return True if loss and norm of these steps are equal within rounding, and the differences as
    text.

    The tolerances are those of pipeline stages against the unsplit model. They are wider than those
    of the checkpoint gate (tests/gates/test_checkpoints.py), which measures a single model.
    """
    from harness.run.verify import TOLERANCES  # imports torch, which planning does without

    loss, norm = (apart(ours, expected, steps, key) for key in ("loss", "grad_norm"))
    most_loss, most_norm = TOLERANCES[precision]
    return loss <= most_loss and norm <= most_norm, (
        f"loss and norm of steps {steps[0]} to {steps[-1]} are within {loss:.0e} and {norm:.0e} "
        f"(allowed {most_loss:.0e} and {most_norm:.0e})"
    )


def by_step(lines: list[Line]) -> dict[int, Line]:
    """Return the lines of training steps by step; the line of step 0 is an evaluation."""
    return {line["step"]: line for line in lines if "loss" in line}
