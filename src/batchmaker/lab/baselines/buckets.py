"""Graph batching without waiting for more requests: by buckets of length, or one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from batchmaker.errors import OptionError
from batchmaker.policies.base import GraphPolicy
from batchmaker.policies.line import WaitingLine


@final
class PaddedPolicy(GraphPolicy):
    """Buckets by length, served round-robin; a batch starts as soon as a worker is idle (BatchMaker section 7.1).

    bucket_width: lengths 1..w share the first bucket, w+1..2w the second, and so on; the paper finds 10 best. There is
    no time-out: the paper finds starting at once better than any. Each model has buckets of its own. full_first:
    buckets that hold a full batch go before the others, in turn; the paper has no such rule. With a long backlog every
    batch is then full, while in plain turns only the most frequent lengths fill theirs.
    """

    __slots__ = ("_bucket", "_buckets", "_full_first", "_max_batch", "_next", "_width")

    name = "padded"

    def __init__(self, max_batch: int = 64, bucket_width: int = 10, full_first: bool = False) -> None:
        if max_batch < 1 or bucket_width < 1:
            raise OptionError(f"max_batch and bucket_width must be at least 1, got {max_batch} and {bucket_width}")
        self._max_batch = max_batch
        self._width = bucket_width
        self._full_first = full_first
        self._buckets: dict[tuple[int, int], WaitingLine[None]] = {}  # (model, number)
        self._bucket: dict[int, tuple[int, int]] = {}  # of each request
        self._next = (0, 0)

    @property
    def max_batch(self) -> int:
        return self._max_batch

    def __len__(self) -> int:
        return len(self._bucket)

    def add(
        self,
        request: int,
        length: int,
        at_s: float,
        deadline_s: float | None = None,
        model: int = 0,
        priority: int = 0,
    ) -> None:
        """Note that a request of this length has arrived."""
        key = (model, (max(length, 1) - 1) // self._width)
        self._bucket[request] = key
        self._buckets.setdefault(key, WaitingLine()).join(request, None, priority)

    def discard(self, request: int) -> None:
        """Note that a waiting request was given up. Unknown requests are ignored."""
        if request in self._bucket:
            self._buckets[self._bucket.pop(request)].leave(request)

    def choose(self, now_s: float) -> Sequence[int]:
        """Remove and return the first requests of the next bucket in turn that is not empty."""
        waiting = sorted(key for key, bucket in self._buckets.items() if len(bucket))
        if not waiting:
            return ()
        if self._full_first:
            waiting = [key for key in waiting if len(self._buckets[key]) >= self._max_batch] or waiting
        key = next((k for k in waiting if k >= self._next), waiting[0])
        self._next = (key[0], key[1] + 1)
        chosen: list[int] = self._buckets[key].first(self._max_batch).tolist()
        self._buckets[key].begin(chosen)
        for request in chosen:
            del self._bucket[request]
        return chosen


@final
class SerialPolicy(GraphPolicy):
    """One whole request at a time, in order of arrival."""

    __slots__ = ("_waiting",)

    name = "serial"

    def __init__(self) -> None:
        self._waiting: WaitingLine[None] = WaitingLine()

    @property
    def max_batch(self) -> int:
        return 1

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        request: int,
        length: int,
        at_s: float,
        deadline_s: float | None = None,
        model: int = 0,
        priority: int = 0,
    ) -> None:
        """Note that a request has arrived."""
        self._waiting.join(request, None, priority)

    def discard(self, request: int) -> None:
        """Note that a waiting request was given up. Unknown requests are ignored."""
        if request in self._waiting:
            self._waiting.leave(request)

    def choose(self, now_s: float) -> Sequence[int]:
        """Remove and return the first request."""
        chosen: list[int] = self._waiting.first(1).tolist()
        self._waiting.begin(chosen)
        return chosen
