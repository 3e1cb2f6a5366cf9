"""Measures the time that an engine needs beside its cells, with a steady number of requests in flight."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.cost.latency import LatencyTable
from batchmaker.cost.profile import Overhead
from batchmaker.engine.engine import Engine
from batchmaker.engine.request import Ticket
from batchmaker.engine.stats import StepSeen

IN_FLIGHT: Final = (1, 2, 4, 8, 16, 32)
"""Numbers of requests in flight, one after the other.

With few requests each takes many steps; with many they share the steps.
"""


@dataclass(slots=True)
class Kept:
    """Counts and times of an engine while `in_flight` requests were kept in flight, until the last answer.

    steps, rows: of all cells. cells_s: the latency table's time of these steps. busy_s: their real time.
    """

    in_flight: int
    requests: int = 0
    steps: int = 0
    rows: int = 0
    cells_s: float = 0.0
    busy_s: float = 0.0
    wall_s: float = 0.0


def kept_in_flight(
    engine: Engine, requests: Sequence[Any], latency: LatencyTable, in_flight: int, seconds: float
) -> Kept:
    """Keep `in_flight` requests in flight for `seconds`: each answered one is replaced. The engine must be started.

    The calling thread offers the requests and shares the interpreter with the engine's thread, as callers do. Raises
    the first error of a request.
    """
    types = engine.registry.types
    names, most = [cell.name for cell in types], max(cell.max_batch for cell in types)
    table = dict(zip(names, latency.dense(names, most).tolist(), strict=True))
    seen = Kept(in_flight)
    answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    coming, begin_s = itertools.cycle(requests), engine.clock.now_s()

    def see(step: StepSeen) -> None:
        seen.steps += 1
        seen.rows += len(step.requests)
        seen.cells_s += table[step.cell][step.padded]
        seen.busy_s += step.end_s - step.begin_s

    def settled(ticket: Ticket, error: BaseException | None) -> None:
        seen.wall_s = engine.clock.now_s() - begin_s
        answers.put(error)

    engine.on_settled = settled
    engine.observe(see)
    errors: list[BaseException] = []
    try:
        for request in itertools.islice(coming, in_flight):
            engine.submit(request)
        left = in_flight
        while left:
            error = answers.get()
            seen.requests += 1
            if error is not None:
                errors.append(error)
            if errors or seen.wall_s >= seconds:
                left -= 1
            else:
                engine.submit(next(coming))
    finally:
        engine.on_settled = None
        engine.observe(None)
    if errors:
        raise errors[0]
    return seen


def fitted_overhead(seen: Sequence[Kept]) -> Overhead:
    """Return the seconds per step, row and request that fit the observed wall times best, in relative terms."""
    wall_s, busy_s, cells_s, steps, rows, requests = np.array(
        [(kept.wall_s, kept.busy_s, kept.cells_s, kept.steps, kept.rows, kept.requests) for kept in seen]
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


def measured_overhead(engine: Engine, requests: Sequence[Any], latency: LatencyTable, seconds: float) -> Overhead:
    """Return the overhead of a started engine with one worker.

    latency: of all its cells, measured with the same number of compute threads. seconds: spent on each number of
    IN_FLIGHT.
    """
    return fitted_overhead([kept_in_flight(engine, requests, latency, number, seconds) for number in IN_FLIGHT])
