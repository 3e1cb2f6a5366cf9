"""Offers load to an engine and records the outcome."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.cli.bench.statistics import whole_steps
from batchmaker.cli.workload import Workload
from batchmaker.engine.engine import Engine
from batchmaker.engine.request import Ticket
from batchmaker.engine.stats import DriverStats, StepSeen
from batchmaker.errors import BatchmakerError
from batchmaker.lab.baselines.driver import GraphDriver
from batchmaker.lab.datasets import poisson_arrivals

SWITCH_INTERVAL_S = 5e-4
"""Python's default of 5 ms makes a worker wait that long for the interpreter while another thread computes."""

LEAST_STEPS = 8
"""A window is extended until it holds so many steps: graph batches of slow models take seconds each."""

FEWEST_STEPS = 3
"""However long they take: two whole steps and the beginning of the first. With fewer there is no window."""

LONGEST_WARM_UP, LONGEST_WINDOW = 1.0, 6.0
"""Limits on warm-up and window, as multiples of the requested time."""

MOST_WARM_UP = 256
"""Requests in the last burst of a warm-up."""

Progress = Callable[[float, int], None]
"""Called with the finished share and the number of answered requests."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one window.

    latencies_s, queues_s: of requests answered (or still unanswered at the end: then their waiting time so far).
    answered: whether each of these has a result. cells: useful cells of the requests answered in the window. stats: the
    engine's counts inside the window.
    """

    seconds: float
    num_answered: int
    num_failed: int
    cells: int
    latencies_s: NDArray[np.float64]
    queues_s: NDArray[np.float64]
    answered: NDArray[np.bool_]
    stats: DriverStats
    offered_rps: float | None = None
    late_ms: float = 0.0

    def num_in_time(self, deadline_s: float) -> int:
        """Return the number of requests with a result within `deadline_s`."""
        return int(np.count_nonzero(self.answered & (self.latencies_s <= deadline_s)))

    @property
    def mean_graph_batch(self) -> float | None:
        """Requests per graph batch; a graph batch counts as one step."""
        return self.num_answered / self.stats.steps if self.stats.steps else None


@final
class Journal:
    """Submits requests of a workload, and records every settled one, in the engine's thread."""

    def __init__(self, engine: Engine, workload: Workload) -> None:
        self._engine = engine
        self._requests = workload.requests
        self._lock = threading.RLock()
        self._submitting = 0
        self._cells = workload.cells.tolist()
        self._chains = workload.chains
        self._indices: dict[int, int] = {}
        self.batches: list[tuple[int | None, ...]] = []
        self.before = counts(engine.stats)
        self.tickets: list[tuple[float, float, float, int]] = []  # arrived, started, finished, cells
        self.stats: list[tuple[float, ...]] = []
        self.errors: list[BaseException] = []
        self.refill: Callable[[], object] | None = None
        self.all_settled = threading.Event()
        self.expected: int | None = None
        self.closed = False
        engine.on_settled = self.note
        self._graphs = isinstance(engine.driver, GraphDriver)
        self._observer: Callable[[StepSeen], None] | None = None
        if self._graphs:
            engine.observe(self._see_batch)

    def submit(self, number: int) -> None:
        """Submit a request of the workload, by its number; the numbers begin again after the last one.

        Race: the engine may settle it before its id is known here. `note` waits for that, unless it is called within.
        """
        number %= len(self._requests)
        with self._lock:
            self._submitting = number
            self._indices[self._engine.submit(self._requests[number]).request_id] = number

    def see_steps(self, observer: Callable[[StepSeen], None]) -> None:
        """Pass every finished step to an observer as well."""
        self._observer = observer
        self._engine.observe(self._see_batch)

    def length(self, request: int) -> int:
        """Return the number of cells of a settled request, 1 if it is unknown."""
        return self._cells[self._indices[request]] if request in self._indices else 1

    def _see_batch(self, seen: StepSeen) -> None:
        if self._graphs:
            self.batches.append(seen.requests)
        if self._observer is not None:
            self._observer(seen)

    def note(self, ticket: Ticket, error: BaseException | None) -> None:
        """Record one settled request, and offer the next one if a backlog is kept."""
        if self.closed:
            return
        finished_s = ticket.finished_s or 0.0
        if error is not None:
            self.errors.append(error)
        with self._lock:  # until the thread that submits it has noted which one it is
            number = self._indices.setdefault(ticket.request_id, self._submitting)
        cells = 0 if error is not None else self._cells[number]
        started_s = finished_s if ticket.started_s is None else ticket.started_s
        self.tickets.append((ticket.arrived_s, started_s, finished_s, cells))
        self.stats.append(counts(self._engine.stats))
        if self.refill is not None:
            self.refill()
        elif self.expected is not None and len(self.tickets) >= self.expected:
            self.all_settled.set()

    def measured(self, first: int, last: int, begin_s: float, end_s: float) -> Measured:
        """Return the requests settled after entry `first` up to entry `last`; -1 begins with the first."""
        rows = np.array(self.tickets[first + 1 : last + 1], np.float64).reshape(-1, 4)
        arrived, started, finished, cells = rows.T
        stats = self.delta(first, last)
        seconds = end_s - begin_s
        latencies_s, queues_s = finished - arrived, started - arrived
        answered = cells > 0
        return Measured(seconds, len(rows), len(self.errors), int(cells.sum()), latencies_s, queues_s, answered, stats)

    def delta(self, first: int, last: int) -> DriverStats:
        before = self.stats[first] if first >= 0 else self.before
        counted = [b - a for a, b in zip(before, self.stats[last], strict=True)]
        steps, cells, padded, tasks, scheduler_s, unfold_s, busy_s = counted
        if self.batches:  # graph batching: the driver knows one length of a request, the workload all that are padded
            cells, padded = self._padded(before[0], self.stats[last][0])
        return DriverStats(int(steps), int(cells), int(padded), int(tasks), scheduler_s, unfold_s, busy_s)

    def _padded(self, first_step: float, last_step: float) -> tuple[float, float]:
        """Return useful and computed cells of the graph batches between two counts of steps."""
        begin, end = (int(step - self.before[0]) for step in (first_step, last_step))
        useful = computed = 0
        for owners in self.batches[begin:end]:
            chains = self._chains[[self._indices[owner] for owner in owners if owner in self._indices]]
            useful += int(chains.sum())
            computed += int(chains.max(axis=0).sum()) * len(chains) if len(chains) else 0
        return useful, computed


