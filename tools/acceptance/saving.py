"""Saves: in the foreground and in the background, resumed, and resumed in another layout."""

from __future__ import annotations

import math
from typing import Any

from harness.run.verify import TOLERANCES
from harness.runfolder import RunFolder
from tools.acceptance.bench import Bench, Failed, expect
from tools.rehearsal.compare import apart, differing, done_twice

_STEPS, _SAVED_AT = 6, 3
_REPLICAS = "guard.replicas_every"


def look(bench: Bench) -> str:
    """Compare an uninterrupted run with one in two parts, and with one elsewhere."""
    whole, halves, moved = (RunFolder(bench.folder / n) for n in ("whole", "halves", "moved"))
    every = tuple(f"{key}={_SAVED_AT}" for key in ("save.every", "eval.every", _REPLICAS))

    def background() -> str:
        """Train without interruption, saving in the background."""
        settings = (*every, f"train.steps={_STEPS}", "save.async=true")
        bench.train(whole, *settings, name="whole", json_name="zero2")
        return _saves(bench, whole, "background")

    def foreground() -> str:
        """Train the first half of the same, saving in the foreground."""
        settings = (*every, f"train.steps={_SAVED_AT}")
        bench.train(halves, *settings, name="first", json_name="zero2")
        return _saves(bench, halves, "foreground")

    def resumed() -> str:
        """Train the second half; `check_probe` compares a loss before it goes on."""
        bench.train(halves, *every, f"train.steps={_STEPS}", name="second", json_name="zero2")
        lines, expected = halves.read_metrics(), whole.read_metrics()
        if twice := done_twice(lines, _SAVED_AT):
            raise Failed(f"not taken once, by the attempt whose turn it was: steps {twice}")
        if not (problems := differing(lines, expected)):
            return "steps after it equal the uninterrupted run's bit for bit"
        if not bench.on_cuda:
            raise Failed("; ".join(problems[:3]))
        return _close(lines, expected, [*range(_SAVED_AT + 1, _STEPS + 1)], _precision(halves))

    def elsewhere() -> str:
        """Go on with the first checkpoint of the uninterrupted run: ZeRO 3, on half the ranks."""
        bench.two_ranks()
        ranks = bench.power_of_two // 2
        settings = [f"resume.from={whole.path}@{_SAVED_AT}", f"train.steps={_STEPS}"]
        name = {"name": "moved", "json_name": "zero3", "ranks": ranks}
        bench.train(moved, *settings, **name)
        steps = [_SAVED_AT + 1, _SAVED_AT + 2]  # differences of rounding grow
        close = _close(moved.read_metrics(), whole.read_metrics(), steps, _precision(moved))
        return f"ZeRO 3 on {ranks} of {bench.ranks} ranks: {close}"

    def replicas() -> str:
        bench.two_ranks()
        events = [event["kind"] for event in whole.read_events()]
        expect("replicas_equal" in events, "no replicas were compared")
        return f"equal {events.count('replicas_equal')} times"

    bench.check("save in the background", background)
    bench.check("save in the foreground", foreground)
    bench.check("resume", resumed)
    bench.check("resume on other ranks", elsewhere)
    bench.check("replicas", replicas)
    saves = bench.values.get("background", {})
    rates = [part.get("bytes_per_s", math.nan) for part in bench.values.values()]
    return (
        f"background save stalls {saves.get('stall_s', math.nan):.2f} s; "
        f"{max(rates, default=math.nan) / 1e9:.3f} GB/s"
    )


def _saves(bench: Bench, run: RunFolder, how: str) -> str:
    events = [event for event in run.read_events() if event["kind"] == "saved"]
    expect(bool(events), "no save was recorded")
    keys = ("stall_s", "seconds", "bytes", "bytes_per_s")
    slowest = max(events, key=lambda event: event["stall_s"])
    bench.values[how] = {key: slowest[key] for key in keys}
    return (
        f"{slowest['bytes']:,} bytes in {slowest['seconds']:.2f} s, "
        f"training stalled {slowest['stall_s']:.2f} s"
    )


def _precision(run: RunFolder) -> str:
    return str((run.read_plan() or {})["precision"])


def _close(
    lines: list[dict[str, Any]], expected: list[dict[str, Any]], steps: list[int], precision: str
) -> str:
    loss, norm = (apart(lines, expected, steps, key) for key in ("loss", "grad_norm"))
    allowed = TOLERANCES[precision]
    text = (
        f"loss and norm of steps {steps[0]} to {steps[-1]} within {loss:.0e} and {norm:.0e} "
        f"(allowed {allowed[0]:.0e} and {allowed[1]:.0e})"
    )
    expect(loss <= allowed[0] and norm <= allowed[1], text)
    return text
