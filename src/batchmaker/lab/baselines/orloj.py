"""Graph batching by deadlines and distributions of execution time, after Orloj."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import OptionError
from batchmaker.lab.baselines.batch_latency import BatchLatency
from batchmaker.policies.ageing import AGED_EVERY, AgeTurns
from batchmaker.policies.base import GraphPolicy

Entry = tuple[int, float, int]
"""Minus the priority, the due time, the request. Requests are taken in sorted order."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The state of a request. firm: it has its own deadline and is dropped when it cannot be met."""

    model: int
    entry: Entry
    firm: bool


@final
class _Queue:
    """The waiting requests of one model, in order. due_s, firm: [waiting] the same as arrays."""

    __slots__ = ("_due_s", "_firm", "entries", "latency", "turns")

    def __init__(self, latency: BatchLatency) -> None:
        self.latency = latency
        self.entries: list[Entry] = []
        self.turns = AgeTurns(AGED_EVERY)  # batches
        self._due_s: NDArray[np.float64] | None = None
        self._firm: NDArray[np.bool_] | None = None

    def changed(self) -> None:
        self._due_s = None

    def arrays(self, waiting: dict[int, _Waiting]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        if self._due_s is None or self._firm is None:
            self._due_s = np.array([due_s for _, due_s, _ in self.entries])
            self._firm = np.array([waiting[request].firm for _, _, request in self.entries], np.bool_)
        return self._due_s, self._firm


@final
class OrlojPolicy(GraphPolicy):
    """Choose the batch size and the requests of the greatest worth now; drop requests that cannot meet their deadline.

    max_batch: most requests computed together; sizes are max_batch and the powers of two below it. assumed_deadline_ms:
    from its arrival, for a request without a deadline, which is never dropped. batch_seconds: the time of a batch of
    requests of these lengths; without it the time is learned from finished batches, per model.

    A request's own length is not used before it runs, only the distribution over requests of its model. The latency of
    a batch is the maximum over its members (see BatchLatency). For every size k, the candidates are the requests whose
    slack is at least the expected latency of k, the first due first. Compare computing a request now with computing it
    after a delay that is distributed exponentially with mean 1/b. Now raises its chance of being in time by E[exp(-b
    (slack - latency)); latency <= slack]. This, divided by the expected latency, is its priority score (Chi et al.,
    *Distribution-based query scheduling*, VLDB 2013, on which Orloj builds). The size with the largest sum of its
    members' scores is computed.

    After Yu, Qiu, Jin, Chowdhury, *Orloj: Predictably Serving Unpredictable DNNs* (arXiv 2209.00159): written from
    descriptions, not from its code, so details may differ. Known differences: the paper has no priorities; here the
    highest is chosen from first, and one batch of eight from those that have waited longest. The paper keeps a queue of
    scores for each batch size and updates them as time passes; here they are computed for each batch, and its order is
    that of deadlines, because requests of one model share one distribution. The paper's distributions are of execution
    times, per application; here they come from lengths and a cost, per model. 1/b is the expected latency of the
    largest batch. A batch that is not full is assumed to last as long as the next larger size.
    """

    __slots__ = ("_assumed_s", "_batch_seconds", "_max_batch", "_queues", "_sizes", "_waiting")

    name = "orloj"

    def __init__(
        self,
        max_batch: int = 64,
        assumed_deadline_ms: float = 1000.0,
        batch_seconds: Callable[[Sequence[int]], float] | None = None,
    ) -> None:
        if max_batch < 1 or not assumed_deadline_ms > 0:
            raise OptionError(
                f"max_batch must be at least 1 and assumed_deadline_ms above 0, got {max_batch}, {assumed_deadline_ms}"
            )
        self._max_batch = max_batch
        self._assumed_s = assumed_deadline_ms / 1e3
        self._batch_seconds = batch_seconds
        self._sizes = sorted({1 << i for i in range(max_batch.bit_length())} | {max_batch})
        self._queues: dict[int, _Queue] = {}
        self._waiting: dict[int, _Waiting] = {}

    @property
    def max_batch(self) -> int:
        return self._max_batch

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
        """Note a request. Its length is one more sample of the model's distribution."""
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = _Queue(BatchLatency(self._sizes, self._batch_seconds))
        entry = (-priority, at_s + self._assumed_s if deadline_s is None else deadline_s, request)
        self._waiting[request] = _Waiting(model, entry, deadline_s is not None)
        insort(queue.entries, entry)
        queue.changed()
        queue.latency.saw_length(length)

    def discard(self, request: int) -> None:
        """Note that a waiting request was given up. Unknown requests are ignored."""
        if request in self._waiting:
            one = self._waiting.pop(request)
            queue = self._queues[one.model]
            del queue.entries[bisect_left(queue.entries, one.entry)]
            queue.changed()

    def choose(self, now_s: float) -> Sequence[int]:
        """Remove and return the batch of the greatest worth; empty only if no waiting request can meet its deadline."""
        best: tuple[float, int] = (-1.0, 0)
        chosen: list[int] = []
        for queue in self._queues.values():
            if queue.entries:
                worth, members = self._best_of(queue, now_s)
                if members and (worth, len(members)) > best:
                    best, chosen = (worth, len(members)), members
        if chosen:
            batch = [self._waiting[request] for request in chosen]
            turns, entries = self._queues[batch[0].model].turns, self._queues[batch[0].model].entries
            if turns.is_due:
                turns.had_turn()
            elif entries[-1][0] > min(one.entry[0] for one in batch):  # somebody of a lower priority waits
                turns.passed_over()
        for request in chosen:
            self.discard(request)
        return chosen

    def refuse(self, now_s: float) -> Sequence[int]:
        """Remove and return the requests whose deadline is nearer than the expected latency of a single request."""
        late: list[int] = []
        for queue in self._queues.values():
            if queue.entries:
                due_s, firm = queue.arrays(self._waiting)
                hopeless = firm & (due_s < now_s + queue.latency.mean_s(1))
                late += [queue.entries[i][2] for i in np.flatnonzero(hopeless).tolist()]
        for request in late:
            self.discard(request)
        return late

    def batch_finished(self, model: int, lengths: Sequence[int], seconds: float) -> None:
        """Learn from a batch of requests of these lengths that took so long."""
        if model in self._queues and self._batch_seconds is None:
            self._queues[model].latency.saw_batch(lengths, seconds)

    def _best_of(self, queue: _Queue, now_s: float) -> tuple[float, list[int]]:
        """Return the worth of the best batch of one model, and its members."""
        due_s, firm = queue.arrays(self._waiting)
        order = np.arange(len(due_s))
        if queue.turns.is_due:  # requests are numbered in the order of their arrival
            order = np.argsort([request for _, _, request in queue.entries])
            due_s, firm = due_s[order], firm[order]
        latency = queue.latency
        best: tuple[float, int] = (-1.0, 0)
        members: NDArray[np.int64] = np.empty(0, np.int64)
        for size in self._sizes:
            possible = np.flatnonzero(~firm | (due_s >= now_s + latency.mean_s(size)))[:size]
            if len(possible):
                worth = latency.worth(size, due_s[possible] - now_s, firm[possible])
                if (worth, len(possible)) > best:
                    best, members = (worth, len(possible)), possible
            if size >= len(due_s):
                break
        return best[0], [queue.entries[i][2] for i in order[members].tolist()]
