"""The preflight itself: all ranks meet, measure and report; rank 0 judges."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from harness.errors import ConfigError, ExitCode
from harness.estimate.fit import free_on_gpu
from harness.layout.world import World
from harness.plan.command import Command, plan_from
from harness.plan.plan import Plan
from harness.plan.text import spread
from harness.run.progress import Progress
from harness.terminal import columns, say
from tools.preflight_checks import files, machine, network, report
from tools.preflight_checks.files import Seen, Storage
from tools.preflight_checks.machine import Machine
from tools.preflight_checks.network import Links, Meeting
from tools.preflight_checks.report import Row, count, who

CLOCKS_S = 5.0  # locks and status files of two nodes are compared by their times
_COMING = 0.5  # fraction of the limit in which all ranks must start
_GATHERING_S = 20.0
_REPORTING_S = 5.0


@dataclass(frozen=True)
class Facts:
    """All measurements of one rank. One that failed is None, and `problem` says why."""

    clock_s: float
    links: Links
    seen: Seen | None = None
    storage: Storage | None = None
    machine: Machine | None = None
    problem: str | None = None


def fly(command: Command, host: str, in_json: bool, limit_s: float) -> int:
    """Run the preflight on this rank; return the exit code, the same on all ranks.

    Raises ValueError without a launcher's environment, Absent if ranks are missing.
    """
    began, come_s = time.monotonic(), limit_s * _COMING
    end_s = began + limit_s
    world = World.from_environ()
    progress = Progress(enabled=world.rank == 0, stream=sys.stderr)
    try:
        plan, problems = plan_from(command, world=world), []
    except ConfigError as error:
        plan, problems = None, error.problems
    progress.say(f"waiting up to {come_s:.0f} s for {count(world.world_size, 'rank')}")
    meeting = network.meet(world, host, come_s)
    # Before all ranks have come, none uses its device.
    free_gpu = free_on_gpu(world) if world.accelerator == "cuda" else None
    meeting.give("here", {"host": host, "problems": problems})
    with ExitStack() as stack:
        if world.rank == 0:
            came = meeting.collect("here", began + come_s)
            refusal = network.absent(came, come_s) or _refusal(came)
            there = sum(value is not None for value in came)
            word: dict[str, Any] = {"refused": refusal is not None, "ranks": there}
            if refusal is not None:
                say(f"cannot train: {refusal}", sys.stderr)
            else:
                word["hosts"] = [value["host"] for value in came]
                word["token"] = stack.enter_context(files.token(files.nearest_folder(plan)))
            meeting.tell("word", word)
        word = meeting.hear("word", end_s)
        clock_s = time.time()
        if word["refused"]:
            meeting.part(word["ranks"])
            return int(ExitCode.BAD_CONFIG)
        assert plan is not None
        facts, ended = _measured(plan, command, meeting, word, clock_s, end_s, progress, free_gpu)
        meeting.give("facts", asdict(facts))
        if world.rank == 0:
            of_ranks = TypeAdapter(list[Facts | None])
            reports = of_ranks.validate_python(meeting.collect("facts", end_s))
            meeting.tell("code", _reported(plan, word["hosts"], reports, in_json))
        exit_code = int(meeting.hear("code", end_s))
        meeting.part(word["ranks"])
    if not ended:
        sys.stdout.flush()
        os._exit(exit_code)  # a collective that hangs would not let the interpreter end
    return exit_code


def _refusal(came: Sequence[dict[str, Any]]) -> str | None:
    """Return one report of the problems of the configs on all ranks; None if there are none."""
    hosts = [value["host"] for value in came]
    ranks_of = report.by_text(
        (rank, text) for rank, value in enumerate(came) for text in value["problems"]
    )
    if not ranks_of:
        return None
    return str(
        ConfigError(
            problem if len(ranks) == len(came) else f"{problem} (only on {who(ranks, hosts)})"
            for problem, ranks in ranks_of.items()
        )
    )


def _measured(
    plan: Plan, command: Command, meeting: Meeting, word: dict[str, Any], clock_s: float,
    end_s: float, progress: Progress, free_gpu: int | None,
) -> tuple[Facts, bool]:  # fmt: skip
    """Return this rank's facts, and False if the network hangs. Every rank does all parts."""
    hosts, rank = word["hosts"], plan.world.rank
    first_of_node = hosts.index(hosts[rank]) == rank
    nodes = count(len(set(hosts)), "node")
    parts: dict[str, tuple[str, Callable[[], Any]]] = {
        "seen": (
            f"all came, on {nodes}; comparing code, configs and data",
            lambda: files.look(plan, command.trust_remote_code, first_of_node),
        ),
        "storage": (
            "writing to the run folder's storage",
            lambda: files.measure_storage(plan, word["token"], writes=first_of_node),
        ),
        "machine": ("measuring machines", lambda: machine.measure_machine(plan, free_gpu)),
    }
    results: dict[str, Any] = {}
    for name, (title, measure) in parts.items():
        progress.say(title)
        # All at once, as in training: alone, a rank would have its node's power, memory and disks.
        meeting.together(name, _GATHERING_S, end_s)
        try:
            results[name] = measure()
        except Exception as error:  # whatever it is, the others wait for this rank's report
            results.setdefault("problem", f"{type(error).__name__}: {error}")
    links, ended = Links(), True
    if len(hosts) > 1:
        progress.say("measuring the network")
        left_s = end_s - time.monotonic() - _REPORTING_S
        links, ended = network.measure_links(meeting, hosts, max(1.0, left_s))
    return Facts(clock_s, links, **results), ended


