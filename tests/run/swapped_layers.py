"""The main command with a planted defect that changes no shape: two layers are swapped."""

from __future__ import annotations

import sys

from harness import train
from harness.layout.world import World
from tools.proofs.parity.defects.models import layers_swapped


def main() -> int:
    with layers_swapped(World()):
        return train.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
