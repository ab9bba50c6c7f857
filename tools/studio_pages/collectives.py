"""Collectives step by step: who sends what to whom, with bytes and time, and who needs them."""

from collections.abc import Callable
from math import ceil, log2
from typing import NamedTuple

from harness.estimate import traffic
from harness.estimate.step_time.exchanges import Group
from harness.estimate.step_time.machine import Machine, machine_of
from harness.report.chart import Chart, Mark, line, lines
from tools.studio_app import plans
from tools.studio_app.figures import Drawing, Figure, Table, numbers
from tools.studio_app.page import Choice, Page, Slider, Values, powers_of_two
from tools.studio_app.svg import WIDTH, Svg, series

Part = frozenset[tuple[int, int]]
"""What one cell of a rank holds: the summands (rank, place) that it came from; empty if nothing."""
Held = list[list[Part]]
"""The cells of each rank."""
_LABEL, _ROW = 70.0, 44.0
_MOST_RANKS = 1024
_MIB = 2**20


class Message(NamedTuple):
    """One cell on its way: it is added to the receiver's cell, or replaces it."""

    sender: int
    receiver: int
    cell: int
    to_cell: int
    adds: bool = False


Rounds = list[list[Message]]
"""The messages of each step; those of one step are under way together."""


def reduce_scatter(ranks: int) -> Rounds:
    """Return a ring's steps after which rank r has the sum of all cells r."""
    return [
        [_to_next(r, ranks, (r - step - 1) % ranks, adds=True) for r in range(ranks)]
        for step in range(ranks - 1)
    ]


def all_gather(ranks: int) -> Rounds:
    """Return a ring's steps after which every rank has the cell r of each rank r."""
    return [
        [_to_next(r, ranks, (r - step) % ranks, adds=False) for r in range(ranks)]
        for step in range(ranks - 1)
    ]


def ring_all_reduce(ranks: int) -> Rounds:
    """Return a reduce-scatter and a gather (Patarasuk and Yuan, 2009)."""
    return reduce_scatter(ranks) + all_gather(ranks)


def tree_all_reduce(ranks: int) -> Rounds:
    """Return sums up a binary tree to rank 0, and copies down; every message is a whole vector."""
    levels = [2**level for level in range(ceil(log2(ranks)))]

    def between(span: int) -> list[tuple[int, int]]:
        return [(low, low + span) for low in range(0, ranks - span, 2 * span)]

    cells = range(ranks)
    up = [[Message(b, a, c, c, True) for a, b in between(n) for c in cells] for n in levels]
    down = [[Message(a, b, c, c) for a, b in between(n) for c in cells] for n in levels[::-1]]
    return up + down


def all_to_all(ranks: int) -> Rounds:
    """Return steps in which pairs of ranks swap cells, after which rank r has the cell r of each
    rank, at that rank's place.
    """
    pairs = [[(r, (step - r) % ranks) for r in range(ranks)] for step in range(ranks)]
    rounds = [[Message(r, to, to, r) for r, to in of_step if r != to] for of_step in pairs]
    return [messages for messages in rounds if messages]


def _to_next(rank: int, ranks: int, cell: int, adds: bool) -> Message:
    return Message(rank, (rank + 1) % ranks, cell, cell, adds)


class Collective(NamedTuple):
    """A collective: its steps, its seconds by the planner's rings, and what it is for."""

    rounds: Callable[[int], Rounds]
    seconds: Callable[[Group, float, Machine], float]
    use: str


def _tree_seconds(group: Group, size: float, machine: Machine) -> float:
    """Return the seconds of a tree whose vectors go in pieces, so that every link works all the
    time: latencies up and down, and the vector twice (Sanders et al., 2009).
    """
    far, levels = group.nodes > 1, ceil(log2(group.size))
    latency = machine.network_latency if far else machine.link_latency
    return 2 * levels * latency + 2 * size / group.rate(machine)


COLLECTIVES = {
    "all-reduce, ring": Collective(
        ring_all_reduce, Group.reduce, "gradients (ZeRO 1), hidden states of tensor parallelism"
    ),
    "all-reduce, tree": Collective(
        tree_all_reduce, _tree_seconds, "small sums over many ranks: norms, losses, overflow"
    ),
    "reduce-scatter": Collective(reduce_scatter, Group.gather, "gradients of ZeRO 3"),
    "all-gather": Collective(all_gather, Group.gather, "weights of ZeRO 1 to 3"),
    "all-to-all": Collective(
        all_to_all, Group.exchange, "sequence parallelism: tokens to heads; experts: tokens"
    ),
}


def begun(name: str, ranks: int) -> Held:
    """Return what each rank holds before a collective."""
    own = [[frozenset({(rank, cell)}) for cell in range(ranks)] for rank in range(ranks)]
    if name != "all-gather":
        return own
    return [
        [part if cell == rank else frozenset() for cell, part in enumerate(own[rank])]
        for rank in range(ranks)
    ]


def after(held: Held, messages: list[Message]) -> Held:
    """Return what each rank holds after a step."""
    then = [[*cells] for cells in held]
    for sender, receiver, cell, to_cell, adds in messages:
        part = held[sender][cell]
        then[receiver][to_cell] = part | held[receiver][to_cell] if adds else part
    return then


