"""Closed batches behind a queue, as one writes them by hand: whoever waits is taken when the last batch is done."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, final

from engine_cost.measuring import Row, Settings, Submit, at_rate, compared, interleaved, per_second, say

Run = Callable[[Sequence[Any]], Sequence[Any]]


@final
class Batches:
    """A thread that runs batches of what waits: `submit` a request, get a future.

    run: a batch, results in order. maximum: most requests of a batch. width: lengths of requests that may share one;
    None for any. A batch is begun as soon as the thread is idle, from the bucket whose first request waits longest.
    """

    def __init__(self, run: Run, maximum: int, width: int | None = None) -> None:
        self._run_batch, self._maximum, self._width = run, maximum, width
        self._inbox: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: Any) -> Future[Any]:
        """Return the future of the request's result."""
        future: Future[Any] = Future()
        self._inbox.put((request, future))
        return future

    def close(self) -> None:
        """End the thread; what has not been answered is given up."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        buckets: dict[int, deque[tuple[int, Any, Future[Any]]]] = {}
        number = 0
        while True:
            while not buckets or not self._inbox.empty():
                item = self._inbox.get()
                if item is None:
                    return
                bucket = bucket_of(len(item[0]), self._width)
                buckets.setdefault(bucket, deque()).append((number, *item))
                number += 1
            oldest = min(buckets, key=lambda bucket: buckets[bucket][0][0])
            line = buckets[oldest]
            taken = [line.popleft() for _ in range(min(self._maximum, len(line)))]
            if not line:
                del buckets[oldest]
            try:
                results = self._run_batch([request for _, request, _ in taken])
            except Exception as error:
                for _, _, future in taken:
                    future.set_exception(error)
                continue
            for (_, _, future), result in zip(taken, results, strict=True):
                future.set_result(result)


def bucket_of(length: int, width: int | None) -> int:
    """Return the bucket of a length: 1 to width are in the first."""
    return 0 if width is None else (length - 1) // width


def in_batches(requests: Sequence[Any], maximum: int, width: int | None) -> list[list[Any]]:
    """Return all requests in batches of up to `maximum` from one bucket, each bucket in order of arrival."""
    buckets: dict[int, list[Any]] = {}
    for request in requests:
        buckets.setdefault(bucket_of(len(request), width), []).append(request)
    return [line[at : at + maximum] for line in buckets.values() for at in range(0, len(line), maximum)]


def run_all(run: Run, batches: Sequence[Sequence[Any]]) -> int:
    """Run batches one after the other, and let go of their results; return how many requests that were."""
    return sum(len(run(batch)) for batch in batches)


def at_half_load(
    settings: Settings, work: str, submit: Submit, by_hand: Run, most: int, requests: Sequence[Any], rate: float,
    seconds: float, target: float,
) -> Row:  # fmt: skip
    """Measure the p50 of both sides at a rate that is half of the slower one's. most: requests of a batch by hand."""
    say(f"  {rate:.0f} requests/s")
    server = Batches(by_hand, most)
    try:
        late = interleaved(
            {
                "ours": at_rate(submit, requests, rate, seconds),
                "theirs": at_rate(server.submit, requests, rate, seconds),
            },
            settings.of(5, 1),
        )
    finally:
        server.close()
    return compared(
        work, "p50 at half load", "ms", late["ours"][:, 0], late["theirs"][:, 0], better="lower",
        baseline=f"batches by hand, {most}", target=target, rate=rate,
    )  # fmt: skip


def batched_rate(run: Run, batches: Sequence[Sequence[Any]]) -> float:
    """Return how many requests of these batches are answered per second."""
    return per_second(partial(run_all, run, batches), sum(map(len, batches)))
