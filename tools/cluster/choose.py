"""Chooses the recommended layout: the least risky of those that no other beats by more than the
error of its estimated time.

A layout that is faster on paper is worth an axis or an offload only if it gains more than its
estimate may be wrong. docs/planner.md compares recommendations with layouts that others ran.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from harness.estimate.memory_item import GIB
from harness.estimate.step_time.step import TERMS
from harness.plan.speed import HEADROOM
from tools.cluster.count import Counted
from tools.cluster.layouts import Layout


@dataclass(frozen=True)
class Error:
    """Relative error of estimated times, measured on published runs of one kind of layout."""

    half: float
    """Half of the runs lie within it."""
    nine: float
    """Nine of ten runs lie within it."""
    rows: int
    """Number of published runs; 0 if none was found and the errors are guesses."""


ERRORS = {
    "ZeRO": Error(0.05, 0.14, 164),
    "offload": Error(0.02, 0.13, 8),
    "sequence": Error(0.05, 0.07, 5),
    "tensor": Error(0.06, 0.52, 13),
    "pipeline": Error(0.09, 0.25, 118),
    "hpZ": Error(0.1, 0.3, 0),
    "expert": Error(0.1, 0.3, 0),
    "launches": Error(0.19, 0.33, 6),
}
"""From tests/estimate/published, rounded up (sequence: NVIDIA's runs, which use other kernels;
launches: steps of which the host's launches take over a tenth, on hosts that are not known).
tests/estimate/test_published_throughput.py checks them.
"""
LAUNCH_SHARE = 0.1
"""Share of a step from which launches are a kind of their own."""
_FULL = 0.1
"""Largest relative gain for which a layout with headroom is preferred to one without."""
_EQUAL = 0.001
"""Largest relative difference of times that counts as equally fast."""
_TRIED = 40
"""Number of layouts to plan in search of one with headroom before one without is accepted."""
ASKED = (
    *("ZeRO 1", "ZeRO 2", "ZeRO 3", "hpZ", "tensor 2", "tensor 4", "tensor 8"),
    *("pipeline 2", "pipeline 4", "pipeline 8", "3D", "sequence", "expert", "offload"),
)
"""Ways to divide a job that an expert asks about, in the order of the answer."""


@dataclass(frozen=True)
class Answer:
    """All layouts of a job, and the ones that the answer shows."""

    counted: list[Counted]
    """The recommended layout first, then those that fit and those that may, fastest first, then
    those that do not fit, by the bytes they lack, and those that train.py rejects.
    """
    best: Counted | None
    """The recommended layout; None if nothing fits."""
    quickest: Counted | None
    """The fastest on paper of the layouts that fit and that train.py accepts."""
    ways: dict[str, Counted]
    """The best layout for each entry of ASKED, or the one that lacks the least memory."""


def way_of(layout: Layout) -> str:
    """Return the entry of ASKED that a layout belongs to."""
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
    """Return the error of a layout's time, relative to other layouts: the largest of its kinds."""
    kinds = {name for name in ("pipeline", "sequence", "expert") if getattr(layout, name) > 1}
    kinds |= {"tensor"} if layout.tensor > 1 and layout.pipeline == 1 else set()
    kinds |= {"offload"} if layout.offload != "none" or layout.activation_offload else set()
    kinds |= {"hpZ"} if layout.hpz else set()
    return max((ERRORS[kind] for kind in kinds or {"ZeRO"}), key=lambda error: error.half)


def printed_error(counted: Counted) -> Error:
    """Return the error of a layout's time by itself: a host that is not known may be slower or
    faster, which changes all layouts alike.
    """
    error, host = error_of(counted.layout), ERRORS["launches"]
    is_known = dict(counted.question.machine.rate_evidence).get("launch_scale") == "measured"
    if is_known or counted.time.terms["launches"] <= LAUNCH_SHARE * counted.seconds:
        return error
    fewest = min(error, host, key=lambda each: each.rows)
    return Error(max(error.half, host.half), max(error.nine, host.nine), fewest.rows)


def seconds_within(counted: Counted) -> tuple[float, float]:
    """Return the step times in seconds between which half of such published runs lie."""
    half = printed_error(counted).half
    return counted.seconds * (1 - half), counted.seconds * (1 + half)


def error_text(counted: Counted) -> str:
    """Return the range of step times that covers half of such published runs, as text."""
    error, (low, high) = printed_error(counted), seconds_within(counted)
    runs = "guessed, no comparable published run:"
    if error.rows:
        runs = f"{error.rows} comparable published runs:"
    return (
        f"{low:.2f} to {high:.2f} s ({runs} half within {error.half:.0%}, nine of ten within "
        f"{error.nine:.0%})"
    )


def risk(counted: Counted) -> tuple[int, ...]:
    """Return the risks of a layout, worst first: waits for the host, exchanges within layers, such
    exchanges between nodes, number of axes, features that no GPU has run yet (docs/performance.md),
    and partitioned weights or gradients.
    """
    layout, per_node = counted.layout, counted.question.some.gpus_per_node
    offloads = ("none", "optimizer", "all").index(layout.offload) + layout.activation_offload
    within = (layout.tensor > 1) + (layout.sequence > 1)
    neighbours = layout.tensor * max(layout.sequence, layout.expert)
    axes = within + (layout.pipeline > 1) + (layout.expert > 1) + layout.hpz
    is_new = axes > 0 or layout.mlp_tiles > 1 or isinstance(layout.checkpointing, int)
    return offloads, within, neighbours > per_node, axes, is_new, layout.zero > 1


_seconds = attrgetter("seconds")


def answer_of(counted: Iterable[Counted]) -> Answer:
    """Return the answer to a question.

    Plans and allocators are consulted only for layouts that decide what is shown.
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
    """Return the least risky layout that is expected to take no longer than the worst case of any
    other; None if nothing fits. `candidates`: layouts that may fit, sorted by time.
    """
    limit = float("inf")
    for each in candidates:
        if each.seconds >= limit:
            break
        most = each.seconds * (1 + error_of(each.layout).half)
        if most < limit and each.is_usable():
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
    """Return a short sentence that says why a layout is not the recommended one."""
    if best is None or not (each.answers and each.is_affordable):
        return each.why_it_does_not_fit()
    if each is best:
        return "recommended"
    faster = best.seconds / each.seconds - 1
    if faster < -_EQUAL:
        term = max(each.time.terms, key=lambda name: each.time.terms[name] - best.time.terms[name])
        share = (each.time.terms[term] - best.time.terms[term]) / best.seconds
        return f"{-1 + each.seconds / best.seconds:.0%} slower: {TERMS[term]} {share:+.0%}"
    half = error_of(each.layout).half
    quicker = f"{faster:.1%} quicker on paper (error {half:.0%})" if faster > _EQUAL else "as quick"
    return f"{quicker}, but {costs(each, best)}"


def costs(each: Counted, best: Counted) -> str:
    """Return the risk that a layout adds to the recommended one, as text."""
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


def _missing(each: Counted) -> tuple[int, float]:
    return each.missing_bytes + each.missing_host_bytes, each.seconds


def _order(each: Counted) -> tuple[int, float]:
    if each.trained is False:
        return 3, each.seconds
    if each.fits is False:
        return 2, _missing(each)[0]
    return int(each.fits is None), each.seconds
