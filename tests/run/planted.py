"""The main command with a defect of the parity gate: `python -m tests.run.planted DEFECT WORDS`.

A stage's swapped layers change no shape. A head's norm of which no gradient is summed is a plan to
divide tensors that forgets that each rank computes a part of it; no loss shows it at first.
"""

from __future__ import annotations

from harness import train
from harness.layout.world import World
from tests.gates.parity.defects import planted


def main(argv: list[str]) -> int:
    """Return the exit code of the command."""
    with planted(argv[0], World()):
        return train.main(argv[1:])
