"""The main command with a planted defect that no loss shows at first: a plan to divide tensors that
forgets that each rank computes a part of the gradient of its heads' norms.
"""

from __future__ import annotations

import sys

from harness import train
from harness.layout.world import World
from tools.proofs.parity.defects.tensors import gradients_not_summed


def main() -> int:
    with gradients_not_summed(World()):
        return train.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
