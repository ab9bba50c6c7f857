"""The command with shuffled targets, of which only the frequencies can be learned."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from harness import train
from harness.data.packing import Packed, Windows


def main(argv: list[str]) -> int:
    """Take targets from another window, in another order; return the command's exit code."""
    read = Packed.read

    def shuffled(packed: Packed, windows: NDArray[np.int64]) -> Windows:
        elsewhere = read(packed, (windows * 7919 + 1) % packed.num_windows).labels
        pairs = zip(windows, elsewhere, strict=True)
        rows = [np.random.default_rng(n).permutation(row) for n, row in pairs]
        return dataclasses.replace(read(packed, windows), labels=np.stack(rows))

    Packed.read = shuffled
    return train.main(argv)
