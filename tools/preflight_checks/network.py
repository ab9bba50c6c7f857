"""Connects the ranks and measures the links between them: all-reduce, and pairs of neighbours."""

import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.engine.processes import own_device, set_environment
from harness.errors import ExitCode
from harness.guard.watchdog import ranges
from harness.layout.exclusions import KEYS
from harness.layout.grid import Purpose
from harness.layout.world import World
from harness.plan.plan import Plan
from tools.preflight_checks.report import Row, by_text, count, grouped, named_row, slow, span, who

_POLL_S = (0.01, 0.2)  # the first pause, and the longest
_CRASHED = 1
_FAREWELL_S = 10.0  # time for the others to read the last message
_MOST_CHARACTERS = 200  # of a list of ranks


class Absent(Exception):
    """Ranks that did not join, or left; `code`: the exit code."""

    def __init__(self, message: str, code: int = ExitCode.BAD_CONFIG) -> None:
        super().__init__(message)
        self.code = int(code)


@dataclass(frozen=True)
class Meeting:
    """All ranks of `world`, connected by rank 0's TCP store.

    No collectives: missing ranks are named, not waited for. Deadlines are time.monotonic() values.
    """

    world: World
    store: dist.Store
    host: str

    def give(self, name: str, value: Any) -> None:
        """Send a value of this rank to rank 0."""
        self.store.set(f"{name}/{self.world.rank}", json.dumps(value))

    def collect(self, name: str, end_s: float) -> list[Any]:
        """Return every rank's value, on rank 0; None for ranks that sent none in time."""
        return [
            json.loads(self.store.get(key)) if self._comes(key, end_s) else None
            for key in (f"{name}/{rank}" for rank in range(self.world.world_size))
        ]

    def tell(self, name: str, value: Any) -> None:
        """Send a value to all ranks, on rank 0."""
        self.store.set(name, json.dumps(value))

    def hear(self, name: str, end_s: float) -> Any:
        """Return rank 0's value. Raises Absent if there is none in time."""
        if not self._comes(name, end_s + _FAREWELL_S):
            raise Absent(f"rank 0 sent nothing more; {self.host} had come")
        return json.loads(self.store.get(name))

    def together(self, name: str, patience_s: float, end_s: float) -> None:
        """Make all ranks start at the same time; do not wait for any over `patience_s` late."""
        self.give(name, True)
        if self.world.rank == 0:
            self.collect(name, min(end_s, time.monotonic() + patience_s))
            self.tell(name, True)
        self.hear(name, end_s)

    def part(self, ranks: int) -> None:
        """Leave. Rank 0, which hosts the store, leaves last of all `ranks`."""
        with contextlib.suppress(dist.DistNetworkError):  # rank 0 did not wait for this one
            self.store.add("left", 1)
            until = time.monotonic() + _FAREWELL_S
            while self.world.rank == 0 and time.monotonic() < until:
                if self.store.add("left", 0) >= ranks:
                    return
                time.sleep(_POLL_S[0])

    def _comes(self, key: str, end_s: float) -> bool:
        """Poll, because torch's own wait ignores Ctrl-C and logs every timeout."""
        pause_s, longest_s = _POLL_S
        try:
            while not self.store.check([key]):
                if time.monotonic() >= end_s:
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        except dist.DistNetworkError:
            message = f"rank 0 ended while {self.host} was waiting for it"
            raise Absent(message, _CRASHED) from None
        return True


