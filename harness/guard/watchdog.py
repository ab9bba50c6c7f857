"""Detects hangs, reports which ranks hold up the others, and ends the run."""

import contextlib
import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from harness.errors import ExitCode

_ENOUGH = 3  # durations; the first include compiling, allocating and filling caches
_REMEMBERED = 32


@dataclass(frozen=True)
class Beat:
    """A sign of progress. `count`: earlier beats, equal on all ranks at the same point."""

    phase: str
    step: int
    count: int
    since: float  # time.monotonic()


class Pulse:
    """Records the phases of the training thread, which alone calls it; others only read it.

    A phase counts as hanging after `first_s` until three of its durations are known; from then on
    after `factor` times the longest recent one, but not before `floor_s`.
    """

    def __init__(self, *, floor_s: float, factor: float, first_s: float) -> None:
        self._floor_s, self._factor, self._first_s = floor_s, factor, first_s
        self.beat = Beat("set-up", 0, 0, time.monotonic())
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def __call__(self, phase: str, step: int) -> None:
        """Start `phase`, which ends the previous one."""
        now, before = time.monotonic(), self.beat
        self._seconds[before.phase].append(now - before.since)
        self.beat = Beat(phase, step, before.count + 1, now)

    def took(self, phase: str, seconds: float) -> None:
        """Record the duration of work for which this thread waited only in part."""
        self._seconds[phase].append(seconds)

    def longest_s(self, phase: str) -> float | None:
        """Return the longest recent duration of a phase; None before the first."""
        return max(self._seconds[phase], default=None) if phase in self._seconds else None

    def limit_s(self, phase: str) -> float:
        """Return the seconds after which a phase counts as hanging."""
        durations = self._seconds.get(phase, ())
        if len(durations) < _ENOUGH:
            return self._first_s
        return max(self._floor_s, self._factor * max(durations))


_LIBRARY = str(Path(__file__).resolve().parents[1]) + os.sep

Report = dict[str, Any]


def hang_report(
    before: list[Report], after: list[Report], why: str, rank: int, place: Callable[[int], str]
) -> Report:
    """Return a report on the ranks that hold up the others, from two readings of all heartbeats.

    `silent`: ranks that no longer write: stopped, lost with their node, or blocked outside Python.
    `behind`: if all write, the ranks with less progress. If both are empty, all wait at the same
    point for the network, a device or a disk. `place`: returns text to append to a rank's number.
    """
    # A heartbeat that is gone or unreadable counts as not written again.
    after = [now if "tick" in now else then for then, now in zip(before, after, strict=True)]
    silent = _silent(before, after, rank)
    is_silent = {*silent}
    talking = [beat for beat in after if beat["rank"] not in is_silent]
    furthest = max(beat["count"] for beat in talking)
    behind = [beat["rank"] for beat in talking if beat["count"] < furthest]
    held_up_by = silent or behind
    lines = [f"hang: {why} (guard.hang_*)"]
    gone = "stopped, gone or blocked outside Python"
    lines += [f"  {_named(after[n], place)}: {gone}" for n in silent]
    lines += [
        f"  {_named(after[n], place)}, for {after[n]['seconds']:.0f} s: behind" for n in behind
    ]
    named, places = {*silent, *behind}, defaultdict[str, list[int]](list)
    for beat in after:
        if beat["rank"] not in named:
            places[_place(beat)].append(beat["rank"])
    if not held_up_by:
        lines.append("  no rank is behind: all wait for the network, a device or a disk")
    for text, ranks in places.items():
        lines.append(f"  {len(ranks)} ranks ({ranges(ranks)}) {text}")
    return {
        "message": "\n".join(lines),
        "held_up_by": held_up_by,
        "silent": silent,
        "behind": behind,
        "ranks": after,
    }


def _silent(before: list[Report], after: list[Report], rank: int) -> list[int]:
    """Return the other ranks that wrote no heartbeat between two readings."""
    return [
        now["rank"]
        for then, now in zip(before, after, strict=True)
        if now["rank"] != rank and now.get("tick") == then.get("tick") and "at" not in now
    ]


def place_of(frame: FrameType | None) -> str:
    """Return a thread's innermost line in this library, and the call in which it waits."""
    innermost, own = frame, frame
    while own is not None and not own.f_code.co_filename.startswith(_LIBRARY):
        own = own.f_back
    places = [_line(f) for f in dict.fromkeys((own, innermost)) if f is not None]
    return " in ".join(reversed(places))


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"


