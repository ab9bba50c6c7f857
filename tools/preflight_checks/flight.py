"""The preflight itself: all ranks meet, measure and report; rank 0 judges."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from harness.engine.processes import own_device
from harness.errors import ConfigError, ExitCode
from harness.layout.world import World
from harness.plan.command import Command, plan_from
from harness.plan.plan import Plan
from harness.plan.text import spread
from harness.run.progress import Progress
from harness.terminal import columns, say
from tools.preflight_checks.device import Device, device_rows, measure_device
from tools.preflight_checks.environment import host_name
from tools.preflight_checks.machine import Machine, free_gpu_bytes, machine_rows, measure_machine
from tools.preflight_checks.meeting import Absent, Deadline, Meeting, absent, meet
from tools.preflight_checks.network import Links, measure_links, neighbour_rows, network_rows
from tools.preflight_checks.rates import rates
from tools.preflight_checks.report import Row, as_json, by_text, code, count, grouped, table, who
from tools.preflight_checks.sameness import Seen, clock_row, look, sameness_rows
from tools.preflight_checks.storage import (
    Storage,
    measure_storage,
    nearest_folder,
    storage_rows,
    token,
)

_COMING = 0.5  # of the limit, for all ranks to start
_GATHERING_S = 20.0
_REPORTING_S = 5.0


@dataclass(frozen=True)
class Facts:
    """All that one rank found out. None: it could not, and `problem` says why."""

    clock_s: float
    links: Links
    seen: Seen | None = None
    storage: Storage | None = None
    machine: Machine | None = None
    device: Device | None = None
    problem: str | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Facts:
        """Return the facts from their JSON form."""
        parts: dict[str, Any] = {
            "links": Links,
            "seen": Seen,
            "storage": Storage,
            "machine": Machine,
            "device": Device,
        }
        made = {name: part(**value[name]) for name, part in parts.items() if value[name]}
        return cls(**{**value, **made})


def fly(command: Command, in_json: bool, limit_s: float) -> int:
    """Do all of it on this rank; returns the exit code, which is the same on all ranks.

    Raises ValueError for an environment that is no launcher's, Absent where ranks do not come.
    """
    end = Deadline(time.monotonic() + limit_s)
    come_s = limit_s * _COMING
    world = World.from_environ()
    progress = Progress(enabled=world.rank == 0, stream=sys.stderr)
    plan, problems = _planned(command, world)
    progress.say(f"waiting up to {come_s:.0f} s for {count(world.world_size, 'rank')}")
    meeting = meet(world, come_s)
    meeting.give("here", {"host": host_name(), "problems": problems})
    with ExitStack() as stack:
        if world.rank == 0:
            came = meeting.collect("here", Deadline(end.end_s - limit_s + come_s))
            refusal = absent(came, come_s) or _refusal(came)
            there = sum(value is not None for value in came)
            word: dict[str, Any] = {"refused": refusal is not None, "ranks": there}
            if refusal is not None:
                say(f"cannot train: {refusal}", sys.stderr)
            else:
                assert plan is not None
                word["hosts"] = [value["host"] for value in came]
                word["token"] = stack.enter_context(token(nearest_folder(plan)))
            meeting.tell("word", word)
        word = meeting.hear("word", end)
        clock_s = time.time()
        if word["refused"]:
            meeting.part(word["ranks"])
            return int(ExitCode.BAD_CONFIG)
        assert plan is not None
        hosts = word["hosts"]
        facts, ended = _measured(plan, command, meeting, word, clock_s, end, progress)
        meeting.give("facts", asdict(facts))
        if world.rank == 0:
            reports = _reported(meeting, end)
            rows = judge(plan, hosts, reports)
            if in_json:
                print(
                    json.dumps({**as_json(rows), "rates": _rates(plan, hosts, reports)}, indent=2)
                )
                sys.stdout.flush()
            else:
                say(table(rows, columns(sys.stdout)))
            meeting.tell("code", int(code(rows)))
        exit_code = int(meeting.hear("code", end))
        meeting.part(word["ranks"])
    if not ended:
        sys.stdout.flush()
        os._exit(exit_code)  # a collective that hangs would not let the interpreter end
    return exit_code


def _rates(plan: Plan, hosts: Sequence[str], reports: Sequence[Facts | None]) -> dict[str, Any]:
    facts = [report for report in reports if report is not None]
    machines = [each.machine for each in facts if each.machine]
    return rates(plan, hosts, machines, [each.links for each in facts])


def _planned(command: Command, world: World) -> tuple[Plan | None, list[str]]:
    try:
        return plan_from(command, world=world), []
    except ConfigError as error:
        return None, error.problems


def _refusal(came: Sequence[dict[str, Any]]) -> str | None:
    """One report of what is wrong with the configs, on whichever rank; None where nothing is."""
    hosts = [value["host"] for value in came]
    ranks_of = by_text(
        (rank, text) for rank, report in enumerate(came) for text in report["problems"]
    )
    if not ranks_of:
        return None
    everywhere = len(came)
    return str(
        ConfigError(
            problem if len(ranks) == everywhere else f"{problem} (only on {who(ranks, hosts)})"
            for problem, ranks in ranks_of.items()
        )
    )


def _measured(
    plan: Plan,
    command: Command,
    meeting: Meeting,
    word: dict[str, Any],
    clock_s: float,
    end: Deadline,
    progress: Progress,
) -> tuple[Facts, bool]:
    """(what this rank finds, whether the network came to an end). Every rank does all parts."""
    hosts, rank = word["hosts"], plan.world.rank
    first_of_node = hosts.index(hosts[rank]) == rank
    nodes = count(len(set(hosts)), "node")
    parts: dict[str, tuple[str, Callable[[], Any]]] = {
        "seen": (
            f"all came, on {nodes}; comparing code, configs and data",
            lambda: look(plan, command.trust_remote_code, first_of_node),
        ),
        "storage": (
            "writing to the run folder's storage",
            lambda: measure_storage(plan, word["token"], writes=first_of_node),
        ),
        "machine": ("measuring machines", lambda: _machine(plan)),
        "device": (
            "checking devices",
            lambda: measure_device(own_device(plan.world)),
        ),
    }
    results: dict[str, Any] = {}
    for name, (title, measure) in parts.items():
        progress.say(title)
        # At once, as in training: alone, a rank has its node's power, memory and disks to itself.
        meeting.together(name, _GATHERING_S, end)
        try:
            results[name] = measure()
        except Exception as error:  # whatever it is, the others wait for this rank's report
            results.setdefault("problem", f"{type(error).__name__}: {error}")
    links, ended = Links(), True
    if len(hosts) > 1:
        progress.say("measuring the network")
        links, ended = measure_links(meeting, hosts, max(1.0, end.left_s - _REPORTING_S))
    return Facts(clock_s, links, **results), ended


def _machine(plan: Plan) -> Machine:
    free_gpu = free_gpu_bytes(plan)
    return measure_machine(plan, own_device(plan.world), free_gpu)


def _reported(meeting: Meeting, end: Deadline) -> list[Facts | None]:
    return [value and Facts.from_json(value) for value in meeting.collect("facts", end)]


def judge(plan: Plan, hosts: Sequence[str], reports: Sequence[Facts | None]) -> list[Row]:
    """All rows. `reports` by rank: None where a rank came, but did not report."""
    facts = {rank: report for rank, report in enumerate(reports) if report is not None}
    seen = {rank: f.seen for rank, f in facts.items() if f.seen}
    machines = {rank: f.machine for rank, f in facts.items() if f.machine}
    storage = {rank: f.storage for rank, f in facts.items() if f.storage}
    rows = [
        Row("plan", "ok", f"{plan.deepspeed_source}: {spread(plan)}"),
        _nodes(plan, hosts),
        *neighbour_rows(plan, hosts),
        *_silent(reports, hosts),
    ]
    rows += sameness_rows(seen, hosts) if seen else []
    rows.append(clock_row({rank: f.clock_s for rank, f in facts.items()}, hosts))
    rows += machine_rows(plan, machines, hosts, _rates(plan, hosts, reports)) if machines else []
    devices = {rank: f.device for rank, f in facts.items() if f.device}
    rows += device_rows(devices, hosts, plan.world.accelerator == "cuda") if devices else []
    rows += network_rows({rank: f.links for rank, f in facts.items()}, hosts)
    rows += storage_rows(plan, storage, hosts) if storage else []
    return rows


def _nodes(plan: Plan, hosts: Sequence[str]) -> Row:
    counts = {host: hosts.count(host) for host in hosts}
    planned = plan.world.local_world_size
    text = f"{count(len(hosts), 'rank')} on {count(len(counts), 'node')}"
    odd = [host for host, count in counts.items() if count != planned]
    if not odd:
        return Row("nodes", "ok", text)
    ranks = [rank for rank, host in enumerate(hosts) if host in odd]
    text += f"; planned with {planned} a node, unlike {who(ranks, hosts)}"
    todo = "the memory of a node is planned with so many ranks: use --ntasks-per-node"
    return Row("nodes", "warn", text, todo)


def _silent(reports: Sequence[Facts | None], hosts: Sequence[str]) -> list[Row]:
    """Ranks that came, but did not come to an end."""
    rows = []
    missing = [rank for rank, report in enumerate(reports) if report is None]
    if missing:
        todo = "a driver or a file system may hang there: leave the node out (--exclude)"
        rows.append(Row("reports", "FAIL", f"none from {who(missing, hosts)}", todo))
    problems = by_text((rank, f.problem) for rank, f in enumerate(reports) if f and f.problem)
    if problems:
        todo = "a run would meet the same there: mend it, or leave the node out (--exclude)"
        rows.append(Row("reports", "FAIL", grouped(problems, hosts), todo))
    return rows


__all__ = ["Absent", "fly", "judge"]
