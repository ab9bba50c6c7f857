"""The recommended layout: least risk among those that none beats beyond the error of its time.

A quicker layout on paper is worth an axis or an offload only if it gains more than its estimate may
be wrong. docs/planner.md shows recommendations beside layouts that others ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.estimate.held import GIB
from harness.estimate.step_time.step import TERMS
from tools.cluster.count import Counted
from tools.cluster.layouts import Layout


@dataclass(frozen=True)
class Error:
    """Relative error of estimated times beside published runs of a kind of layout."""

    half: float
    """Half of the runs lie within it."""
    nine: float
    """Nine of ten do."""
    rows: int
    """Published runs; 0: none was found, and the errors are guessed."""


ERRORS = {
    "ZeRO": Error(0.05, 0.14, 162),
    "offload": Error(0.05, 0.13, 8),
    "sequence": Error(0.07, 0.08, 5),
    "tensor": Error(0.08, 0.53, 12),
    "pipeline": Error(0.09, 0.27, 118),
    "hpZ": Error(0.1, 0.3, 0),
    "expert": Error(0.1, 0.3, 0),
}
"""Judged rows of tests/estimate/published/throughput.csv (sequence: NVIDIA's, whose kernels are
others), rounded up; tests/estimate/test_published_throughput.py holds them."""
HEADROOM = 0.05
"""Share of a GPU that the upper end of a recommended layout's memory leaves free."""
_FULL = 0.1
"""Relative gain up to which a layout with headroom is preferred to one without."""
_EQUAL = 0.001
"""Relative difference of times that is called as quick."""
_TRIED = 40
"""Layouts of a list that are planned before one without headroom is taken."""
ASKED = (
    *("ZeRO 1", "ZeRO 2", "ZeRO 3", "hpZ", "tensor 2", "tensor 4", "tensor 8"),
    *("pipeline 2", "pipeline 4", "pipeline 8", "3D", "sequence", "expert", "offload"),
)
"""Ways to divide that an expert asks about, in the order in which an answer has them."""


@dataclass(frozen=True)
class Answer:
    """Every layout of a job, and those that an answer shows."""

    counted: list[Counted]
    """The recommended one, others that fit, quickest first, those that may, then the rest by the
    bytes that they lack."""
    best: Counted | None
    """The recommended one; None if nothing fits."""
    quickest: Counted | None
    """On paper, of those that fit and are trained."""
    ways: dict[str, Counted]
    """The best of each way of ASKED, or what lacks least."""


def way_of(layout: Layout) -> str:
    """Return the way to divide under which an expert asks about a layout."""
    if layout.offload != "none" or layout.activation_offload:
        return "offload"
    if layout.expert > 1:
        return "expert"
    if layout.pipeline > 1:
        return "3D" if layout.tensor > 1 else f"pipeline {layout.pipeline}"
    if layout.sequence > 1:
        return "sequence"
    if layout.tensor > 1:
        return f"tensor {layout.tensor}"
    return "hpZ" if layout.hpz else f"ZeRO {layout.zero}"


def error_of(layout: Layout) -> Error:
    """Return the error of a layout's time: the largest of what it is made of."""
    kinds = {name for name in ("pipeline", "sequence", "expert") if getattr(layout, name) > 1}
    kinds |= {"tensor"} if layout.tensor > 1 and layout.pipeline == 1 else set()
    kinds |= {"offload"} if layout.offload != "none" or layout.activation_offload else set()
    kinds |= {"hpZ"} if layout.hpz else set()
    return max((ERRORS[kind] for kind in kinds or {"ZeRO"}), key=lambda error: error.half)


def seconds_within(counted: Counted) -> tuple[float, float]:
    """Return the seconds of a step between which half of the published runs of its kind lie."""
    half = error_of(counted.layout).half
    return counted.seconds * (1 - half), counted.seconds * (1 + half)


def error_text(counted: Counted) -> str:
    """Return the seconds between which half of the published runs of its kind lie, and why."""
    error, (low, high) = error_of(counted.layout), seconds_within(counted)
    runs = "guessed, no comparable published run:"
    if error.rows:
        runs = f"{error.rows} comparable published runs:"
    return (
        f"{low:.2f} to {high:.2f} s ({runs} half within {error.half:.0%}, nine of ten within "
        f"{error.nine:.0%})"
    )


def risk(counted: Counted) -> tuple[int, ...]:
    """Return what may go wrong with a layout, worst first: waiting for the host, exchanges within
    layers, these over nodes, the number of axes, parts that ran on no GPU yet
    (docs/performance.md), weights or gradients that are divided.
    """
    layout, per_node = counted.layout, counted.question.some.gpus_per_node
    offloads = ("none", "optimizer", "all").index(layout.offload) + layout.activation_offload
    within = (layout.tensor > 1) + (layout.sequence > 1)
    neighbours = layout.tensor * max(layout.sequence, layout.expert)
    axes = within + (layout.pipeline > 1) + (layout.expert > 1) + layout.hpz
    is_new = axes > 0 or layout.mlp_tiles > 1 or isinstance(layout.checkpointing, int)
    return offloads, within, neighbours > per_node, axes, is_new, layout.zero > 1


