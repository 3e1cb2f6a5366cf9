"""Gives out extents (consecutive bytes) of memory of a fixed size, and takes them back."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final, final

ALIGNMENT: Final = 16


def aligned(num_bytes: int) -> int:
    """Round up to what extents and rows in them begin at."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@final
class Extents:
    """Memory of `size` bytes. The first free extent that is large enough is given; neighbours that are free are one."""

    __slots__ = ("_ends", "_starts", "free", "size")

    def __init__(self, size: int) -> None:
        self.size = self.free = size
        self._starts = [0]
        self._ends = {0: size}

    def take(self, num_bytes: int) -> int | None:
        """Return the first byte of an extent; None if there is none that is large enough. 0 bytes are nowhere: 0."""
        wanted = aligned(num_bytes)
        if wanted == 0:
            return 0
        for at, start in enumerate(self._starts):
            end = self._ends[start]
            if end - start >= wanted:
                del self._ends[start]
                if end - start == wanted:
                    del self._starts[at]
                else:
                    self._starts[at] = start + wanted
                    self._ends[start + wanted] = end
                self.free -= wanted
                return start
        return None

    def give_back(self, start: int, num_bytes: int) -> None:
        """Take an extent of so many bytes back."""
        wanted = aligned(num_bytes)
        if wanted == 0:
            return
        self.free += wanted
        end = start + wanted
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == end:
            end = self._ends.pop(self._starts.pop(at))
        if at > 0 and self._ends[self._starts[at - 1]] == start:
            start = self._starts[at - 1]
        else:
            insort(self._starts, start)
        self._ends[start] = end
