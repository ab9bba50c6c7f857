"""Roofline: the kernels of a layer's forward pass on a GPU, and what limits each."""

from math import ceil, log10
from typing import NamedTuple

from harness.estimate.inputs import Inputs
from harness.estimate.step_time.layer import attention_flops, layer_passes, product_seconds
from harness.estimate.step_time.machine import Machine, machine_of
from harness.layout.shape import is_stacked
from harness.report.chart import line, lines
from tools.studio_app import plans
from tools.studio_app.figures import Figure, Table, numbers
from tools.studio_app.page import Choice, Page, Values

_COLOURS = {"attention": "muted", "elementwise": "ink"}


class Kernel(NamedTuple):
    """A kernel, or all elementwise ones, of a layer's forward pass of a micro-batch."""

    name: str
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Operations per byte of GPU memory read or written."""
        return self.flops / self.bytes

    def bound(self, machine: Machine) -> str:
        """Return what takes most of the kernel's time."""
        busy = self.seconds - machine.kernel_seconds
        if busy < machine.kernel_seconds:
            return "its start"
        return "memory" if self.bytes / machine.memory_rate > 0.99 * busy else "computation"


def ridge(machine: Machine) -> float:
    """Return the operations per byte from which computation limits a kernel."""
    return machine.peak_flops / machine.memory_rate


def kernels(inputs: Inputs, machine: Machine) -> list[Kernel]:
    """Return the kernels of the first layer. Raises ValueError if the plan times it otherwise."""
    tensors = inputs.shape.body.layers[0]
    if any(is_stacked(t) or t.kind in ("experts", "states") for t in tensors):
        raise ValueError("the page knows dense layers with attention: choose another model")
    e, rows, shape = inputs.element_bytes, inputs.tokens, inputs.shape
    forward = layer_passes(inputs, 0, machine).forward
    found: list[Kernel] = []
    for tensor in (t for t in tensors if len(t.shape) == 2):
        columns, depth = tensor.shape
        name = f"{tensor.name.removesuffix('.weight').rpartition('.')[2]} {columns:,} x {depth:,}"
        moved = e * (rows * columns + rows * depth + columns * depth)
        seconds = product_seconds(rows, columns, depth, e, machine)
        found.append(Kernel(name, 2.0 * rows * columns * depth, moved, seconds))
    moved = 2 * e * (shape.q_size + shape.kv_size) * rows
    seconds = max(forward.attention, moved / machine.memory_rate)
    found.append(Kernel("attention", attention_flops(inputs, 0), moved, seconds))
    through = forward.elements * machine.memory_rate
    return [*found, Kernel("elementwise", through / (2 * e), through, forward.elements)]


def figures(values: Values) -> list[Figure]:
    """Return the roofline with a layer's kernels, and their times."""
    inputs = plans.estimate_of(plans.planned(values)).inputs
    machine = machine_of(values["gpu"], plans.PER_NODE, inputs.products)
    each = kernels(inputs, machine)
    peak, rate = machine.peak_flops, machine.memory_rate
    most = max(ridge(machine), *(kernel.intensity for kernel in each))
    low, high = 0.1, 10.0 ** ceil(log10(most))
    total, flops = (sum(getattr(kernel, of) for kernel in each) for of in ("seconds", "flops"))
    roof = [(at, min(peak, at * rate) / 1e12) for at in (low, ridge(machine), high)]
    dots, rows = [], []
    for kernel in each:
        at = (kernel.intensity, kernel.flops / kernel.seconds / 1e12)
        dots.append(line(kernel.name, [at], _COLOURS.get(kernel.name, ""), "dots"))
        sizes = (f"{kernel.flops:.3g}", f"{kernel.bytes:.3g}", f"{kernel.intensity:,.2f}")
        rows.append((kernel.name, *sizes, f"{kernel.seconds * 1e6:,.1f}", kernel.bound(machine)))
    return [
        numbers(
            ("A layer, forward", f"{total * 1e3:,.3f} ms", "a micro-batch, without launches"),
            ("Reached", f"{flops / total / peak:.0%}", f"of {peak / 1e12:,.0f} TFLOP/s"),
            ("Products reach", f"{machine.products:.0%}", "of the peak, in full waves of tiles"),
            ("Memory", f"{rate / 1e9:,.0f} GB/s", "that elementwise kernels reach"),
            ("Ridge", f"{ridge(machine):,.0f}", "operations per byte, from these two roofs"),
            ("Start of a product", f"{machine.kernel_seconds * 1e6:.1f} us", "beside its work"),
        ),
        lines(
            "Operations per second of each kernel, under the roof of the GPU",
            [line("roof", roof, "ink"), *dots],
            "operations per byte",
            "TFLOP/s",
            log_x=True,
            log_y=True,
            x_range=(low, high),
            height=400,
        ),
        Table(
            "The kernels",
            "kernel|operations|bytes|operations per byte|microseconds|limited by",
            rows,
        ),
    ]


PAGE = Page(
    "kernels",
    (
        Choice("model", "Model", plans.MODELS, "llama-3-8b"),
        *(plans.GPU, plans.SEQ_LEN, plans.CONTEXT, plans.MICRO_BATCH, plans.PRECISION),
    ),
    figures,
)