def _place(beat: Report) -> str:
    if "phase" not in beat:
        return "never wrote"
    return f"in '{beat['phase']}' of step {beat['step']}, {beat.get('at', '')}".rstrip(", ")


def _named(beat: Report, place: Callable[[int], str]) -> str:
    process = f" on {beat['host']} (process {beat['pid']})" if "host" in beat else ""
    return f"rank {beat['rank']}{place(beat['rank'])}{process}, {_place(beat)}"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: [0, 1, 2, 5] -> "0-2, 5"."""
    edges: list[list[int]] = []
    for number in numbers:
        if edges and number == edges[-1][-1] + 1:
            edges[-1][1:] = [number]
        else:
            edges.append([number])
    return ", ".join("-".join(map(str, pair)) for pair in edges)


# A heartbeat costs a few metadata operations on the run folder's file system, which all jobs share.
# All ranks together write at most 8 per second if each can then write every 5 s, and never more
# than 64 per second. A hang report waits for two heartbeats.
_FEW_PER_S, _RARE_S, _MOST_PER_S = 8, 5.0, 64
_FOLDER_S = 30.0  # time limit for a folder that does not respond
_ROOM = 256  # bytes; a heartbeat overwrites the one before, which may have been longer


class Watchdog(threading.Thread):
    """Watches the progress of the thread that created it."""

    def __init__(
        self,
        pulse: Pulse,
        rank: int,
        world_size: int,
        place: Callable[[int], str] = lambda rank: "",
    ) -> None:
        """`place`: returns text to append to a rank's number in the report."""
        super().__init__(name="watchdog", daemon=True)
        self.pulse, self.rank, self.world_size, self.place = pulse, rank, world_size, place
        self._on_hang: Callable[[Report | None], None] = lambda _: None
        few = min(math.ceil(world_size / _FEW_PER_S), _RARE_S)
        self.tick_s = float(max(few, math.ceil(world_size / _MOST_PER_S)))
        self.folder: Path | None = None
        """RUN/heartbeats; None before there is a run folder, when a rank reports only on itself."""
        self._report_path: Path | None = None
        self.hung = False
        """True once a hang ends this process; errors of the watched thread are then consequences of
        it.
        """
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._is_reported = False  # by another rank
        self._ticks = 0

    def write_to(
        self, folder: Path, report_path: Path, on_hang: Callable[[Report | None], None]
    ) -> None:
        """Write heartbeats to `folder` from now on. The first, written at once, names host and
        process. A hang is reported at `report_path`, which must be unique to this attempt, because
        a rank of an earlier one may still be running.

        `on_hang` is called on every rank before it ends, with the report on the rank that made it.
        """
        self.folder, self._report_path, self._on_hang = folder, report_path, on_hang
        with contextlib.suppress(OSError):
            self._write()

    def close(self) -> None:
        """Stop watching: from now on there is no time limit."""
        self._closed.set()
        if self.is_alive():
            self.join()
        if self.folder is not None:
            with contextlib.suppress(OSError):  # the last rank removes the folder
                self._file(self.rank).unlink(missing_ok=True)
                self.folder.rmdir()

    def run(self) -> None:
        """Check at every tick, until closed."""
        # A file system that does not respond blocks the thread that writes to it, not this one.
        heartbeats = threading.Thread(target=self._write_heartbeats, name="heartbeats", daemon=True)
        heartbeats.start()
        while not self._closed.wait(self.tick_s):
            beat = self.pulse.beat
            waited_s, limit_s = time.monotonic() - beat.since, self.pulse.limit_s(beat.phase)
            if waited_s > limit_s:
                self._hang(f"no progress for {waited_s:.0f} s (limit: {limit_s:.0f} s)")
            if self._is_reported:
                self._hang("another rank reported a hang")
        heartbeats.join(_FOLDER_S)

    def _write_heartbeats(self) -> None:
        while not (self._is_reported or self._closed.wait(self.tick_s)):
            with contextlib.suppress(OSError):  # the folder may be temporarily unavailable
                self._is_reported = self.tick()

    @property
    def grace_s(self) -> float:
        """Seconds after which every rank that is able to has written again."""
        return 2.5 * self.tick_s + 1

    def tick(self) -> bool:
        """Write a heartbeat; return True if another rank reported a hang."""
        self._write()
        return self._report_path is not None and self._report_path.exists()

    def _hang(self, why: str) -> None:
        """Report the hang, unless another rank does, and end this process."""
        self.hung = True
        last_words = threading.Timer(_FOLDER_S + 5 * self.grace_s, os._exit, [ExitCode.HANG])
        last_words.daemon = True  # the folder may be what hangs
        last_words.start()
        try:
            self._dump_stacks(why)
            with contextlib.suppress(OSError):
                self._write()
            if self._reports():
                before = self.all_ranks()
                time.sleep(self.grace_s)
                report = hang_report(before, self.all_ranks(), why, self.rank, self.place)
                print(report["message"], file=sys.stderr, flush=True)
                if self._report_path is not None:
                    with contextlib.suppress(OSError):
                        self._report_path.write_text(json.dumps(report, indent=2))
                self._on_hang(report)
            else:
                self._wait_for_report(2 * self.grace_s)
                self._on_hang(None)
        finally:
            sys.stdout.flush()
            os._exit(ExitCode.HANG)  # the other threads cannot be interrupted

    def _reports(self) -> bool:
        """Return True if this rank is the first to detect the hang, or there is no folder."""
        try:
            if self._report_path is not None:
                self._report_path.open("x").close()
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def _wait_for_report(self, most_s: float) -> None:
        """Wait for another rank's report: a launcher kills all ranks as soon as one ends."""
        assert self._report_path is not None
        end = time.monotonic() + most_s
        with contextlib.suppress(OSError):
            while time.monotonic() < end and not self._report_path.stat().st_size:
                time.sleep(self.tick_s / 10)  # ticks grow with the ranks, which limits the load

    def _dump_stacks(self, why: str) -> None:
        print(
            f"rank {self.rank}{self.place(self.rank)}: {why}; its threads:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        if self.folder is not None:
            with contextlib.suppress(OSError), self._file(self.rank, "stacks").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)

    def _write(self) -> None:
        self._ticks += 1
        if self.folder is not None:
            # In a hang with the place: the heartbeat thread may write once more after this one.
            text = json.dumps(self._heartbeat(with_place=self.hung))
            # Overwrites without truncating first, because a rank may be stopped in between.
            descriptor = os.open(self._file(self.rank), os.O_WRONLY | os.O_CREAT, 0o644)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{text:<{_ROOM}}\n")
                file.truncate()

    def _heartbeat(self, with_place: bool) -> Report:
        beat = self.pulse.beat
        heartbeat = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "phase": beat.phase,
            "step": beat.step,
            "count": beat.count,
            "seconds": round(time.monotonic() - beat.since, 1),
            "tick": self._ticks,
        }
        frame = sys._current_frames().get(self._watched) if with_place else None
        return {**heartbeat, "at": place_of(frame)} if frame is not None else heartbeat

    def all_ranks(self) -> list[Report]:
        """Return every rank's last heartbeat, or only its number if it has none."""
        if self.folder is None:
            return [self._heartbeat(with_place=True)]
        return [
            self._heartbeat(with_place=True)
            if n == self.rank
            else _read(self._file(n)) or {"rank": n}
            for n in range(self.world_size)
        ]

    def gone(self) -> list[Report]:
        """Return the last heartbeats, with "place", of ranks whose processes have ended. If there
        are none on this host, look for them on others, after a pause in which every live rank
        writes again.
        """
        before, host = self.all_ranks(), socket.gethostname()
        ended = [beat for beat in before if beat.get("host") == host and not _lives(beat["pid"])]
        if not ended and any(beat.get("host", host) != host for beat in before):
            time.sleep(self.grace_s)
            after = self.all_ranks()
            silent = (after[rank] for rank in _silent(before, after, self.rank))
            ended = [beat for beat in silent if "pid" in beat]
        return [{**beat, "place": self.place(beat["rank"])} for beat in ended]

    def _file(self, rank: int, kind: str = "json") -> Path:
        assert self.folder is not None
        return self.folder / f"rank-{rank:05d}.{kind}"


def _lives(pid: int) -> bool:
    """Return True if a process of this host runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _read(path: Path) -> Report | None:
    for _ in range(5):  # it may be half written
        try:
            value: Report = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, json.JSONDecodeError):
            time.sleep(0.02)
        else:
            return value
    return None
