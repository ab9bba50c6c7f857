"""The ids of several .bin, read as if they were one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.data.token_file import TokenFile

_MOST_OPEN = 128  # shells let a process open 1024 files


class TokenFiles(TokenFile):
    """Files of one integer type, as (path, size in bytes); those read last are open.

    A file that changes is an error on the rank that reads it, and ends the others through it.
    """

    def __init__(self, files: Sequence[tuple[Path, int]], dtype: np.dtype[np.integer]) -> None:
        self.path, self.dtype = files[0][0].parent, dtype
        sizes = [size for _, size in files]
        self.num_bytes = sum(sizes)
        self.firsts = [0, *accumulate(size // dtype.itemsize for size in sizes)]
        """(files + 1,) place of each file's first id."""

        def opened(number: int) -> TokenFile:
            path, num_bytes = files[number]
            return TokenFile(path, dtype, num_bytes)

        self._opened = lru_cache(_MOST_OPEN)(opened)

    def file_of(self, place: int) -> int:
        """Return the number of the file with an id."""
        return min(bisect_right(self.firsts, place), len(self.firsts) - 1) - 1

    def _fill(self, ids: NDArray[np.integer], first: int) -> None:
        while len(ids):
            number = self.file_of(first)
            count = min(len(ids), self.firsts[number + 1] - first)
            file = self._opened(number)
            file._require_size()
            file._fill(ids[:count], first - self.firsts[number])
            ids, first = ids[count:], first + count

    def _require_size(self) -> None:
        """Nothing: each file's size is checked where it is read."""