def figures(values: Values) -> list[Figure]:
    """Return one step of a collective, its bytes and time, and the collectives of a model."""
    name, ranks, size = values["collective"], values["ranks"], values["size"] * _MIB
    chosen = COLLECTIVES[name]
    rounds = chosen.rounds(ranks)
    now = round(values["progress"] / 100 * len(rounds))
    held = begun(name, ranks)
    for messages in rounds[:now]:
        held = after(held, messages)
    under_way = rounds[now - 1] if now else []
    sent = [_sent(rounds[:now], rank) * size / ranks / _MIB for rank in range(ranks)]
    whole = max(_sent(rounds, rank) for rank in range(ranks)) / ranks
    machine = machine_of(values["gpu"], plans.PER_NODE, "bf16")
    group = Group.of(values["gpus"], 1, plans.PER_NODE)
    seconds = chosen.seconds(group, size, machine)
    title = f"{name}: before the first step"
    if now:
        title = f"{name}, step {now} of {len(rounds)}: framed cells have just arrived"
    return [
        numbers(
            ("Step", f"{now} of {len(rounds)}", f"for {ranks} ranks"),
            ("Sent so far", f"{max(sent):,.1f} MiB", "by the busiest rank"),
            ("Sent in the end", f"{whole:.2f} x", f"{values['size']:,} MiB, by the busiest rank"),
            (f"On {group.size:,} GPUs", f"{seconds * 1e3:,.3f} ms", f"{group.nodes:,} nodes of 8"),
            ("Used for", name.partition(",")[0], chosen.use),
        ),
        Drawing(
            title,
            _picture(title, held, under_way),
            [(series(rank), f"of rank {rank}") for rank in range(ranks)],
        ),
        _over_ranks(size, machine, group.size),
        _of_a_step(values, machine),
    ]


def _sent(rounds: Rounds, rank: int) -> int:
    """Return how many cells a rank sends."""
    return sum(message.sender == rank for messages in rounds for message in messages)


def _picture(title: str, held: Held, messages: list[Message]) -> str:
    """Return a row of cells for each rank; a cell has a stripe for each summand in it."""
    picture, count = Svg(len(held) * _ROW, title), len(held)
    each = (WIDTH - _LABEL) / count
    arrived = {(message.receiver, message.to_cell) for message in messages}
    for rank, cells in enumerate(held):
        top = rank * _ROW + 4
        picture.text(0, top + (_ROW - 8) / 2, f"rank {rank}", size=12, room=_LABEL - 6)
        for place, part in enumerate(cells):
            left, width = _LABEL + place * each, each - 4
            if (rank, place) in arrived:
                picture.rect(left - 2, top - 3, width + 4, _ROW - 2, "ink", radius=5)
            picture.rect(left, top, width, _ROW - 8, "grid")
            for stripe, (source, cell) in enumerate(sorted(part)):
                wide = width / len(part)
                says = f"part {cell} of rank {source}"
                place_of = (left + stripe * wide, top, wide, _ROW - 8)
                picture.rect(*place_of, series(source), radius=0, title=says)
    return str(picture)


def _over_ranks(size: float, machine: Machine, gpus: int) -> Chart:
    counts = powers_of_two(2, _MOST_RANKS)
    curves = [
        line(
            name,
            [(n, one.seconds(Group.of(n, 1, plans.PER_NODE), size, machine) * 1e3) for n in counts],
        )
        for name, one in COLLECTIVES.items()
    ]
    marks = [Mark({"x": gpus}, "var(--muted)", "chosen", True)]
    title = f"Time over the number of GPUs, {size / _MIB:,.0f} MiB"
    return lines(title, curves, "GPUs", "ms", log_x=True, log_y=True, marks=marks, height=340)


def _of_a_step(values: Values, machine: Machine) -> Table:
    """Return the collectives of a step of a model, divided in three ways over 8 GPUs."""
    of = {"model": values["model"], "gpus": plans.PER_NODE, "gpu": values["gpu"], "seq_len": 2048}
    node, rows = Group.of(plans.PER_NODE, 1, plans.PER_NODE), []

    def inputs(json: str, *changes: str) -> traffic.Inputs:
        return plans.estimate_of(plans.planned({**of, "json": json}, changes)).inputs

    zero3 = inputs("zero3")
    tensor = inputs("zero1", f"tensor_parallel.autotp_size={plans.PER_NODE}")
    sequence = inputs("zero1", f"sequence_parallel_size={plans.PER_NODE}")
    calls = {
        ("ZeRO 3: weights", "all-gather"): traffic.weights(zero3),
        ("ZeRO 3: gradients", "reduce-scatter"): traffic.gradients(zero3),
        ("tensor parallelism: hidden states", "all-reduce, ring"): traffic.tensor(tensor),
        ("sequence parallelism: q, k, v and result", "all-to-all"): traffic.sequence(sequence),
    }
    for (what, name), call in calls.items():
        seconds = call.number * COLLECTIVES[name].seconds(node, call.bytes, machine)
        cost = (f"{call.number:,.0f}", f"{call.bytes / _MIB:,.1f}", f"{seconds * 1e3:,.1f}")
        rows.append((what, name, *cost))
    title = f"In one step of {values['model']} on 8 GPUs, micro-batches of a sample of 2,048 tokens"
    return Table(title, "for|collective|calls|MiB a call|ms, if nothing hides them", rows)


PAGE = Page(
    "collectives",
    (
        Choice("collective", "Collective", tuple(COLLECTIVES), "all-reduce, ring"),
        Slider("ranks", "Ranks in the picture", (2, 3, 4, 6, 8), 4),
        Slider("progress", "Place", tuple(range(0, 101, 5)), 50, "%", plays=True),
        Slider("size", "Vector of a rank", (1, 8, 64, 512, 4096), 64, "MiB"),
        Slider("gpus", "GPUs", powers_of_two(2, _MOST_RANKS), 64),
        plans.GPU,
        Choice("model", "A step of", plans.MODELS, "llama-3-8b"),
    ),
    figures,
)
