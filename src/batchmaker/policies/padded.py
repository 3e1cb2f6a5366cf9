"""Graph batching, the baselines: whole requests, padded to the longest of their batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

from batchmaker.errors import OptionError
from batchmaker.policies.base import GraphPolicy


@final
class PaddedPolicy(GraphPolicy):
    """Buckets by length, served round-robin; a batch starts as soon as a worker is idle (BatchMaker section 7.1).

    bucket_width: lengths 1..w share the first bucket, w+1..2w the second, and so on; the paper finds 10 best. There is
    no time-out: the paper finds starting at once better than any.
    """

    __slots__ = ("_buckets", "_max_batch", "_next", "_size", "_width")

    name = "padded"

    def __init__(self, max_batch: int = 64, bucket_width: int = 10) -> None:
        if max_batch < 1 or bucket_width < 1:
            raise OptionError(f"max_batch and bucket_width must be at least 1, got {max_batch} and {bucket_width}")
        self._max_batch = max_batch
        self._width = bucket_width
        self._buckets: dict[int, deque[int]] = {}
        self._next = 0
        self._size = 0

    @property
    def max_batch(self) -> int:
        return self._max_batch

    def __len__(self) -> int:
        return self._size

    def add(self, request: int, length: int) -> None:
        """A request of this length has arrived."""
        self._buckets.setdefault((max(length, 1) - 1) // self._width, deque()).append(request)
        self._size += 1

    def discard(self, request: int) -> None:
        """A waiting request was given up; unknown requests are ignored."""
        for bucket in self._buckets.values():
            if request in bucket:
                bucket.remove(request)
                self._size -= 1

    def choose(self) -> Sequence[int]:
        """Remove and return the oldest requests of the next bucket in turn that has any."""
        waiting = sorted(number for number, bucket in self._buckets.items() if bucket)
        if not waiting:
            return ()
        number = next((n for n in waiting if n >= self._next), waiting[0])
        self._next = number + 1
        bucket = self._buckets[number]
        chosen = [bucket.popleft() for _ in range(min(len(bucket), self._max_batch))]
        self._size -= len(chosen)
        return chosen


@final
class SerialPolicy(GraphPolicy):
    """One whole request at a time, in order of arrival."""

    __slots__ = ("_waiting",)

    name = "serial"

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()

    @property
    def max_batch(self) -> int:
        return 1

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: int, length: int) -> None:
        """A request has arrived."""
        self._waiting.append(request)

    def discard(self, request: int) -> None:
        """A waiting request was given up; unknown requests are ignored."""
        if request in self._waiting:
            self._waiting.remove(request)

    def choose(self) -> Sequence[int]:
        """Remove and return the oldest request."""
        return (self._waiting.popleft(),) if self._waiting else ()