def answer_of(counted: Iterable[Counted]) -> Answer:
    """Return the answer to a question.

    Whether a layout fits is asked of its allocator, and whether it is trained of its plan, only
    where that decides what is shown.
    """
    every = [*counted]
    candidates = sorted((each for each in every if each.fits is not False), key=_seconds)
    best = recommended(candidates)
    lists: dict[str, list[Counted]] = {way: [] for way in ASKED}
    for each in candidates:
        lists.setdefault(way_of(each.layout), []).append(each)
    ways: dict[str, Counted] = {}
    for way in ASKED:
        if best is not None and way_of(best.layout) == way:
            ways[way] = best
        elif (own := recommended(lists[way])) or (
            own := min((e for e in every if way_of(e.layout) == way), key=_missing, default=None)
        ):
            ways[way] = own
    usable = [each for each in candidates if each.answers and each.trained]
    return Answer(
        sorted(every, key=lambda each: (each is not best, _order(each))),
        *(best, min(usable, key=_seconds, default=None), ways),
    )


def recommended(candidates: Sequence[Counted]) -> Counted | None:
    """Return the layout with least risk of those that take no longer than any other may at most;
    None if nothing fits. `candidates`: may fit, quickest first.
    """
    limit = float("inf")
    for each in candidates:
        if each.seconds >= limit:
            break
        if (most := seconds_within(each)[1]) < limit and each.is_usable():
            most = most if each.has_room(HEADROOM) else max(most, each.seconds * (1 + _FULL))
            limit = min(limit, most)
    within = [each for each in candidates if each.seconds <= limit < float("inf")]
    within.sort(key=lambda each: (risk(each), each.seconds))
    full: Counted | None = None
    for each in [each for each in within if each.may_have_room(HEADROOM)][:_TRIED]:
        if each.is_usable():
            if each.has_room(HEADROOM):
                return each
            full = full or each
    return full or next((each for each in within if each.is_usable()), None)


def why_not(each: Counted, best: Counted | None) -> str:
    """Return in a short sentence why a layout is not the recommended one."""
    if best is None or not each.answers:
        return each.why_it_does_not_fit()
    if each is best:
        return "recommended"
    faster = best.seconds / each.seconds - 1
    if faster < -_EQUAL:
        term = max(each.terms, key=lambda name: each.terms[name] - best.terms[name])
        share = (each.terms[term] - best.terms[term]) / best.seconds
        return f"{-1 + each.seconds / best.seconds:.0%} slower: {TERMS[term]} {share:+.0%}"
    half = error_of(each.layout).half
    quicker = f"{faster:.1%} quicker on paper (error {half:.0%})" if faster > _EQUAL else "as quick"
    return f"{quicker}, but {costs(each, best)}"


def costs(each: Counted, best: Counted) -> str:
    """Return what a layout risks that the recommended one does not."""
    if best.has_room(HEADROOM) and not each.has_room(HEADROOM):
        left = (each.question.device_bytes - each.peak_interval[1]) / GIB
        return f"it may leave only {max(0.0, left):.1f} GiB of the GPU"
    one, other = risk(each), risk(best)
    if one[0] > other[0]:
        return "it waits for the host's memory and link"
    if parts := [
        text
        for axis, text in _PARTS.items()
        if getattr(each.layout, axis) > 1 >= getattr(best.layout, axis)
        or (axis == "hpz" and each.layout.hpz > best.layout.hpz)
    ]:
        return f"it {' and '.join(parts)}"
    if one[2] > other[2]:
        return "its layers communicate across nodes"
    if one[4] > other[4]:
        return "it has not run on a GPU yet"
    return f"it is ZeRO {each.layout.zero}" if one[5] > other[5] else "it fills the GPU more"


_PARTS = {
    "tensor": "shards every matrix",
    "sequence": "shards every sequence",
    "pipeline": "adds pipeline stages",
    "expert": "shards experts",
    "hpz": "keeps a second copy of the weights",
}


def _seconds(each: Counted) -> float:
    return each.seconds


def _missing(each: Counted) -> tuple[int, float]:
    return each.missing_bytes + each.missing_host_bytes, each.seconds


def _order(each: Counted) -> tuple[int, float]:
    if each.trained is False:
        return 3, each.seconds
    if each.fits is False:
        return 2, _missing(each)[0]
    return int(each.fits is None), each.seconds
