"""Collectives step by step: who sends what to whom, with bytes and time, and who needs them."""

from collections.abc import Callable
from math import ceil, log2
from typing import NamedTuple

from harness.estimate import traffic
from harness.estimate.step_time.exchanges import Group
from harness.estimate.step_time.machine import Machine, machine_of
from harness.report.chart import Mark, line, lines
from tools.studio_app import plans
from tools.studio_app.figures import Drawing, Figure, Table, numbers
from tools.studio_app.page import Choice, Page, Slider, Values, powers_of_two
from tools.studio_app.svg import WIDTH, Svg, series

Held = list[list[frozenset[tuple[int, int]]]]
"""The cells of each rank; each is the sum of parts (rank, cell), or empty."""
_LABEL, _ROW, _MIB = 70.0, 44.0, 2**20
_GPUS = powers_of_two(2, 1024)


class Message(NamedTuple):
    """A cell on its way; it is added to the receiver's cell, or replaces it."""

    sender: int
    receiver: int
    cell: int
    to_cell: int
    adds: bool = False


Rounds = list[list[Message]]
"""The messages of each step; those of one step are under way together."""


def reduce_scatter(ranks: int) -> Rounds:
    """Return a ring's steps after which rank r has the sum of all cells r."""
    return [_to_next(ranks, step + 1, adds=True) for step in range(ranks - 1)]


def all_gather(ranks: int) -> Rounds:
    """Return a ring's steps after which every rank has the cell r of each rank r."""
    return [_to_next(ranks, step, adds=False) for step in range(ranks - 1)]


def _to_next(ranks: int, behind: int, adds: bool) -> list[Message]:
    cells = [(rank, (rank - behind) % ranks) for rank in range(ranks)]
    return [Message(rank, (rank + 1) % ranks, cell, cell, adds) for rank, cell in cells]


def ring_all_reduce(ranks: int) -> Rounds:
    """Return a reduce-scatter and a gather (Patarasuk and Yuan, 2009)."""
    return reduce_scatter(ranks) + all_gather(ranks)


def tree_all_reduce(ranks: int) -> Rounds:
    """Return sums up a binary tree to rank 0, and copies down; every message is a whole vector."""
    spans = [2**level for level in range(ceil(log2(ranks)))]
    pairs = [[(low, low + n) for low in range(0, ranks - n, 2 * n)] for n in spans]
    cells = range(ranks)
    up = [[Message(b, a, c, c, True) for a, b in of_step for c in cells] for of_step in pairs]
    down = [[Message(a, b, c, c) for a, b in of_step for c in cells] for of_step in pairs[::-1]]
    return up + down


def all_to_all(ranks: int) -> Rounds:
    """Return steps in which pairs of ranks swap cells, after which rank r has the cell r of each
    rank, at that rank's place.
    """
    pairs = [[(r, (step - r) % ranks) for r in range(ranks)] for step in range(ranks)]
    rounds = [[Message(r, to, to, r) for r, to in of_step if r != to] for of_step in pairs]
    return [messages for messages in rounds if messages]


def _tree_seconds(group: Group, size: float, machine: Machine) -> float:
    """Return the seconds of a tree whose vectors go in pieces, so that every link works all the
    time: latencies up and down, and the vector twice (Sanders et al., 2009).
    """
    latency = machine.network_latency if group.nodes > 1 else machine.link_latency
    return 2 * ceil(log2(group.size)) * latency + 2 * size / group.rate(machine)


class Collective(NamedTuple):
    """A collective: its steps, its seconds by the planner's rings, and what it is for."""

    rounds: Callable[[int], Rounds]
    seconds: Callable[[Group, float, Machine], float]
    use: str


_RING, _TO_ALL = "all-reduce, ring", "all-to-all"
_GATHER, _SCATTER = "all-gather", "reduce-scatter"
COLLECTIVES = {
    _RING: Collective(ring_all_reduce, Group.reduce, "gradients; tensor parallelism"),
    "all-reduce, tree": Collective(tree_all_reduce, _tree_seconds, "norms, losses, overflow"),
    _SCATTER: Collective(reduce_scatter, Group.gather, "gradients of ZeRO 3"),
    _GATHER: Collective(all_gather, Group.gather, "weights of ZeRO 1 to 3"),
    _TO_ALL: Collective(all_to_all, Group.exchange, "sequence parallelism; experts"),
}


def begun(name: str, ranks: int) -> Held:
    """Return what each rank holds before a collective."""
    every = range(ranks)
    has = [[name != _GATHER or cell == rank for cell in every] for rank in every]
    return [[frozenset({(r, c)} if has[r][c] else ()) for c in every] for r in every]


def after(held: Held, messages: list[Message]) -> Held:
    """Return what each rank holds after a step."""
    then = [[*cells] for cells in held]
    for sender, receiver, cell, to_cell, adds in messages:
        part = held[sender][cell]
        then[receiver][to_cell] = part | held[receiver][to_cell] if adds else part
    return then


def sent(rounds: Rounds, ranks: int) -> int:
    """Return how many cells the busiest rank sends."""
    every = [message.sender for messages in rounds for message in messages]
    return max(map(every.count, range(ranks)))