def counts(stats: DriverStats) -> tuple[float, ...]:
    """Return the counts in field order (dataclasses.astuple copies deeply, which is slow)."""
    return (stats.steps, stats.cells, stats.padded_cells, stats.tasks, stats.scheduler_s, stats.unfold_s, stats.busy_s)


@contextlib.contextmanager
def quiet_interpreter() -> Iterator[None]:
    """Keep the garbage collector and long turns of the interpreter lock out of the measurement.

    Inside another such block nothing is left to do: collecting takes a second where models are large.
    """
    if not gc.isenabled():
        yield
        return
    interval_s = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.enable()
        gc.unfreeze()


def all_at_once(engine: Engine, workload: Workload, count: int, progress: Progress) -> Measured:
    """Offer `count` requests at once and measure until the last answer."""
    engine.start()
    journal = Journal(engine, workload)
    journal.expected = count
    with quiet_interpreter():
        begin_s = engine.clock.now_s()
        for number in range(count):
            journal.submit(number)
        while not journal.all_settled.wait(0.2):
            progress(len(journal.tickets) / count, len(journal.tickets))
    _raise_if_all_failed(journal)
    return journal.measured(-1, len(journal.tickets) - 1, begin_s, journal.tickets[-1][2])


def backlog(engine: Engine, workload: Workload, in_flight: int, seconds: float, progress: Progress) -> Measured:
    """Keep `in_flight` requests in flight; measure `seconds` of the steady state.

    The window begins and ends between steps. The first `in_flight` requests all begin at the same time. Measuring
    begins when as many have been answered, or after `seconds` if that takes longer. Stops the engine.
    """
    engine.start()
    journal = Journal(engine, workload)
    following = itertools.count(in_flight)
    with quiet_interpreter():
        began_s = engine.clock.now_s()
        journal.refill = lambda: journal.submit(next(following))
        for number in range(in_flight):
            journal.submit(number)
        while len(journal.tickets) < in_flight and engine.clock.now_s() < began_s + LONGEST_WARM_UP * seconds:
            time.sleep(0.05)
            progress(0.0, len(journal.tickets))
        warm = len(journal.tickets)
        warm_s = engine.clock.now_s()
        warm_steps = engine.stats.steps
        while True:
            passed_s = engine.clock.now_s() - warm_s
            num_steps = engine.stats.steps - warm_steps
            is_long = passed_s > LONGEST_WINDOW * seconds
            if passed_s >= seconds and num_steps >= (FEWEST_STEPS if is_long else LEAST_STEPS):
                break
            time.sleep(0.05)
            progress(min(1.0, passed_s / seconds), len(journal.tickets))
            if journal.errors and (is_long or len(journal.errors) == len(journal.tickets)):
                _raise_first(journal)
        journal.closed = True
        journal.refill = None
    _raise_if_all_failed(journal)
    engine.stop(drain=False)
    first, last = whole_steps([row[0] for row in journal.stats], warm)
    return journal.measured(first, last, journal.tickets[first][2], journal.tickets[last][2])


