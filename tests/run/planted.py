"""The main command with a planted defect: `python -m tests.run.planted DEFECT WORDS`.

`layers_swapped` changes no shape. `gradients_not_summed` is a plan to divide tensors that forgets
that each rank computes a part of the gradient of its heads' norms; no loss shows it at first.
"""

from __future__ import annotations

from harness import train
from harness.layout.world import World
from tests.gates.parity.defects.divided import gradients_not_summed
from tests.gates.parity.defects.models import layers_swapped

DEFECTS = {"layers_swapped": layers_swapped, "gradients_not_summed": gradients_not_summed}


def main(argv: list[str]) -> int:
    """Return the exit code of the command."""
    with DEFECTS[argv[0]](World()):
        return train.main(argv[1:])