def figures(values: Values) -> list[Figure]:
    """Return one step of a collective, its bytes and time, and the collectives of a model."""
    name, ranks, mib = values["collective"], values["ranks"], values["size"]
    rounds, held = COLLECTIVES[name].rounds(ranks), begun(name, ranks)
    now = round(values["progress"] / 100 * len(rounds))
    for messages in rounds[:now]:
        held = after(held, messages)
    machine = machine_of(values["gpu"], plans.PER_NODE, "bf16")

    def seconds(each: str, gpus: int) -> float:
        group = Group.of(gpus, 1, plans.PER_NODE)
        return COLLECTIVES[each].seconds(group, mib * _MIB, machine)

    title = f"{name}, after step {now} of {len(rounds)}: framed cells have just arrived"
    of_rank = f"{mib:,} MiB, by the busiest rank"
    gpus, far = values["gpus"], f"{machine.network_latency * 1e6:.0f}"
    rate = Group.of(gpus, 1, plans.PER_NODE).rate(machine)
    latencies = f"{machine.link_latency * 1e6:.0f} us a step, {far} us between nodes"
    return [
        numbers(
            ("Step", f"{now} of {len(rounds)}", f"for {ranks} ranks"),
            ("Sent so far", f"{sent(rounds[:now], ranks) * mib / ranks:,.1f} MiB", of_rank),
            ("Sent in the end", f"{sent(rounds, ranks) / ranks:.2f} x", of_rank),
            (f"On {gpus:,} GPUs", f"{seconds(name, gpus) * 1e3:,.3f} ms", "8 in a node"),
            ("Used for", "", COLLECTIVES[name].use),
            ("A ring's rate", f"{rate / 1e9:,.0f} GB/s", latencies),
        ),
        Drawing(
            title,
            _picture(title, held, rounds[now - 1] if now else []),
            [(series(rank), f"of rank {rank}") for rank in range(ranks)],
        ),
        lines(
            f"Time over the number of GPUs, {mib:,} MiB",
            [line(each, [(n, seconds(each, n) * 1e3) for n in _GPUS]) for each in COLLECTIVES],
            "GPUs",
            "ms",
            log_x=True,
            log_y=True,
            marks=[Mark({"x": gpus}, "var(--muted)", "chosen", True)],
            height=340,
        ),
        _of_a_step(values, machine),
    ]


def _picture(title: str, held: Held, messages: list[Message]) -> str:
    """Return a row of cells for each rank; a cell has a stripe for each part in it."""
    picture, each, high = Svg(len(held) * _ROW, title), (WIDTH - _LABEL) / len(held), _ROW - 8
    arrived = {(message.receiver, message.to_cell) for message in messages}
    for rank, cells in enumerate(held):
        top = rank * _ROW + 4
        picture.text(0, top + high / 2, f"rank {rank}", size=12, room=_LABEL - 6)
        for place, parts in enumerate(cells):
            left, width = _LABEL + place * each, each - 4
            if (rank, place) in arrived:
                picture.rect(left - 2, top - 3, width + 4, high + 6, "ink", radius=5)
            picture.rect(left, top, width, high, "grid")
            wide = width / max(1, len(parts))
            for stripe, (source, cell) in enumerate(sorted(parts)):
                box = (left + stripe * wide, top, wide, high)
                title = f"part {cell} of rank {source}"
                picture.rect(*box, series(source), radius=0, title=title)
    return str(picture)


def _of_a_step(values: Values, machine: Machine) -> Table:
    """Return the collectives of a step of a model, divided in three ways over 8 GPUs."""
    of = {"model": values["model"], "gpus": plans.PER_NODE, "gpu": values["gpu"], "seq_len": 2048}
    zero3, tensor, sequence = (
        plans.estimate_of(plans.planned({**of, "json": json}, tuple(changes))).inputs
        for json, *changes in (
            ("zero3",),
            ("zero1", f"tensor_parallel.autotp_size={plans.PER_NODE}"),
            ("zero1", f"sequence_parallel_size={plans.PER_NODE}"),
        )
    )
    calls = (
        ("ZeRO 3: weights", _GATHER, traffic.weights(zero3)),
        ("ZeRO 3: gradients", _SCATTER, traffic.gradients(zero3)),
        ("tensor parallelism: hidden states", _RING, traffic.tensor(tensor)),
        ("sequence parallelism: q, k, v and result", _TO_ALL, traffic.sequence(sequence)),
    )
    node, rows = Group.of(plans.PER_NODE, 1, plans.PER_NODE), []
    for what, name, call in calls:
        seconds = call.number * COLLECTIVES[name].seconds(node, call.bytes, machine)
        sizes = (f"{call.number:,.0f}", f"{call.bytes / _MIB:,.1f}", f"{seconds * 1e3:,.1f}")
        rows.append((what, name, *sizes))
    title = f"In one step of {values['model']} on 8 GPUs, micro-batches of 2,048 tokens"
    return Table(title, "for|collective|calls|MiB a call|ms, if nothing hides them", rows)


PAGE = Page(
    "collectives",
    (
        Choice("collective", "Collective", tuple(COLLECTIVES), _RING),
        Slider("ranks", "Ranks in the picture", (2, 3, 4, 6, 8), 4),
        Slider("progress", "Place", tuple(range(0, 101, 5)), 50, "%", plays=True),
        Slider("size", "Vector of a rank", (1, 8, 64, 512, 4096), 64, "MiB"),
        Slider("gpus", "GPUs", _GPUS, 64),
        plans.GPU,
        Choice("model", "A step of", plans.MODELS, "llama-3-8b"),
    ),
    figures,
)