def meet(world: World, host: str, come_s: float) -> Meeting:
    """Open rank 0's store, or connect to it within `come_s`. Raises Absent if that fails."""
    set_environment(world)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun already runs a store there.
    opens = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=come_s)
    try:
        store = dist.TCPStore(
            address, port, world.world_size, opens, timeout=limit, wait_for_workers=False
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        goal = "open" if opens else f"reach rank 0 from {host} within {come_s:.0f} s at"
        raise Absent(
            f"cannot {goal} {address}:{port} ({reason}): see whether rank 0 runs, whether another "
            "job holds the port, and which network interface its name leads to"
        ) from None
    return Meeting(world, dist.PrefixStore("preflight", store), host)


def absent(came: list[Any], come_s: float) -> str | None:
    """Return the ranks missing in the result of `collect`; None if all joined."""
    missing = [rank for rank, value in enumerate(came) if value is None]
    if not missing:
        return None
    listed = ranges(missing)
    if len(listed) > _MOST_CHARACTERS:
        listed = f"{listed[:_MOST_CHARACTERS].rpartition(',')[0]}, ..."
    hosts = [value["host"] if value else "" for value in came]
    there = who([rank for rank in range(len(came)) if rank not in missing], hosts)
    return (
        f"{len(missing)} of {len(came)} ranks did not come within {come_s:.0f} s: "
        f"{listed}; those that came: {there}. Look for nodes that are down, or on which "
        "Python cannot start"
    )


# --- measurements ---

WITHIN, BETWEEN = "links in a node", "links between nodes"
_ALL_REDUCE_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
_PAIR_BYTES = {"cuda": 64 * 2**20, "cpu": 8 * 2**20}
_REPEATS = 3
_WAITING = "waiting for others"
_NCCL_PATIENCE_S = 600.0  # above our limit: NCCL must not end a process that has yet to report


@dataclass
class Links:
    """Measurements of one rank, in 10**9 bytes per second."""

    all_reduce_gb_per_s: float | None = None
    """Bus bandwidth; None if there is no other rank."""
    pairs: list[tuple[str, int, float]] = field(default_factory=list)
    """(level, the other rank, the rate in each direction while both send)."""
    stage: str = "not begun"  # the last measurement begun, where a hang would be
    problem: str | None = None


def bus_gb_per_s(size_bytes: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce: size/time * 2(n-1)/n.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return size_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9


def ring_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return all neighbours on a ring, in two or three rounds with one partner each."""
    edges = [(place, (place + 1) % count) for place in range(count if count > 2 else count - 1)]
    odd = edges[-1:] if count > 2 and count % 2 else []
    even = edges[: len(edges) - len(odd)]
    return [round_ for round_ in (even[0::2], even[1::2], odd) if round_]


def pair_rounds(hosts: Sequence[str]) -> list[tuple[str, dict[int, int]]]:
    """Return (level, rank -> its partner) of every round: two or three for any number of nodes.

    An all-reduce does not show which link is slow, so neighbours exchange data in pairs: within
    nodes, then between consecutive nodes over all network cards. A node that is slow with both
    neighbours is slow itself.
    """
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    places = list(nodes.values())
    within: list[dict[int, int]] = []
    for ranks in places:
        for number, pairs in enumerate(ring_rounds(len(ranks))):
            within.extend({} for _ in range(number + 1 - len(within)))
            within[number].update(_both_ways((ranks[a], ranks[b]) for a, b in pairs))
    between = [
        _both_ways(pair for a, b in pairs for pair in zip(places[a], places[b], strict=False))
        for pairs in ring_rounds(len(places))
    ]
    return [(WITHIN, partner) for partner in within] + [(BETWEEN, partner) for partner in between]


def _both_ways(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    return {rank: peer for a, b in pairs for rank, peer in ((a, b), (b, a))}


def measure_links(meeting: Meeting, hosts: Sequence[str], limit_s: float) -> tuple[Links, bool]:
    """Return this rank's measurements, and True if it left the group. Collective.

    Runs in a thread, because a collective that hangs cannot be interrupted, only abandoned.
    """
    links = Links()
    thread = threading.Thread(target=_guarded, args=(links, meeting, hosts), daemon=True)
    thread.start()
    until = time.monotonic() + limit_s
    while thread.is_alive() and time.monotonic() < until:
        thread.join(0.2)  # in slices, between which Ctrl-C is handled
    if thread.is_alive():
        links.problem = f"not finished after {limit_s:.0f} s"
        return links, False
    return links, not dist.is_initialized()


def _guarded(links: Links, meeting: Meeting, hosts: Sequence[str]) -> None:
    try:
        _measure(links, meeting, hosts)
    except Exception as error:  # whatever the network raises is a finding
        links.problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _measure(links: Links, meeting: Meeting, hosts: Sequence[str]) -> None:
    world = meeting.world
    device = own_device(world)  # torch's current device is set per thread
    links.stage = "connecting"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        # A clone: while it waits for a rank that does not come, it blocks all who share the store.
        store=meeting.store.clone(),  # type: ignore[attr-defined]
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=_NCCL_PATIENCE_S),
    )
    # First, because NCCL requires all ranks in a group's first call.
    links.stage = "all-reduce over all ranks"
    links.all_reduce_gb_per_s = all_reduce_gb_per_s(world, device)
    for number, (level, partner) in enumerate(pair_rounds(hosts), 1):
        mine = partner.get(world.rank)
        links.stage = _WAITING
        _together()
        if mine is not None:
            links.stage = f"round {number}, {level}, with rank {mine}"
            links.pairs.append((level, mine, _exchange(mine, device)))
    links.stage = _WAITING
    _together()
    links.stage = "finished"
    # Not after a failure: NCCL would wait for kernels in which other ranks wait for this one.
    dist.destroy_process_group()


def _together() -> None:
    """Wait for all ranks, over gloo on any device, so that they start the next part together."""
    dist.all_reduce(torch.zeros(1))


def all_reduce_gb_per_s(world: World, device: torch.device) -> float:
    """Return the bus bandwidth of an all-reduce over all ranks. Collective."""
    size = _ALL_REDUCE_BYTES[device.type]
    values = torch.zeros(size // 4, device=device)
    seconds = _timed(lambda: dist.all_reduce(values), device)
    return bus_gb_per_s(size, statistics.median(seconds), world.world_size)


def _exchange(peer: int, device: torch.device) -> float:
    size = _PAIR_BYTES[device.type]
    sent, received = (torch.zeros(size // 4, device=device) for _ in range(2))

    def both_ways() -> None:
        sends = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for request in dist.batch_isend_irecv(sends):
            request.wait()

    return size / min(_timed(both_ways, device)) / 1e9


def _timed(act: Callable[[], object], device: torch.device) -> list[float]:
    """Return the seconds of each repetition, without the first, which connects."""
    seconds = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


# --- judged on rank 0 ---

_AXES: dict[str, Purpose] = {"tensor": "tensor", "sequence": "sequence", "expert": "experts"}


def neighbour_rows(plan: Plan, hosts: Sequence[str]) -> list[Row]:
    """Return a row for each axis whose ranks exchange data in every layer."""
    return [
        _row(axis, KEYS[axis], plan.share.every(purpose), hosts)
        for axis, purpose in _AXES.items()
        if getattr(plan.grid, axis) > 1
    ]


def _row(axis: str, key: str, groups: Sequence[Sequence[int]], hosts: Sequence[str]) -> Row:
    size = len(groups[0])
    apart = [group for group in groups if len({hosts[rank] for rank in group}) > 1]
    text = f"{count(len(groups), 'group')} of {size}"
    if not apart:
        return Row(f"{axis} ranks", "ok", f"{text}, each within a node")
    text += f", {len(apart)} of them over several nodes, as {who(apart[0], hosts)}"
    todo = (
        "they communicate in every layer, over the slower links between nodes: start a multiple of "
        f"{size} neighbouring ranks on each node, or set {key} to what divides a node's ranks"
    )
    return Row(f"{axis} ranks", "warn", text, todo)


def network_rows(
    links: dict[int, Links], hosts: Sequence[str], *, judges_speed: bool = True
) -> list[Row]:
    """Return the checks of the network; `links` by rank."""
    if len(hosts) == 1:
        return [Row("all-reduce", "ok", "one rank has no other rank to reduce with")]
    broken = {rank: of_rank for rank, of_rank in links.items() if of_rank.problem}
    if broken:
        return [_broken(broken, hosts)]
    rates = [f.all_reduce_gb_per_s for f in links.values() if f.all_reduce_gb_per_s is not None]
    text = f"{span(rates, 'GB/s', '.2f')} of bus bandwidth over {len(hosts)} ranks"
    rows = [Row("all-reduce", "ok", text)]
    for level in (WITHIN, BETWEEN) if judges_speed else ():
        pairs = {
            rank: [rate for name, _, rate in of_rank.pairs if name == level]
            for rank, of_rank in links.items()
        }
        # The better of a rank's two pairs: the other may be slow because of its neighbour.
        best = {rank: max(pair_rates) for rank, pair_rates in pairs.items() if pair_rates}
        if best:
            text = f"{span(best.values(), 'GB/s', '.2f')} each way between neighbours"
            todo = (
                "check the link's width and error counters there (nvidia-smi nvlink, ibstat, "
                "ethtool), or leave the node out (--exclude)"
            )
            rows.append(named_row(level, text, "slow:", slow(best), hosts, todo))
    return rows


def _broken(broken: dict[int, Links], hosts: Sequence[str]) -> Row:
    ranks_of = by_text(
        (rank, f"{of_rank.problem} in {of_rank.stage}") for rank, of_rank in broken.items()
    )
    # Ranks that wait for others come last.
    ordered = sorted(ranks_of, key=lambda text: _WAITING in text)
    listed = grouped({text: ranks_of[text] for text in ordered}, hosts)
    todo = (
        "name the interface between the nodes in slurm/site.env (NCCL_SOCKET_IFNAME, "
        "GLOO_SOCKET_IFNAME), open the firewall between them, and see NCCL_DEBUG=INFO"
    )
    return Row("all-reduce", "FAIL", listed, todo)
