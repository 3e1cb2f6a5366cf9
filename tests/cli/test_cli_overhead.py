"""What an engine needs beside its cells is found from steady numbers of requests in flight."""

from __future__ import annotations

from collections import Counter

import pytest

from batchmaker.cli.overhead import LEAST, Measurement, as_served, fitted_overhead, kept_in_flight
from batchmaker.cost import CellLatency, LatencyTable, Overhead
from batchmaker.engine.engine import Engine
from batchmaker.errors import InvalidRequestError
from batchmaker.lab import zoo

TABLE = LatencyTable((CellLatency("step", (1, 4), (1e-6, 2e-6), (1e-6, 2e-6)),))
FLAT = LatencyTable((CellLatency("step", (1, 4, 16), (1e-3, 1e-3, 1e-3), (1e-3, 1e-3, 1e-3)),))


def seen(in_flight: int, overhead: Overhead) -> Measurement:
    """Ten requests of 24 cells, in steps of as many rows as there are requests; a step's cells take a millisecond."""
    steps, rows, cells_s = 240 // in_flight, 240, 240 // in_flight * 1e-3
    busy_s = cells_s + steps * overhead.step_s + rows * overhead.row_s
    wall_s = busy_s + steps * overhead.turn_s + 10 * overhead.request_s
    return Measurement(in_flight, 10, steps, rows, busy_s, wall_s, Counter({("step", in_flight): steps}))


@pytest.mark.parametrize(
    "overhead",
    [Overhead(2e-4, 1e-5, 1e-4, 5e-4), Overhead(0.0, 1e-5, 1e-4, 0.0), Overhead(2e-4, 0.0, 0.0, 5e-4), Overhead()],
)
def test_the_overhead_that_was_there_is_found(overhead: Overhead) -> None:
    found = fitted_overhead([seen(in_flight, overhead) for in_flight in (1, 2, 4, 8)], FLAT)
    for field in ("step_s", "row_s", "turn_s", "request_s"):
        assert getattr(found, field) == pytest.approx(getattr(overhead, field), abs=1e-9)


def test_no_overhead_is_below_zero() -> None:
    shrinking = [
        Measurement(1, 10, 240, 240, 0.30, 0.36, Counter({("step", 1): 240})),
        Measurement(4, 10, 60, 240, 0.06, 0.06, Counter({("step", 4): 60})),
    ]
    found = fitted_overhead(shrinking, FLAT)
    assert found.row_s == found.request_s == 0.0
    assert found.step_s > 0 < found.turn_s


@pytest.mark.parametrize(("more_s", "expected_s"), [(5e-4, 1.5e-3), (-4e-4, 6e-4), (-9.9e-4, 1e-4)])
def test_a_cell_takes_what_it_takes_in_the_engine(more_s: float, expected_s: float) -> None:
    """Sizes that were not seen differ from alone as much as the nearest that were, and no time comes near nothing."""
    noise = [("step", 4, more_s)] * LEAST + [("step", 5, more_s)] * LEAST + [("step", 16, 1.0)] * (LEAST - 1)
    served = as_served(FLAT, [Measurement(1, beyond_s=[("other", 4, 9.0), *noise])])
    assert served.cells[0].median_s == pytest.approx([expected_s] * 3)
    assert all(high >= middle for middle, high in zip(served.cells[0].median_s, served.cells[0].p95_s, strict=True))


def test_a_cell_that_was_hardly_seen_takes_what_it_takes_alone() -> None:
    assert as_served(FLAT, [Measurement(1, beyond_s=[("step", 1, 1.0)] * (LEAST - 1))]) == FLAT


def test_who_is_answered_is_replaced_until_the_time_is_over() -> None:
    with Engine(zoo.make("lstm", hidden=8, vocabulary_size=20)) as engine:
        kept = kept_in_flight(engine, [[3, 4, 5], [6]], TABLE, 4, 0.5)
        assert kept.requests >= 4
        assert kept.requests == engine.service["LstmModel"].answered
        assert 0 < kept.steps <= kept.rows <= 3 * kept.requests
        assert kept.cells_s(TABLE) < kept.busy_s < kept.wall_s
        assert kept.sizes.total() == len(kept.beyond_s) == kept.steps
        assert kept.wall_s >= 0.5
        assert engine.on_settled is None


def test_nobody_is_replaced_once_the_time_is_over() -> None:
    with Engine(zoo.make("lstm", hidden=8, vocabulary_size=20)) as engine:
        assert kept_in_flight(engine, [[3, 4, 5]], TABLE, 3, 0.0).requests == 3


def test_a_request_that_fails_ends_the_measurement() -> None:
    with (
        Engine(zoo.make("lstm", hidden=8, vocabulary_size=20)) as engine,
        pytest.raises(InvalidRequestError),
    ):
        kept_in_flight(engine, [[99]], TABLE, 2, 10.0)
