"""A .npy that is written a block at a time, for arrays that would fill a rank's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class ArrayFile:
    """A .npy of (n,) or (rows, n); of each row the next values are appended. Zeros at first."""

    def __init__(self, path: Path, dtype: str, *shape: int) -> None:
        self._dtype = np.dtype(dtype)
        mapped = np.lib.format.open_memmap(path, mode="w+", dtype=self._dtype, shape=shape)
        begin: int = mapped.offset
        rows = shape[0] if shape[1:] else 1
        self._at = [begin + row * shape[-1] * self._dtype.itemsize for row in range(rows)]
        self._file = path.open("r+b")

    def append(self, values: NDArray[Any], row: int = 0) -> None:
        """Write the next values of a row."""
        block = np.ascontiguousarray(values, dtype=self._dtype)
        self._file.seek(self._at[row])
        self._file.write(block.data)
        self._at[row] += block.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
