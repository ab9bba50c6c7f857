"""tools/accept_gpu.py with steps that pass, fail, raise, hang and write garbage."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tools import accept_gpu
from tools.acceptance.bench import Bench, expect
from tools.acceptance.report import Step

NAMES = ("good", "skipped", "failing", "raising", "rubbish", "hanging")
STEPS = [Step(name, f"{name}?", f"tests.planted_acceptance:{name}") for name in NAMES]
IN_A_SESSION_OF_ITS_OWN = "trap '' TERM; while true; do sleep 1; done"


def good(bench: Bench) -> str:
    bench.check("one thing", lambda: "as it should be")
    bench.check("another", cuda, bench)
    bench.values["number"] = 1
    return "one figure"


def skipped(bench: Bench) -> str:
    bench.check("all of it", cuda, bench)
    return ""


def cuda(bench: Bench) -> str:
    bench.require_cuda()
    return ""


def failing(bench: Bench) -> str:
    bench.check("what holds", lambda: "")
    bench.check("what does not", unequal)
    bench.check("what raises", lambda: str(1 // 0))
    return "one figure"


def unequal() -> str:
    expect(False, "1 is not 2")
    return ""


def raising(bench: Bench) -> str:
    bench.say("about to raise")
    raise OSError("no such thing")


def rubbish(bench: Bench) -> str:
    """Write invalid text to every place that is read, and end successfully."""
    os.write(1, b"\xff\x00\x1b[2J" * 1000)
    (bench.folder / "now").write_bytes(b"\xff\xfe\x1b[2J")
    (bench.folder / "result.json").write_text('{"figure": [], "checks": [{"name": 3}]}')
    os._exit(0)


def hanging(bench: Bench) -> str:
    """Start a process as a launcher would, which ignores SIGTERM; then hang."""
    child = subprocess.Popen(["sh", "-c", IN_A_SESSION_OF_ITS_OWN], start_new_session=True)
    bench.say("hanging")
    Path(os.environ["PLANTED_PIDS"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(3600)
    return ""


if __name__ == "__main__":
    sys.exit(accept_gpu.main(sys.argv[1:], STEPS))
