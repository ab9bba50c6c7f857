"""Interrupts one run again and again in other layouts; a seed determines every attempt."""

import contextlib
import json
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checkpoint.store import verified
from harness.errors import Unusable
from harness.launch.fork_server import Zygote
from harness.launch.ranks import Outcome
from harness.runfolder import RunFolder
from tests.faults.conftest import arguments
from tests.real_runs import SHARED_MEMORY
from tests.tables import beside

TABLES = beside(__file__, "soak.toml")
KINDS: dict[str, int] = TABLES["kinds"]
PLACES: dict[str, int] = TABLES["places"]
STARTS: dict[str, str] = TABLES["starts"]
REFERENCE = "zero1 x2"
REPEATED = 0.25
HANGS = ("guard.hang_floor_s=6", "guard.hang_factor=10", "guard.hang_first_s=60")
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
    """One start of the run, and its interruption."""

    number: int
    json: str
    ranks: int
    kind: str
    fault: dict[str, Any]
    damage: str | None
    """Damage done beforehand to a file of the newest checkpoint."""

    @property
    def layout(self) -> str:
        """Name of the layout in tables."""
        return f"{self.json} x{self.ranks}"

    @property
    def expected(self) -> list[set[int | None]]:
        """The exit codes that each rank may have."""
        if self.fault.get("do") == "kill":
            return [{-9} if rank == self.fault["rank"] else {1} for rank in range(self.ranks)]
        of_kind: dict[str, set[int | None]] = {"full disk": {74}, "nan": {76}, "hang": {78}}
        of_kind["raise"] = {1, 74}  # 74 if raised within a save
        return [of_kind.get(self.kind, {75})] * self.ranks


def drawn(seed: int, number: int, disk: Path | None) -> Attempt:
    """Return attempt `number` of the story; `disk` is a file system to fill, or None."""
    draw = random.Random(f"{seed}:{number}")
    # Sometimes the layout of the previous attempt, as after most real interruptions.
    whose = number - (draw.random() < REPEATED)
    json_name, ranks = random.Random(f"{seed}:{whose}:layout").choice(TABLES["layouts"])
    kinds = {kind: often for kind, often in KINDS.items() if disk or kind != "full disk"}
    (kind,) = draw.choices(list(kinds), list(kinds.values()))
    place = draw.choice(list(PLACES))
    if kind == "raise" and place == "any moment":  # raised in a thread, it ends only that thread
        place = "in a step"
    rank = draw.randrange(ranks)
    fault: dict[str, Any] = {"at": place, "nth": draw.randint(1, PLACES[place]), "do": kind}
    fault["rank"] = rank if place in TABLES["on_every_rank"] else 0
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


@dataclass
class Happened:
    """The outcome of an attempt."""

    attempt: Attempt
    codes: list[int | None]
    saved: int
    """Step of the newest whole checkpoint before it; 0 for none."""
    start: str
    """Checksum of that checkpoint's manifest."""
    made: list[str]
    """Checksums of the checkpoints that it left."""
    before: int
    """Number of steps that other attempts had executed."""
    steps: list[int]
    """Executed steps, in order."""


