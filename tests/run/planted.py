"""The main command with a defect of the parity gate: `python -m tests.run.planted DEFECT WORDS`.

Swapping the layers of a stage changes no shape. A head's norm whose gradient is not summed
represents a tensor-parallel plan that forgets that each rank computes a part of it; no loss shows
it at first.
"""

from __future__ import annotations

from harness import train
from harness.layout.world import World
from tests.gates.parity.defects import planted


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    with planted(argv[0], World()):
        return train.main(argv[1:])
