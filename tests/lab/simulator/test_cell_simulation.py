"""Cell policies under a virtual clock."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_models import CHAIN, PAIR, chain, costs, offered, pair, random_arrivals

from batchmaker.errors import InvariantError, OptionError
from batchmaker.lab.simulator.costs import StepCosts
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.simulation import Computed
from batchmaker.lab.simulator.workload import GIVEN_UP, REFUSED, Offered, Records
from batchmaker.policies.base import Admission, CellPolicy
from batchmaker.policies.cellular import CellularPolicy
from batchmaker.policies.lazy import LazyPolicy


def run(requests: Any, arrived_s: Any, policy: CellPolicy | None = None, model: Any = CHAIN, **options: Any) -> Any:
    """Records and every batched call."""
    calls: list[Computed] = []
    device = SimulatedDevice(costs(model.cells), options.pop("workers", 1), options.pop("run_ahead", 0))
    play = offered(requests, arrived_s)
    return simulate(model, policy or CellularPolicy(1), play, device, observe=calls.append, **options), calls


def test_a_request_alone_takes_its_steps() -> None:
    records, calls = run([chain(3)], [2.0])
    assert (records.started_s.tolist(), records.finished_s.tolist()) == ([2.0], [5.0])
    assert [(call.begin_s, call.end_s) for call in calls] == [(2, 3), (3, 4), (4, 5)]
    assert (records.steps, records.rows, records.busy_s) == (3, 3, 3.0)


def test_a_late_request_joins_the_next_step() -> None:
    records, calls = run([chain(3), chain(2)], [0.0, 0.5])
    assert [call.requests.tolist() for call in calls] == [[0], [0, 1], [0, 1]]
    assert records.finished_s.tolist() == [3.0, 3.0]


def test_a_step_costs_what_its_batch_costs() -> None:
    device = SimulatedDevice(costs(CHAIN.cells, fixed_s=1.0, per_row_s=0.5))
    records = simulate(CHAIN, CellularPolicy(1), offered([chain(1)] * 3, [0.0] * 3), device)
    assert records.finished_s.tolist() == [2.5] * 3


def test_a_decoder_ends_after_its_own_words() -> None:
    records, calls = run([pair(1, 2), pair(1, 4)], [0.0, 0.0], model=PAIR)
    assert [call.what for call in calls] == ["encoder"] + ["decoder"] * 4
    assert records.finished_s.tolist() == [3.0, 5.0]


def test_two_workers_share_the_requests() -> None:
    records, _ = run([chain(2)] * 8, [0.0] * 8, workers=2)
    assert records.finished_s.tolist() == [2.0] * 8


def test_steps_queue_on_a_worker_that_is_run_ahead_of() -> None:
    behind, _ = run([chain(4)], [0.0], run_ahead=0)
    ahead, calls = run([chain(4)], [0.0], run_ahead=1)
    assert ahead.finished_s.tolist() == behind.finished_s.tolist() == [4.0]
    assert [call.begin_s for call in calls] == [0.0, 1.0, 2.0, 3.0]


def test_late_requests_are_finished_unless_they_are_given_up() -> None:
    late, _ = run([chain(5)], [0.0], sla_s=3.0)
    assert late.answered.all()
    assert not late.met(3.0).any()
    given_up, _ = run([chain(5)], [0.0], sla_s=3.0, give_up_late=True)
    assert given_up.outcome.tolist() == [GIVEN_UP]
    assert given_up.finished_s.tolist() == [3.0]


def test_a_request_that_a_policy_turns_away_is_refused() -> None:
    class Strict(CellPolicy):
        """Turns everybody away but the first."""

        name = "strict"
        watches_requests = True
        max_steps = 1

        def rank(self, view: Any) -> Any:
            return view.ready

        def admit(self, view: Any) -> Admission:
            line = view.waiting(view.num_waiting).tolist()
            return Admission([], line) if len(view.requests.in_flight) else Admission(line[:1], line[1:])

    records, _ = run([chain(2)] * 3, [0.0, 0.0, 0.5], Strict())
    assert records.outcome.tolist() == [0, REFUSED, REFUSED]
    assert np.isnan(records.started_s[1:]).all()


def test_a_policy_that_runs_nothing_is_found_out() -> None:
    class Idle(CellPolicy):
        """Never wants to run anything."""

        name = "idle"
        max_steps = 1

        def rank(self, view: Any) -> Any:
            return []

    with pytest.raises(InvariantError, match="'idle' leaves 2 requests unanswered"):
        run([chain(1)] * 2, [0.0, 1.0], Idle())


@pytest.mark.parametrize(
    ("requests", "arrived_s"), [([], []), ([1], []), ([1], [-1.0]), ([1, 1], [1.0, 0.5]), ([1], [float("nan")])]
)
def test_wrong_arrivals_are_refused(requests: Any, arrived_s: Any) -> None:
    with pytest.raises(OptionError):
        Offered(requests, np.array(arrived_s, np.float64))


@pytest.mark.parametrize("sla_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_sla_is_refused(sla_s: float) -> None:
    with pytest.raises(OptionError, match="SLA"):
        run([chain(1)], [0.0], sla_s=sla_s)


def test_costs_must_reach_the_largest_batch() -> None:
    with pytest.raises(OptionError, match="batches of up to 4"):
        simulate(CHAIN, CellularPolicy(), offered([chain(1)], [0.0]), SimulatedDevice(StepCosts(np.ones((1, 3)))))


def random_case(seed: int) -> tuple[list[Any], list[float], dict[str, Any]]:
    rng = random.Random(seed)
    requests = [pair(rng.randint(1, 6), rng.randint(1, 6)) for _ in range(rng.randint(1, 25))]
    arrived_s = random_arrivals(rng, len(requests), rng.choice([1.0, 20.0, 200.0]))
    return requests, arrived_s, {"workers": rng.randint(1, 3), "run_ahead": rng.randint(0, 1)}


def fresh_policy(name: str) -> CellPolicy:
    return LazyPolicy() if name == "lazy" else CellularPolicy(3)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from(["cellular", "lazy"]))
def test_work_is_conserved(seed: int, policy: str) -> None:
    requests, arrived_s, options = random_case(seed)
    records, calls = run(requests, arrived_s, fresh_policy(policy), PAIR, sla_s=50.0, **options)
    assert records.answered.all()
    assert (records.arrived_s <= records.started_s).all()
    assert (records.started_s < records.finished_s).all()
    wanted = [request.graph.num_nodes for request in requests]
    rows = np.bincount(np.concatenate([call.requests for call in calls]), minlength=len(requests))
    assert rows.tolist() == wanted
    assert (records.steps, records.rows) == (len(calls), sum(wanted))
    assert max(len(call.requests) for call in calls) <= 4
    for worker in range(options["workers"]):
        mine = [(call.begin_s, call.end_s) for call in calls if call.worker == worker]
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(mine)), "two calls at once"


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from(["cellular", "lazy"]))
def test_one_worker_is_never_idle_while_a_request_is_unfinished(seed: int, policy: str) -> None:
    requests, arrived_s, _ = random_case(seed)
    records, calls = run(requests, arrived_s, fresh_policy(policy), PAIR, sla_s=50.0)
    busy = [(call.begin_s, call.end_s) for call in calls]
    for (_, end), (begin, _) in itertools.pairwise(busy):
        if begin > end:
            unfinished = (records.arrived_s < begin) & (records.finished_s > end)
            assert not unfinished.any()


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from(["cellular", "lazy"]))
def test_a_simulation_is_the_same_to_the_bit(seed: int, policy: str) -> None:
    def once() -> Records:
        requests, arrived_s, options = random_case(seed)
        records: Records = run(requests, arrived_s, fresh_policy(policy), PAIR, sla_s=9.0, **options)[0]
        return records

    one, other = once(), once()
    for name in ("arrived_s", "started_s", "finished_s", "outcome"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
    assert (one.steps, one.rows, one.busy_s) == (other.steps, other.rows, other.busy_s)
