"""tools/accept_gpu.py with the steps of this folder instead of its own."""

from __future__ import annotations

import sys

from tools import accept_gpu
from tools.acceptance.steps import Step

NAMES = ("good", "skipped", "failing", "raising", "rubbish", "hanging")
STEPS = [Step(name, f"{name}?", 60, "tests.planted_acceptance") for name in NAMES]

if __name__ == "__main__":
    sys.exit(accept_gpu.main(sys.argv[1:], STEPS))
