"""Notices that the ranks no longer get on, says which one holds the others up, and ends them.

    RUN/heartbeats/
      rank-00003.json    written by each rank while it runs: phase, step, since when
      rank-00003.stacks  every thread's Python stack, once a hang was noticed
      hang.json          the report, by the rank that noticed first; the others read it and end

A rank whose phase takes longer than it ever has (guard/pulse.py) is not judged alone: the one that
holds all up is the one that is behind, or that no longer writes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from harness.errors import ExitCode
from harness.guard.hang_report import Report, judge, place_of
from harness.guard.pulse import Pulse

_RANKS_PER_S = 64  # that write into one folder: no more, however many there are


class Watchdog(threading.Thread):
    """Watches the thread that made it."""

    def __init__(self, pulse: Pulse, rank: int, world_size: int) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.pulse, self.rank, self.world_size = pulse, rank, world_size
        self.on_hang: Callable[[Report | None], None] = lambda _: None
        """Comes on every rank before it ends; the report on the one that noticed first."""
        self.tick_s = float(math.ceil(world_size / _RANKS_PER_S))
        self.folder: Path | None = None
        """RUN/heartbeats, as soon as there is a run folder; until then a rank knows only itself."""
        self.hung = False
        """Whether a hang ends this process; what the watched thread meets meanwhile is its echo."""
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._ticks = 0

    def close(self) -> None:
        """Watch no more: what follows may take as long as it wants to."""
        self._closed.set()
        if self.is_alive():
            self.join()
        if self.folder is not None:
            with contextlib.suppress(OSError):  # the last one takes the folder along
                self._file(self.rank).unlink(missing_ok=True)
                self.folder.rmdir()

    def run(self) -> None:
        """Look at every tick, until closed."""
        while not self._closed.wait(self.tick_s):
            beat = self.pulse.beat
            waited_s, limit_s = time.monotonic() - beat.since, self.pulse.limit_s(beat.phase)
            if waited_s > limit_s:
                self._hang(f"no progress for {waited_s:.0f} s, {limit_s:.0f} s is the limit")
            with contextlib.suppress(OSError):  # a folder that cannot be reached for a moment
                self._write()
                if self.folder is not None and (self.folder / "hang.json").exists():
                    self._hang("another rank reported a hang")

    def _hang(self, why: str) -> None:
        """Report and end this process, or only end it where another rank reports."""
        self.hung = True
        grace_s = 2.5 * self.tick_s + 1  # by then every rank that can has written again
        try:
            self._dump_stacks(why)
            with contextlib.suppress(OSError):
                self._write(where=True)
            if self._reports():
                before = self._all_ranks()
                time.sleep(grace_s)
                report = judge(before, self._all_ranks(), why, self.rank)
                print(report["message"], file=sys.stderr, flush=True)
                self._publish(report)
                self.on_hang(report)
            else:
                self._wait_for_report(2 * grace_s)
                self.on_hang(None)
        finally:
            sys.stdout.flush()
            os._exit(ExitCode.HANG)  # the other threads cannot be reached

    def _reports(self) -> bool:
        """Whether this rank is the first; each is for itself where no folder says."""
        try:
            if self.folder is not None:
                (self.folder / "hang.json").open("x").close()
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def _publish(self, report: Report) -> None:
        if self.folder is not None:
            with contextlib.suppress(OSError):
                (self.folder / "hang.json").write_text(json.dumps(report, indent=2))

    def _wait_for_report(self, most_s: float) -> None:
        """A launcher that sees one rank end kills the others, the one that reports among them."""
        assert self.folder is not None
        end = time.monotonic() + most_s
        with contextlib.suppress(OSError):
            while time.monotonic() < end and not (self.folder / "hang.json").stat().st_size:
                time.sleep(0.1)

    def _dump_stacks(self, why: str) -> None:
        print(f"rank {self.rank}: {why}; its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        if self.folder is not None:
            with contextlib.suppress(OSError), self._file(self.rank, "stacks").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)

    def _write(self, where: bool = False) -> None:
        self._ticks += 1
        if self.folder is not None:
            self._file(self.rank).write_text(json.dumps(self._heartbeat(where)))

    def _heartbeat(self, where: bool) -> Report:
        beat = self.pulse.beat
        found = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "phase": beat.phase,
            "step": beat.step,
            "count": beat.count,
            "seconds": round(time.monotonic() - beat.since, 1),
            "tick": self._ticks,
        }
        frame = sys._current_frames().get(self._watched) if where else None
        return {**found, "at": place_of(frame)} if frame is not None else found

    def _all_ranks(self) -> list[Report]:
        """Every rank's last heartbeat; of one that has none, only its number."""
        if self.folder is None:
            return [self._heartbeat(where=True)]
        return [
            self._heartbeat(where=True) if n == self.rank else _read(self._file(n)) or {"rank": n}
            for n in range(self.world_size)
        ]

    def _file(self, rank: int, kind: str = "json") -> Path:
        assert self.folder is not None
        return self.folder / f"rank-{rank:05d}.{kind}"


def _read(path: Path) -> Report | None:
    for _ in range(5):  # it may be half-written this very moment
        try:
            value: Report = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, json.JSONDecodeError):
            time.sleep(0.02)
        else:
            return value
    return None
