"""GPU memory anatomy: what the fullest GPU holds in each phase of a step."""

from contextlib import suppress

from harness.errors import ConfigError
from harness.estimate.memory_item import GIB, PHASES
from harness.estimate.timeline import Estimate
from harness.report.chart import Chart, line, lines
from harness.report.charts import group_of, grouped
from harness.report.formatting import gib
from harness.report.palette import COMPONENTS
from tools.studio_app import plans
from tools.studio_app.figures import Bars, Code, Drawing, Figure, Numbers, Table, numbers
from tools.studio_app.page import Page, Values
from tools.studio_app.svg import WIDTH, Svg

_BAR = 70.0
_GPUS = (1, 4, 16, 64, 1024)
_NAMED = 60.0  # a narrower part has no room for its name


def figures(values: Values) -> list[Figure]:
    """Return the memory of the fullest rank: at its peak, by phase, by component."""
    estimate = plans.estimate_of(plans.planned(values))
    return [
        numbers_of(estimate),
        _anatomy(estimate),
        by_phase(estimate),
        _by_gpus(values, estimate),
        _components(estimate),
        Code("Train with these settings", plans.train_command(values)),
    ]


def numbers_of(estimate: Estimate, *more: tuple[str, ...]) -> Numbers:
    """Return the verdict, and the numbers that it rests on."""
    worst, verdict = estimate.worst, estimate.verdict
    shown = f"{worst.shown.low / GIB:,.1f} to {gib(worst.shown.high)}"
    evidence = f"weakest evidence: {estimate.evidence}"
    return numbers(
        ("Verdict", verdict, evidence, plans.VERDICTS.get(verdict)),
        ("Peak on a GPU", gib(worst.peak), f"rank {worst.rank}, in {worst.peak_phase}"),
        ("The driver shows", shown, "allocator included"),
        ("Device", gib(estimate.device_bytes or 0)),
        ("Host memory", gib(estimate.host_bytes_per_node), "a node"),
        ("Checkpoint", gib(estimate.checkpoint_bytes), "on disk, of all ranks"),
        *more,
    )


def by_phase(estimate: Estimate) -> Bars:
    """Return the six uses of memory in each phase of a step."""
    phases = {name.replace("_", " "): estimate.worst.phase(name) for name in PHASES}
    return plans.memory_bars("Memory in each phase of a step", phases, estimate.device_bytes, 380)


def _by_gpus(values: Values, now: Estimate) -> Chart:
    """Return the peak with other numbers of GPUs, without those that cannot be planned."""
    here, peaks = values["gpus"], {values["gpus"]: now.worst.peak / GIB}
    for gpus in _GPUS:
        if gpus not in peaks:
            with suppress(ConfigError):
                estimate = plans.estimate_of(plans.planned({**values, "gpus": gpus}))
                peaks[gpus] = estimate.worst.peak / GIB
    device = now.device_bytes or 0
    return lines(
        "Peak of the fullest GPU over the number of GPUs",
        [line("peak", sorted(peaks.items())), line("now", [(here, peaks[here])], style="dots")],
        "GPUs",
        "GiB",
        limits=[(f"device, {gib(device)}", device / GIB)],
        log_x=True,
        x_range=(1, _GPUS[-1]),
        y_range=(0, 1.06 * max(*peaks.values(), device / GIB)),
        height=340,
    )


def _anatomy(estimate: Estimate) -> Drawing:
    """Return the device as a box that holds the six uses of memory."""
    worst = estimate.worst
    sizes = grouped(worst.phase(worst.peak_phase))
    groups = {name: size / GIB for name, size in sizes.items()}
    used, device = sum(groups.values()), (estimate.device_bytes or 0) / GIB
    scale = WIDTH / max(device, used)
    label = ", ".join(f"{name} {size:.2f} GiB" for name, size in groups.items())
    picture = Svg(_BAR + 62, f"Memory at the peak: {label}")
    picture.rect(0, 26, scale * device, _BAR, "surface", stroke="muted")
    left = 0.0
    for name, size in groups.items():
        width = scale * size
        shown = (name, f"{size:.2f}") if width >= _NAMED else ()
        picture.box(left, 26, width, _BAR, name, shown, title=f"{name}: {size:.2f} GiB", bold=True)
        left += width
    if device:
        at = scale * device
        picture.line([(at - 1, 18), (at - 1, 34 + _BAR)], "bad", width=2)
        picture.text(at - 4, 10, f"device {device:.0f} GiB", fill="bad", anchor="end", size=12)
    free = device - used
    text = f"{free:.2f} GiB free" if free >= 0 else f"{-free:.2f} GiB too much"
    picture.text(0, 48 + _BAR, f"{used:.2f} GiB in tensors; {text}", fill="muted")
    legend = [(name, f"{name} {groups[name]:.1f}") for name in COMPONENTS]
    return Drawing(f"The fullest GPU in {worst.peak_phase}, to scale", str(picture), legend)


def _components(estimate: Estimate) -> Table:
    worst = estimate.worst
    parts = sorted(worst.phase(worst.peak_phase).items(), key=lambda part: -part[1])
    rows = [
        (name, group_of(name), f"{size / GIB:,.3f}", worst.evidence(name)) for name, size in parts
    ]
    return Table(f"Components in {worst.peak_phase}", "component|group|GiB|evidence", rows)


PAGE = Page("memory", plans.PLAN_CONTROLS, figures)