class Story:
    """The run and its history, in a folder."""

    def __init__(self, folder: Path, seed: int, zygote: Zygote, data: list[str]) -> None:
        self.folder, self.seed, self.zygote, self.data = folder, seed, zygote, data
        self.disk = _small_disk(folder / "disk")
        self.run = RunFolder((self.disk or folder) / "run")
        self.happened: list[Happened] = []

    def interrupt(self, times: int) -> None:
        """Interrupt the run `times` times. Raises AssertionError at a problem."""
        for number in range(times):
            self.happened.append(self._attempt(drawn(self.seed, number, self.disk)))

    def end(self) -> int:
        """Take two final steps; return the number of steps that the run then has."""
        last = max((step for happened in self.happened for step in happened.steps), default=0) + 2
        ended = self.train(self.run, REFERENCE, "last", f"train.steps={last}")
        assert set(ended.codes) == {0}, ended.output
        return last

    def undisturbed(self, steps: int) -> dict[str, RunFolder]:
        """Return the same run in every layout of the story, never interrupted."""
        runs = {}
        for layout in sorted({REFERENCE, *(happened.attempt.layout for happened in self.happened)}):
            runs[layout] = run = RunFolder(self.folder / f"undisturbed {layout}")
            words = (f"train.steps={steps}", "save.every=0")
            ended = self.train(run, layout, f"undisturbed {layout}", *words, limit_s=3600)
            assert set(ended.codes) == {0}, ended.output
        return runs

    def train(
        self,
        run: RunFolder,
        layout: str,
        name: str,
        *words: str,
        fault: dict[str, Any] | None = None,
        limit_s: float = 180,
    ) -> Outcome:
        """Start the run in a layout."""
        json_name, ranks = layout.split(" x")
        every = arguments(run.path, self.data, *TABLES["words"], *words, ds=json_name)
        return self.zygote.run(every, self.folder / "logs" / name, fault, int(ranks), limit_s)

    def close(self) -> None:
        """Unmount the small disk."""
        if self.disk:
            subprocess.run(["umount", "-l", str(self.disk)], check=True)

    def _attempt(self, attempt: Attempt) -> Happened:
        self._damage(attempt)
        before, executed = self._whole(), self.executed()
        saved = max(before, default=0)
        words = ["train.steps=1000000", *(HANGS if attempt.kind == "hang" else ())]
        name = f"attempt-{attempt.number}"
        ended = self.train(self.run, attempt.layout, name, *words, fault=attempt.fault)
        happened = Happened(
            *(attempt, ended.codes, saved),
            start=before.get(saved, ""),
            made=sorted({*self._whole().values()} - {*before.values()}),
            before=len(executed),
            steps=self.executed()[len(executed) :],
        )
        if self.disk:
            (self.disk / "filler").unlink(missing_ok=True)
        problems = self._problems(attempt, happened)
        assert not problems, f"{problems}\n{happened}\n{ended.output}"
        return happened

    def _problems(self, attempt: Attempt, happened: Happened) -> list[str]:
        codes = zip(happened.codes, attempt.expected, strict=True)
        outlived = self.zygote.left
        first, steps = happened.saved + 1, happened.steps
        left = [p.name for p in SHARED_MEMORY.iterdir() if f"_{self.zygote.ports[-1]}_" in p.name]
        checks = {
            "an exit code that is none of these": not all(code in may for code, may in codes),
            "a step done twice that was saved, or left out": steps
            != list(range(first, first + len(steps))),
            f"left in shared memory: {left}": bool(left),
            f"processes that outlived their ranks: {outlived}": bool(outlived),
            "a step after a stop while it started": attempt.kind == "starting" and bool(steps),
            "no whole checkpoint is left": happened.saved > 0 and not self._whole(),
        }
        return [problem for problem, is_there in checks.items() if is_there]

    def _damage(self, attempt: Attempt) -> None:
        """Damage a file of the newest checkpoint as the attempt says, if there is an older one."""
        if attempt.damage is None or len(self._whole()) < 2:
            return
        newest = max(self.run.checkpoints_dir.glob("step-*"))
        draw = random.Random(f"{self.seed}:{attempt.number}:damage")
        path = draw.choice(sorted(newest.iterdir()))
        damaged = DAMAGES[attempt.damage](path.read_bytes())
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)

    def _whole(self) -> dict[int, str]:
        """Return the checkpoints that can be resumed from: step -> checksum."""
        whole = {}
        for path in self.run.checkpoints_dir.glob("step-*"):
            with contextlib.suppress(Unusable):
                manifest = verified(path).manifest
                whole[manifest.state.step] = manifest.checksum
        return whole

    def executed(self) -> list[int]:
        """Return the steps of all attempts in the order of execution."""
        return [line["step"] for line in metrics_lines(self.run) if "loss" in line]


def _small_disk(folder: Path) -> Path | None:
    """Return a file system of 64 MB, if mounting is permitted; a checkpoint has 3 MB."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False)
    return None if done.returncode else folder


def metrics_lines(run: RunFolder) -> list[dict[str, Any]]:
    """Return every whole line of metrics.jsonl, including those of repeated steps."""
    if not run.metrics_path.exists():
        return []
    lines = run.metrics_path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
