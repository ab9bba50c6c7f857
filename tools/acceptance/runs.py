"""Whole runs. Saving: nothing is lost. Faults: all ranks end with the right exit code."""

import math
import time
from typing import Any

from harness.errors import ExitCode
from harness.runfolder import RunFolder
from tools.acceptance.bench import Bench, Failed, expect
from tools.rehearsal.stages import closeness, differing, done_twice

_STEPS, _SAVED_AT = 6, 3
_REPLICAS = "guard.replicas_every"
_HANG_FLOOR_S = 6.0


def save(bench: Bench) -> str:
    """Compare an uninterrupted run with one in two parts, and with one on other ranks."""
    whole, halves, moved = (RunFolder(bench.folder / n) for n in ("whole", "halves", "moved"))
    every = tuple(f"{key}={_SAVED_AT}" for key in ("save.every", "eval.every", _REPLICAS))

    def background() -> str:
        """Train without interruption, saving in the background."""
        settings = (*every, f"train.steps={_STEPS}", "save.async=true")
        bench.train(whole, *settings, name="whole", json_name="zero2")
        return _saves(bench, whole, "background")

    def foreground() -> str:
        """Train the first half of the same run, saving in the foreground."""
        settings = (*every, f"train.steps={_SAVED_AT}")
        bench.train(halves, *settings, name="first", json_name="zero2")
        return _saves(bench, halves, "foreground")

    def resumed() -> str:
        """Train the second half; `check_probe` compares a loss before it continues."""
        bench.train(halves, *every, f"train.steps={_STEPS}", name="second", json_name="zero2")
        lines, expected = halves.read_metrics(), whole.read_metrics()
        if twice := done_twice(lines, _SAVED_AT):
            raise Failed(f"not taken once, by the right attempt: steps {twice}")
        if not (problems := differing(lines, expected)):
            return "steps after it equal the uninterrupted run's bit for bit"
        if not bench.on_cuda:
            raise Failed("; ".join(problems[:3]))
        return _close(halves, lines, expected, [*range(_SAVED_AT + 1, _STEPS + 1)])

    def elsewhere() -> str:
        """Resume the first checkpoint of the uninterrupted run: ZeRO 3, on half the ranks."""
        bench.require_two_ranks()
        ranks = bench.power_of_two // 2
        settings = [f"resume.from={whole.path}@{_SAVED_AT}", f"train.steps={_STEPS}"]
        bench.train(moved, *settings, name="moved", json_name="zero3", ranks=ranks)
        steps = [_SAVED_AT + 1, _SAVED_AT + 2]  # rounding differences grow
        close = _close(moved, moved.read_metrics(), whole.read_metrics(), steps)
        return f"ZeRO 3 on {ranks} of {bench.ranks} ranks: {close}"

    def replicas() -> str:
        bench.require_two_ranks()
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


def _close(
    run: RunFolder, lines: list[dict[str, Any]], expected: list[dict[str, Any]], steps: list[int]
) -> str:
    precision = str((run.read_plan() or {})["precision"])
    is_close, text = closeness(lines, expected, steps, precision)
    expect(is_close, text)
    return text


def fail(bench: Bench) -> str:
    """Raise, stop, hang and run out of memory, each on the last rank only."""
    rank, slowest_s = bench.ranks - 1, [0.0]

    def run(do: str, code: int, *settings: str, step: int = 3) -> tuple[RunFolder, str]:
        folder = RunFolder(bench.folder / do / "run")
        began, fault = time.monotonic(), {"rank": rank, "step": step, "do": do}
        words = ("train.steps=6", "save.every=0", *settings)
        ended = bench.train(folder, *words, name=do, json_name="zero1", code=code, fault=fault)
        slowest_s[0] = max(slowest_s[0], time.monotonic() - began)
        return folder, ended.outputs[rank]

    def failing() -> str:
        _, output = run("raise", 1)
        expect("a failure that the acceptance planted" in output, "its traceback is not shown")
        return f"all ranks ended with code 1, rank {rank} with its traceback"

    def stopping() -> str:
        folder, _ = run("usr1", ExitCode.STOPPED)
        status = folder.read_status() or {}
        saved = folder.checkpoints_dir / f"step-{status.get('step', 0):08}"
        expect(saved.is_dir(), f"there is no {saved}")
        return f"saved at step {status['step']}, code 75"

    def hanging() -> str:
        floor = f"guard.hang_floor_s={_HANG_FLOOR_S:g}"
        # The first three steps may take as long as a compilation: the hang comes after them.
        folder, _ = run("sleep", ExitCode.HANG, floor, "guard.hang_first_s=600", step=5)
        message = (folder.read_status() or {}).get("message") or ""
        expect("plant.py" in message, f"the report does not show where it sleeps: {message}")
        return "code 78, with the line that it sleeps in"

    def out_of_memory() -> str:
        _, output = run("oom", 1)
        expect("ran out of memory" in output, "no advice is shown")
        expect("expected:" in output, "the estimate is not shown")
        return "the estimate and advice are shown, code 1"

    bench.check("a rank that raises", failing)
    bench.check("SIGUSR1 to a rank", stopping)
    bench.check("a rank that sleeps", hanging)
    bench.check("out of memory", out_of_memory)
    bench.values["slowest_s"] = slowest_s[0]
    return f"{len(bench.checks)} ends, the slowest run {slowest_s[0]:.0f} s"
