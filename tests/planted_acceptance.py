"""tools/accept_gpu.py with steps that pass, fail, raise and write garbage."""

import os
import sys

from tools import accept_gpu
from tools.acceptance.bench import Bench, expect
from tools.acceptance.report import Step

NAMES = ("good", "skipped", "failing", "raising", "rubbish")
STEPS = [Step(name, f"{name}?", f"tests.planted_acceptance:{name}") for name in NAMES]


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


if __name__ == "__main__":
    sys.exit(accept_gpu.main(sys.argv[1:], STEPS))