def poisson(
    engine: Engine,
    workload: Workload,
    rate_rps: float,
    seconds: float,
    seed: int,
    progress: Progress,
    watch: Callable[[Journal], None] | None = None,
) -> Measured:
    """Offer a Poisson process and measure the requests that arrive in `seconds`.

    The engine is warmed up first; then a fifth of that time passes unmeasured. A request counts from the time at which
    it was due, so a late generator does not hide waiting. Requests without an answer within `seconds` (at least 10)
    after the last arrival are given up and count with their time so far. watch: called with the journal before the
    first request. Stops the engine.
    """
    engine.start()
    _warm_up(engine, workload, 0.2 * seconds)
    journal = Journal(engine, workload)
    if watch is not None:
        watch(journal)
    warm_s = 0.2 * seconds
    arrivals = poisson_arrivals(rate_rps, seed, seconds=warm_s + seconds)
    journal.expected = len(arrivals)
    late_s = np.zeros(len(arrivals))
    with quiet_interpreter():
        begin_s = engine.clock.now_s() + 0.01
        generator = threading.Thread(target=_generate, args=(engine, journal, arrivals, begin_s, late_s), daemon=True)
        generator.start()
        end_s = begin_s + warm_s + seconds
        while not journal.all_settled.wait(0.1):
            now_s = engine.clock.now_s()
            progress(min(1.0, (now_s - begin_s) / (warm_s + seconds)), len(journal.tickets))
            if now_s > end_s + max(10.0, seconds):
                break
        generator.join()
        engine.stop(drain=False)
    _raise_if_all_failed(journal)
    rows = np.array(journal.tickets, np.float64)
    rows[np.argsort(rows[:, 0], kind="stable"), 0] = begin_s + arrivals[: len(rows)]  # due times: one thread sends all
    in_window = (rows[:, 2] >= begin_s + warm_s) & (rows[:, 2] < end_s)
    settled = np.flatnonzero(in_window)
    stats = journal.delta(int(settled[0]) - 1, int(settled[-1])) if len(settled) else DriverStats()
    due = rows[:, 0] >= begin_s + warm_s
    answered = rows[in_window & (rows[:, 3] > 0)]
    return Measured(
        seconds,
        len(answered),
        len(journal.errors),
        int(answered[:, 3].sum()),
        rows[due, 2] - rows[due, 0],
        rows[due, 1] - rows[due, 0],
        rows[due, 3] > 0,
        stats,
        rate_rps,
        1e3 * float(np.percentile(late_s, 99)) if len(late_s) else 0.0,
    )


def _warm_up(engine: Engine, workload: Workload, seconds: float) -> None:
    """Have bursts of 1, 2, 4, ... requests answered, for about `seconds`.

    An engine binds its cells and tries ways to compute them at its first request, for a tenth of a second or more. At
    thousands of requests a second those that come meanwhile would make up a queue that takes longer than the window.
    """
    requests, burst = itertools.cycle(workload.requests), 1
    end_s = engine.clock.now_s() + seconds
    settled = threading.Semaphore(0)
    engine.on_settled = lambda ticket, error: settled.release()
    while burst <= MOST_WARM_UP and (burst == 1 or engine.clock.now_s() < end_s):
        for request in itertools.islice(requests, burst):
            engine.submit(request)
        for _ in range(burst):
            if not settled.acquire(timeout=60.0):
                raise BatchmakerError(f"warming up: no answer to one of {burst} requests within a minute")
        burst *= 2


def _generate(
    engine: Engine, journal: Journal, arrivals: NDArray[np.float64], begin_s: float, late_s: NDArray[np.float64]
) -> None:
    for index, due_s in enumerate((arrivals + begin_s).tolist()):
        wait_s = due_s - engine.clock.now_s()
        if wait_s > 0:
            time.sleep(wait_s)
        late_s[index] = engine.clock.now_s() - due_s
        journal.submit(index)


def _raise_if_all_failed(journal: Journal) -> None:
    if journal.errors and len(journal.errors) >= len(journal.tickets):
        _raise_first(journal)


def _raise_first(journal: Journal) -> NoReturn:
    error = journal.errors[0]
    raise error if isinstance(error, BatchmakerError) else BatchmakerError(f"requests failed: {error}")
