"""The page of what a GPU's memory is used for."""

from __future__ import annotations

from contextlib import suppress

from harness.errors import ConfigError
from harness.estimate.held import GIB, PHASES
from harness.estimate.timeline import Estimate
from harness.report.charts import group_of
from tools.look.palette import COMPONENTS
from tools.studio_app.charts import Axis, Line, lines, stacked
from tools.studio_app.memory import VERDICTS, gib, grouped_gib
from tools.studio_app.page import Chart, Drawing, Figure, Number, Numbers, Page, Table, Values
from tools.studio_app.plans import PLAN_CONTROLS, estimate_of, plan_of
from tools.studio_app.svg import Svg

_WIDTH, _BAR = 760.0, 70.0
_GPUS = (1, 4, 16, 64, 1024)
_NAMED = 60.0  # a narrower part has no room for its name


def figures(values: Values) -> list[Figure]:
    """Return the memory of the fullest rank: at its peak, by phase, by component."""
    estimate = estimate_of(plan_of(values))
    return [
        Numbers(numbers_of(estimate)),
        _anatomy(estimate),
        Chart("Memory in each phase of a step, GiB", by_phase(estimate), 380),
        Chart(
            "The fullest GPU at its peak over the number of GPUs, GiB", _by_gpus(values, estimate)
        ),
        _components(estimate),
    ]


def numbers_of(estimate: Estimate) -> list[Number]:
    """Return the verdict, and the figures that it rests on."""
    worst, device = estimate.worst, estimate.device_bytes or 0
    verdict, shown = VERDICTS.get(estimate.verdict), worst.shown
    return [
        Number("Verdict", estimate.verdict, f"weakest evidence: {estimate.evidence}", verdict),
        Number("Peak on a GPU", gib(worst.peak), f"rank {worst.rank}, in {worst.peak_phase}"),
        Number(
            "The driver shows", f"{shown.low / GIB:,.1f} to {gib(shown.high)}", "allocator included"
        ),
        Number("Device", gib(device)),
        Number("Host memory", gib(estimate.host_bytes_per_node), "a node"),
        Number("Checkpoint", gib(estimate.checkpoint_bytes), "on disk, of all ranks"),
    ]


def by_phase(estimate: Estimate) -> dict[str, object]:
    """Return the chart of the six groups over the phases, with the device as a limit."""
    phases = [grouped_gib(estimate.worst.phase(name)) for name in PHASES]
    parts = {group: [phase[group] for phase in phases] for group in COMPONENTS}
    device = estimate.device_bytes
    limits = {f"device, {gib(device)}": device / GIB} if device else {}
    return stacked(
        [name.replace("_", " ") for name in PHASES],
        parts,
        Axis("GiB"),
        colours={group: group for group in parts},
        limits=limits,
    )


def _by_gpus(values: Values, now: Estimate) -> dict[str, object]:
    """The peak on other numbers of GPUs, all else equal; without those that cannot be planned."""
    peaks = {values["gpus"]: now.worst.peak / GIB}
    for gpus in _GPUS:
        if gpus not in peaks:
            with suppress(ConfigError):
                other = estimate_of(plan_of({**values, "gpus": gpus}))
                peaks[gpus] = other.worst.peak / GIB
    here = (values["gpus"], peaks[values["gpus"]])
    curves = [Line("peak", sorted(peaks.items())), Line("now", [here], "series-2", dots=True)]
    device = now.device_bytes or 0
    limits = {f"device, {gib(device)}": device / GIB}
    return lines(
        curves,
        Axis("GPUs", "log", low=1, high=_GPUS[-1], ends=True),
        Axis("GiB", low=0),
        limits=limits,
    )


def _anatomy(estimate: Estimate) -> Drawing:
    """The device as a box, with the six groups in it."""
    worst = estimate.worst
    groups = grouped_gib(worst.phase(worst.peak_phase))
    device = (estimate.device_bytes or 0) / GIB
    whole = max(device, sum(groups.values()))
    label = ", ".join(f"{name} {size:.2f} GiB" for name, size in groups.items())
    picture = Svg(_WIDTH, _BAR + 62, f"Memory at the peak: {label}")
    picture.rect(0, 26, _WIDTH * device / whole, _BAR, "surface", stroke="muted")
    left = 0.0
    for name, size in groups.items():
        width = _WIDTH * size / whole
        picture.rect(left, 26, width, _BAR, name, title=f"{name}: {size:.2f} GiB")
        if width >= _NAMED:
            middle, text = left + width / 2, f"{size:.2f}"
            ink = "on-colour"
            picture.text(
                middle, 50, name, fill=ink, anchor="middle", size=12, bold=True, room=width
            )
            picture.text(middle, 72, text, fill=ink, anchor="middle", size=12, room=width)
        left += width
    free = device - sum(groups.values())
    at = _WIDTH * device / whole
    if device:
        picture.line([(at - 1, 18), (at - 1, 34 + _BAR)], "bad", width=2)
        picture.text(at - 4, 10, f"device {device:.0f} GiB", fill="bad", anchor="end", size=12)
    text = f"{free:.2f} GiB free" if free >= 0 else f"{-free:.2f} GiB too much"
    picture.text(0, 48 + _BAR, f"{sum(groups.values()):.2f} GiB in tensors; {text}", fill="muted")
    legend = [(name, f"{name} {groups[name]:.1f}") for name in COMPONENTS]
    return Drawing(f"The fullest GPU in {worst.peak_phase}, to scale", str(picture), legend)


def _components(estimate: Estimate) -> Table:
    worst = estimate.worst
    parts = sorted(worst.phase(worst.peak_phase).items(), key=lambda part: -part[1])
    return Table(
        f"Components in {worst.peak_phase}",
        ("component", "group", "GiB", "evidence"),
        [
            (name, group_of(name), f"{size / GIB:,.3f}", worst.evidence(name))
            for name, size in parts
        ],
    )


PAGE = Page(
    slug="memory",
    title="GPU memory anatomy",
    controls=PLAN_CONTROLS,
    figures=figures,
    computed_by=("harness.plan.make.make_plan", "harness.estimate.timeline.estimate_memory"),
    formula="Model states in mixed precision with Adam: 2 bytes of weights, 2 or 4 of gradients "
    "and 12 of fp32 master weights and moments per parameter, divided by the ZeRO stage; plus "
    "activations (bytes that autograd saves, operation by operation), logits and buffers. A run "
    "fits if the upper end of what the driver will show is "
    "below the device, and is tight if only the lower end is.",
    sources=(
        ("ZeRO, arXiv 1910.02054, section 3", "https://arxiv.org/abs/1910.02054"),
        ("Reducing activations, arXiv 2205.05198", "https://arxiv.org/abs/2205.05198"),
    ),
)
