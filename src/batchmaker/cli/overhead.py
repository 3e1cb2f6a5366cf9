"""Measures an engine with a steady number of requests in flight: its cells, and the time that it needs beside them."""

from __future__ import annotations

import itertools
import queue
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.cost.profile import Overhead
from batchmaker.engine.engine import Engine
from batchmaker.engine.request import Ticket
from batchmaker.engine.stats import StepSeen

IN_FLIGHT: Final = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of requests in flight, one after the other.

With few requests each takes many steps; with many they share the steps.
"""


LEAST_SHARE: Final = 0.1
"""Of its time alone, at least, that a cell takes."""

LEAST: Final = 8
"""Steps of about one size, at least, from which a cell's time as the engine runs it is taken."""


@dataclass(slots=True)
class Measurement:
    """Counts and times of an engine while `in_flight` requests were kept in flight, until the last answer.

    steps, rows: of all cells. sizes: steps of each cell by their rows, padding included. beyond_s: for each step its
    cell, its rows, and by how many seconds it took longer than in the latency table: the mean over those that were
    reported together. busy_s: real time of all steps.
    """

    in_flight: int
    requests: int = 0
    steps: int = 0
    rows: int = 0
    busy_s: float = 0.0
    wall_s: float = 0.0
    sizes: Counter[tuple[str, int]] = field(default_factory=Counter)
    beyond_s: list[tuple[str, int, float]] = field(default_factory=list)

    def cells_s(self, latency: LatencyTable) -> float:
        """Return the table's seconds of all steps."""
        return sum(count * latency.seconds(cell, size) for (cell, size), count in self.sizes.items())


@final
class _Steps:
    """Counts steps for a Measurement. table: for each cell seconds by number of rows, padding included."""

    def __init__(self, measurement: Measurement, table: dict[str, list[float]]) -> None:
        self._measurement = measurement
        self._table = table
        self._together: list[StepSeen] = []

    def see(self, step: StepSeen) -> None:
        """Count a step."""
        if self._together and step.begin_s != self._together[-1].end_s:
            self.end()
        self._together.append(step)
        self._measurement.steps += 1
        self._measurement.rows += len(step.requests)
        self._measurement.sizes[step.cell, step.padded] += 1
        self._measurement.busy_s += step.end_s - step.begin_s

    def end(self) -> None:
        """Note by how much the last steps that were reported together took longer than in the table."""
        if self._together:
            beyond_s = fmean(step.end_s - step.begin_s - self._table[step.cell][step.padded] for step in self._together)
            self._measurement.beyond_s += [(step.cell, step.padded, beyond_s) for step in self._together]
            self._together.clear()


def kept_in_flight(
    engine: Engine, requests: Sequence[Any], latency: LatencyTable, in_flight: int, seconds: float
) -> Measurement:
    """Keep `in_flight` requests in flight for `seconds`: each answered one is replaced. The engine must be started.

    The calling thread offers the requests and shares the interpreter with the engine's thread, as callers do. Raises
    the first error of a request.
    """
    types = engine.registry.types
    names, most = [cell.name for cell in types], max(cell.max_batch for cell in types)
    seen = Measurement(in_flight)
    steps = _Steps(seen, dict(zip(names, latency.dense(names, most).tolist(), strict=True)))
    answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    coming, begin_s = itertools.cycle(requests), engine.clock.now_s()

    def settled(ticket: Ticket, error: BaseException | None) -> None:
        seen.wall_s = engine.clock.now_s() - begin_s
        answers.put(error)

    engine.on_settled = settled
    engine.observe(steps.see)
    errors: list[BaseException] = []
    try:
        for request in itertools.islice(coming, in_flight):
            engine.submit(request)
        num_open = in_flight
        while num_open:
            error = answers.get()
            seen.requests += 1
            if error is not None:
                errors.append(error)
            if errors or seen.wall_s >= seconds:
                num_open -= 1
            else:
                engine.submit(next(coming))
    finally:
        engine.on_settled = None
        engine.observe(None)
    steps.end()
    if errors:
        raise errors[0]
    return seen


def as_served(latency: LatencyTable, seen: Sequence[Measurement]) -> LatencyTable:
    """Return the times of the cells as the engine ran them, from a table of cells alone.

    Within a task a cell may take less than alone, because its inputs are computed for many steps at once, and more,
    because its rows have to be found. Sizes that were hardly seen differ as much as their neighbours.
    """
    beyond_s = [one for measurement in seen for one in measurement.beyond_s]
    return LatencyTable(tuple(_cell_as_served(cell, beyond_s) for cell in latency.cells))


def _cell_as_served(cell: CellLatency, beyond_s: Sequence[tuple[str, int, float]]) -> CellLatency:
    sizes = np.array(cell.batch)
    by_size: dict[int, list[float]] = {}
    for name, rows, more_s in beyond_s:
        if name == cell.name:
            by_size.setdefault(int(np.argmin(np.abs(np.log(sizes / rows)))), []).append(more_s)
    places = sorted(at for at, extra_s in by_size.items() if len(extra_s) >= LEAST)
    if not places:
        return cell
    more = np.interp(sizes, sizes[places], [median(by_size[at]) for at in places])
    alone = np.array(cell.median_s)
    served = np.maximum(alone + more, LEAST_SHARE * alone)
    high = np.maximum(np.array(cell.p95_s) + more, served)
    return CellLatency(cell.name, cell.batch, tuple(served.tolist()), tuple(high.tolist()))


def fitted_overhead(seen: Sequence[Measurement], latency: LatencyTable) -> Overhead:
    """Return the seconds per step, row and request beside the cells that fit the wall times best, in relative terms.

    latency: see `as_served`.
    """
    wall_s, busy_s, cells_s, steps, rows, requests = np.array(
        [(one.wall_s, one.busy_s, one.cells_s(latency), one.steps, one.rows, one.requests) for one in seen]
    ).T
    step_s, row_s = _fitted((busy_s - cells_s) / wall_s, steps / wall_s, rows / wall_s)
    turn_s, request_s = _fitted((wall_s - busy_s) / wall_s, steps / wall_s, requests / wall_s)
    return Overhead(step_s, row_s, turn_s, request_s)


def _fitted(rest: NDArray[np.float64], one: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float]:
    """Return the least-squares weights of two columns; neither is below 0."""
    a, b = np.linalg.lstsq(np.stack((one, other), axis=1), rest, rcond=None)[0].tolist()
    if b < 0:
        a, b = float(one @ rest / (one @ one)), 0.0
    elif a < 0:
        a, b = 0.0, float(other @ rest / (other @ other))
    return max(a, 0.0), max(b, 0.0)


def measured_overhead(
    engine: Engine, requests: Sequence[Any], latency: LatencyTable, seconds: float
) -> tuple[LatencyTable, Overhead]:
    """Return the times of the cells as a started engine with one worker runs them, and its overhead beside them.

    latency: of all its cells alone, measured with the same number of compute threads. seconds: spent on each number of
    IN_FLIGHT.
    """
    seen = [kept_in_flight(engine, requests, latency, number, seconds) for number in IN_FLIGHT]
    served = as_served(latency, seen)
    return served, fitted_overhead(seen, served)
