"""The ranks' meeting before anything can hang: who came, what each found, what is decided.

A TCP store and nothing else, so that a rank that does not come, or does not come back, is named
instead of waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore

from harness.engine.processes import set_environment
from harness.errors import ExitCode
from harness.layout.world import World
from tools.preflight_checks.environment import host_name
from tools.preflight_checks.report import who

_POLL_S = (0.01, 0.2)  # the first pause, and the longest
_CRASHED = 1
_FAREWELL_S = 10.0  # for the others to read the last word


class Absent(Exception):
    """Ranks that did not join, or left; `code`: the exit code for it."""

    def __init__(self, message: str, code: int = ExitCode.BAD_CONFIG) -> None:
        super().__init__(message)
        self.code = int(code)


@dataclass(frozen=True)
class Deadline:
    """The end of all patience, as time.monotonic() has it."""

    end_s: float

    @property
    def left_s(self) -> float:
        """Never quite nothing: what is there already can still be read."""
        return max(0.05, self.end_s - time.monotonic())


@dataclass(frozen=True)
class Meeting:
    """All ranks of `world`, around rank 0's store."""

    world: World
    store: Store

    def give(self, name: str, value: Any) -> None:
        """Leave a value of this rank for rank 0."""
        self.store.set(f"{name}/{self.world.rank}", json.dumps(value))

    def collect(self, name: str, deadline: Deadline) -> list[Any]:
        """Return every rank's value, on rank 0; None for ranks that sent none in time."""
        return [
            json.loads(self.store.get(key)) if self._comes(key, deadline) else None
            for key in (f"{name}/{rank}" for rank in range(self.world.world_size))
        ]

    def tell(self, name: str, value: Any) -> None:
        """Say something to all, on rank 0."""
        self.store.set(name, json.dumps(value))

    def hear(self, name: str, deadline: Deadline) -> Any:
        """Return rank 0's answer. Raises Absent if there is none in time."""
        if not self._comes(name, Deadline(deadline.end_s + _FAREWELL_S)):
            raise Absent(f"rank 0 said nothing more; {host_name()} had come")
        return json.loads(self.store.get(name))

    def together(self, name: str, patience_s: float, end: Deadline) -> None:
        """Let all ranks go on at once; without those that come here `patience_s` after rank 0."""
        self.give(name, True)
        if self.world.rank == 0:
            self.collect(name, Deadline(min(end.end_s, time.monotonic() + patience_s)))
            self.tell(name, True)
        self.hear(name, end)

    def part(self, ranks: int) -> None:
        """Leave; rank 0, with whom the store goes, as the last of so many `ranks`."""
        with contextlib.suppress(DistNetworkError):  # rank 0 did not wait for this one
            self.store.add("left", 1)
            until = time.monotonic() + _FAREWELL_S
            while self.world.rank == 0 and time.monotonic() < until:
                if self.store.add("left", 0) >= ranks:
                    return
                time.sleep(_POLL_S[0])

    def _comes(self, key: str, deadline: Deadline) -> bool:
        """Polls: torch's own wait does not hear Ctrl-C, and logs every time that it was in vain."""
        pause_s, longest_s = _POLL_S
        try:
            while not self.store.check([key]):
                if time.monotonic() >= deadline.end_s:
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        except DistNetworkError:
            message = f"rank 0 ended before it said what {host_name()} waits for"
            raise Absent(message, _CRASHED) from None
        return True


def meet(world: World, come_s: float) -> Meeting:
    """Open rank 0's store, or find it within `come_s`.

    Raises Absent where rank 0 cannot be reached, or cannot open it.
    """
    set_environment(world)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun holds a store there already.
    opens = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        timeout = timedelta(seconds=come_s)
        store = TCPStore(
            address, port, world.world_size, opens, timeout=timeout, wait_for_workers=False
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        goal = "open" if opens else f"reach rank 0 from {host_name()} within {come_s:.0f} s at"
        raise Absent(
            f"cannot {goal} {address}:{port} ({reason}): see whether rank 0 runs, whether another "
            "job holds the port, and which network interface its name leads to"
        ) from None
    return Meeting(world, PrefixStore("preflight", store))


def absent(came: list[Any], come_s: float) -> str | None:
    """Return the ranks missing in the result of `collect`; None if all joined."""
    missing = [rank for rank, value in enumerate(came) if value is None]
    if not missing:
        return None
    hosts = [value["host"] if value else "" for value in came]
    there = who([rank for rank in range(len(came)) if rank not in missing], hosts)
    listed = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
    return (
        f"{len(missing)} of {len(came)} ranks did not come within {come_s:.0f} s: {listed}; those "
        f"that came: {there}. Look for nodes that are down, or on which Python cannot start"
    )