# --- judged on rank 0 ---


def _reported(
    plan: Plan, hosts: Sequence[str], reports: Sequence[Facts | None], in_json: bool
) -> int:
    """Print the table; return the exit code."""
    rows = judge(plan, hosts, reports)
    if in_json:
        values = {**report.as_json(rows), "rates": _rates(plan, hosts, reports)}
        print(json.dumps(values, indent=2), flush=True)
    else:
        say(report.table(rows, columns(sys.stdout)))
    return int(report.code(rows))


def judge(plan: Plan, hosts: Sequence[str], reports: Sequence[Facts | None]) -> list[Row]:
    """Return all rows. `reports` by rank: None if a rank joined, but did not report."""
    facts = {rank: f for rank, f in enumerate(reports) if f is not None}
    seen, machines, storage = (
        {rank: getattr(f, part) for rank, f in facts.items() if getattr(f, part)}
        for part in ("seen", "machine", "storage")
    )
    rows = [
        Row("plan", "ok", f"{plan.deepspeed_source}: {spread(plan)}"),
        _nodes(plan, hosts),
        *network.neighbour_rows(plan, hosts),
        *_silent(reports, hosts),
    ]
    rows += files.sameness_rows(seen, hosts) if seen else []
    rows.append(_clocks({rank: f.clock_s for rank, f in facts.items()}, hosts))
    rates = _rates(plan, hosts, reports)
    rows += machine.machine_rows(plan, machines, hosts, rates) if machines else []
    links = {rank: f.links for rank, f in facts.items()}
    rows += network.network_rows(links, hosts, judges_speed=plan.world.ranks_per_gpu == 1)
    return rows + (files.storage_rows(plan, storage, hosts) if storage else [])


def _nodes(plan: Plan, hosts: Sequence[str]) -> Row:
    planned = plan.world.local_world_size
    text = f"{count(len(hosts), 'rank')} on {count(len(set(hosts)), 'node')}"
    ranks = [rank for rank, host in enumerate(hosts) if hosts.count(host) != planned]
    todo = "the memory of a node is planned for this number of ranks: use --ntasks-per-node"
    return report.named_row(
        "nodes", text, f"planned with {planned} per node, unlike", ranks, hosts, todo
    )


def _silent(reports: Sequence[Facts | None], hosts: Sequence[str]) -> list[Row]:
    """Return rows for ranks that joined, but failed or did not report."""
    missing = [rank for rank, report in enumerate(reports) if report is None]
    rows = []
    if missing:
        todo = "a driver or a file system may hang there: leave the node out (--exclude)"
        rows.append(Row("reports", "FAIL", f"none from {who(missing, hosts)}", todo))
    problems = [(rank, f.problem) for rank, f in enumerate(reports) if f and f.problem]
    todo = "a run would fail there too: repair it, or leave the node out (--exclude)"
    row = report.problem_row("reports", "", problems, hosts, todo, "FAIL")
    return [*rows, *([row] if problems else [])]


def _clocks(clocks_s: dict[int, float], hosts: Sequence[str]) -> Row:
    """Compare clocks read when rank 0's message arrived, at almost the same time on every rank."""
    middle = statistics.median(clocks_s.values())
    off = {rank: abs(clock - middle) for rank, clock in clocks_s.items()}
    far = [rank for rank, value in off.items() if value > CLOCKS_S]
    text = f"within {max(off.values()):.1f} s of their median"
    todo = (
        "start the time service there (chronyc tracking): locks and timestamps of "
        "checkpoints rely on it"
    )
    return report.named_row("clocks", text, "off:", far, hosts, todo)


def _rates(plan: Plan, hosts: Sequence[str], reports: Iterable[Facts | None]) -> dict[str, Any]:
    """Return medians for plan_cluster.py --measured, in TFLOP/s and GB/s; None: not measured, as
    are ranks that share a GPU.
    """
    is_shared = plan.world.ranks_per_gpu > 1
    facts = [each for each in reports if each is not None and not is_shared]

    def median(values: Iterable[float | None]) -> float | None:
        numbers = [value for value in values if value is not None]
        return statistics.median(numbers) if numbers else None

    def between(level: str) -> float | None:
        return median(rate for each in facts for name, _, rate in each.links.pairs if name == level)

    return {
        "gpu": plan.world.gpu,
        "precision": plan.precision,
        "ranks": len(hosts),
        "nodes": len(set(hosts)),
        "matmul_tflops": median(each.machine.tflops for each in facts if each.machine),
        "layer_launch_ms": median(each.machine.launch_ms for each in facts if each.machine),
        "all_reduce_gb_per_s": median(each.links.all_reduce_gb_per_s for each in facts),
        "within_node_gb_per_s": between(network.WITHIN),
        "between_nodes_gb_per_s": between(network.BETWEEN),
    }
