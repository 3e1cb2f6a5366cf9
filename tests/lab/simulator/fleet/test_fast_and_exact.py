"""The compiled replicas give the answers of the engine's own scheduler."""

from __future__ import annotations

import math

import numpy as np
import pytest
from simulated_fleets import MS, device_of, drawn, model_of, play, work_of

from batchmaker.cost.profile import Overhead
from batchmaker.errors import OptionError
from batchmaker.fleet.routing import RULES, Router
from batchmaker.fleet.scaling import ScalingRule
from batchmaker.lab.simulator.fleet.fast import FastReplicas, why_not_fast
from batchmaker.lab.simulator.fleet.records import FleetRecords
from batchmaker.lab.simulator.simulate import SimulatedDevice
from batchmaker.lab.simulator.workload import SimulatedModel
from batchmaker.policies.agenda import AgendaPolicy
from batchmaker.policies.cellular import CellularPolicy

OVERHEAD = Overhead(step_s=2e-5, row_s=1e-6, turn_s=3e-5, request_s=1e-4)


def assert_same(exact: FleetRecords, fast: FleetRecords) -> None:
    """Every request has the same replica, the same end and, but for rounding, the same time."""
    assert exact.outcome.tolist() == fast.outcome.tolist()
    assert exact.replica.tolist() == fast.replica.tolist()
    assert exact.tries.tolist() == fast.tries.tolist()
    np.testing.assert_allclose(fast.finished_s, exact.finished_s, rtol=1e-9)
    assert (exact.steps, exact.rows, exact.deaths) == (fast.steps, fast.rows, fast.deaths)
    assert fast.busy_s == pytest.approx(exact.busy_s)
    assert fast.paid_s == pytest.approx(exact.paid_s)
    assert [sample.unanswered for sample in fast.samples] == [sample.unanswered for sample in exact.samples]


@pytest.mark.parametrize("router", sorted(set(RULES) - {"sticky"}))
def test_every_router_gives_the_same_answers_fast_and_exactly(router: str) -> None:
    work = work_of(model_of(8), *drawn(400, 5000, seed=3))
    device = device_of(8, overhead=OVERHEAD)
    assert_same(play("exact", work, router, device=device, seed=5), play("fast", work, router, device=device, seed=5))


@pytest.mark.parametrize(("max_steps", "rate_rps"), [(None, 800), (None, 20_000), (5, 4000), (1, 4000)])
def test_tasks_are_bounded_alike_fast_and_exactly(max_steps: int | None, rate_rps: float) -> None:
    work = work_of(model_of(4), *drawn(300, rate_rps, seed=4))
    device = device_of(4, fixed_s=0.11 * MS)
    exact, fast = (
        play(fidelity, work, "two-choices", replicas=2, max_batch=4, device=device, max_steps=max_steps)
        for fidelity in ("exact", "fast")
    )
    assert_same(exact, fast)


def test_requests_that_come_at_one_time_give_the_same_answers_fast_and_exactly() -> None:
    steps, _ = drawn(300, 1, seed=5)
    work = work_of(model_of(8), steps, np.repeat([0.0, 0.0, 0.01, 0.5], 75))
    assert_same(play("exact", work, "least-requests"), play("fast", work, "least-requests"))


def test_deaths_and_scaling_are_the_same_fast_and_exactly() -> None:
    work = work_of(model_of(8), *drawn(900, 3000, seed=6))
    rule = ScalingRule("work", target=0.02, least=2, most=9, every_s=0.02, cool_s=0.1)
    exact, fast = (
        play(fidelity, work, "least-work", replicas=3, start_s=0.03, mean_life_s=0.06, scaling=rule)
        for fidelity in ("exact", "fast")
    )
    assert exact.deaths > 3
    assert (exact.tries > 1).any()
    assert_same(exact, fast)


def test_sequences_are_the_same_fast_and_exactly() -> None:
    steps, arrived_s = drawn(600, 3000, seed=7)
    sequence = np.sort(np.random.default_rng(0).integers(0, 60, 600)).reshape(6, 100).T.ravel()
    work = work_of(model_of(8), steps, arrived_s, sequence=np.unique(sequence, return_inverse=True)[1])
    exact, fast = (play(fidelity, work, "sticky", start_s=0.02, mean_life_s=0.3) for fidelity in ("exact", "fast"))
    assert_same(exact, fast)


def test_more_places_than_there_were_at_first_change_nothing() -> None:
    work = work_of(model_of(2), *drawn(500, 4000, seed=8))
    exact, fast = (play(fidelity, work, "least-requests", replicas=37, max_batch=2) for fidelity in ("exact", "fast"))
    assert_same(exact, fast)


def test_what_is_no_chain_of_one_cell_is_not_played_fast() -> None:
    work, device = work_of(model_of(4), [3, 4], [0.0, 0.0]), device_of(4)
    shapes, model = list(work.requests.shapes), model_of(4)
    assert why_not_fast(model, shapes, CellularPolicy(), device) is None
    assert "agenda" in str(why_not_fast(model, shapes, AgendaPolicy(), device))
    several = SimulatedDevice(device.costs, workers=2)
    assert "several workers" in str(why_not_fast(model, shapes, CellularPolicy(), several))
    two = SimulatedModel("two", (*model.cells, model_of(4).cells[0].__class__(1, "other", (), (), batch_sizes=(1,))))
    assert "2 cells" in str(why_not_fast(two, shapes, CellularPolicy(), device))
    with pytest.raises(OptionError, match="fidelity `exact`"):
        FastReplicas(model, AgendaPolicy(), work, Router("random"), device)


def test_a_fleet_that_never_dies_has_no_deaths() -> None:
    work = work_of(model_of(4), [3, 4], [0.0, 0.0])
    assert play("fast", work, "random", mean_life_s=math.inf).deaths == 0
