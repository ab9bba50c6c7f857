"""Faults: every end has its exit code on all ranks, and its reason is shown."""

from __future__ import annotations

import time

from harness.errors import ExitCode
from harness.runfolder import RunFolder
from tools.acceptance.bench import Bench, expect

_HANG_FLOOR_S = 6.0


def look(bench: Bench) -> str:
    """Raise, stop, hang and run out of memory, each on the last rank alone."""
    rank, slowest_s = bench.ranks - 1, [0.0]

    def run(do: str, code: int, *settings: str, step: int = 3) -> tuple[RunFolder, str]:
        folder = RunFolder(bench.folder / do / "run")
        began = time.monotonic()
        ended = bench.train(
            *(folder, "train.steps=6", "save.every=0", *settings),
            name=do,
            json_name="zero1",
            code=code,
            fault={"rank": rank, "step": step, "do": do},
        )
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
        # The first three steps may take as long as a compilation: what hangs comes after them.
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
