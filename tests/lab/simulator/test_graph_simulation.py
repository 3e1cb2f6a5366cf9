"""Graph policies under a virtual clock."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_models import CHAIN, PAIR, cell_type, chain, costs, offered, pair, random_arrivals

from batchmaker.graph.recorder import Recorder
from batchmaker.graph.values import HostValues
from batchmaker.lab.baselines.buckets import PaddedPolicy, SerialPolicy
from batchmaker.lab.baselines.orloj import OrlojPolicy
from batchmaker.lab.baselines.window import WindowPolicy
from batchmaker.lab.datasets import poisson_arrivals
from batchmaker.lab.simulator.graph_simulation import PaddedCost
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.simulation import Computed
from batchmaker.lab.simulator.workload import GIVEN_UP, SimulatedModel, SimulatedRequest
from batchmaker.policies.base import GraphPolicy

TREE = SimulatedModel("tree", (cell_type(0, "leaf", 1, 1, (1, 4)), cell_type(1, "inner", 2, 1, (1, 4))))


def tree(num_leaves: int) -> SimulatedRequest:
    """A complete tree."""
    recorder = Recorder()
    leaves = recorder.map(TREE.cells[0], [HostValues(None, num_leaves, TREE.cells[0].inputs[0])])
    recorder.tree(TREE.cells[1], np.arange(2 * (num_leaves - 1)).reshape(-1, 2), leaves, [])
    return SimulatedRequest(recorder.take(), 2 * num_leaves - 1)


def run(requests: Any, arrived_s: Any, policy: GraphPolicy, model: Any = CHAIN, **options: Any) -> Any:
    calls: list[Computed] = []
    device = SimulatedDevice(options.pop("costs", costs(model.cells)), options.pop("workers", 1))
    return simulate(model, policy, offered(requests, arrived_s), device, observe=calls.append, **options), calls


def test_a_batch_takes_as_long_as_its_longest_and_leaves_together() -> None:
    records, calls = run([chain(2), chain(5)], [0.0, 0.0], PaddedPolicy())
    assert [call.requests.tolist() for call in calls] == [[0, 1]]
    assert records.finished_s.tolist() == [5.0, 5.0]


def test_each_cell_is_padded_to_its_own_longest() -> None:
    records, _ = run([pair(1, 6), pair(4, 2)], [0.0, 0.0], PaddedPolicy(), PAIR)
    assert records.finished_s.tolist() == [10.0, 10.0]


def test_a_window_ends_without_anything_happening() -> None:
    records, calls = run([chain(1)] * 3, [0.0, 1.0, 6.0], WindowPolicy(window_ms=5000))
    assert [(call.begin_s, len(call.requests)) for call in calls] == [(5.0, 2), (11.0, 1)]
    assert records.started_s.tolist() == [5.0, 5.0, 11.0]


def test_nodes_that_run_at_once_are_rows_of_one_step() -> None:
    price = costs(TREE.cells, fixed_s=1.0, per_row_s=1.0)
    cost = PaddedCost(TREE, [tree(4), tree(2)], price)
    assert cost.seconds(np.array([1])) == (1 + 2) + (1 + 1)  # two leaves at once, one node above
    # Four leaves a request: eight rows are two calls of four. Above: two levels of at most two nodes each.
    assert cost.seconds(np.array([0, 1])) == 2 * (1 + 4) + 2 * (1 + 4)


def test_a_request_that_still_waits_at_its_deadline_is_given_up() -> None:
    records, _ = run([chain(5), chain(1)], [0.0, 1.0], SerialPolicy(), sla_s=3.0, give_up_late=True)
    assert records.outcome.tolist() == [0, GIVEN_UP]
    assert records.finished_s.tolist() == [5.0, 4.0]


@pytest.mark.slow
@pytest.mark.parametrize(("utilisation", "spread"), [(0.5, 0), (0.8, 0), (0.6, 9)])
def test_serial_waiting_is_that_of_pollaczek_and_khinchine(utilisation: float, spread: int) -> None:
    """M/D/1 and M/G/1: the mean wait is rate E[S^2] / (2 (1 - utilisation))."""
    count = 40_000
    steps = np.random.default_rng(1).integers(10 - spread, 10 + spread, size=count, endpoint=True)
    rate_rps = utilisation / steps.mean()
    shapes = {n: chain(n) for n in set(steps.tolist())}
    requests = [shapes[n] for n in steps.tolist()]
    records, _ = run(requests, poisson_arrivals(rate_rps, 0, count=count), SerialPolicy())
    waited_s = (records.started_s - records.arrived_s).mean()
    assert waited_s == pytest.approx(rate_rps * (steps**2).mean() / (2 * (1 - utilisation)), rel=0.08)
    assert records.busy_s / records.finished_s.max() == pytest.approx(utilisation, rel=0.02)


def make_policy(name: str) -> GraphPolicy:
    made: dict[str, GraphPolicy] = {
        "serial": SerialPolicy(), "padded": PaddedPolicy(4, 2), "graph": WindowPolicy(3000, 4), "orloj": OrlojPolicy(),
    }  # fmt: skip
    return made[name]


@given(st.integers(0, 2**32), st.sampled_from(["serial", "padded", "graph", "orloj"]))
def test_every_request_is_in_one_batch_and_no_worker_does_two_at_once(seed: int, name: str) -> None:
    rng = random.Random(seed)
    requests = [pair(rng.randint(1, 6), rng.randint(1, 6)) for _ in range(rng.randint(1, 25))]
    arrived_s = random_arrivals(rng, len(requests), rng.choice([1.0, 20.0, 200.0]))
    policy, workers = make_policy(name), rng.randint(1, 3)
    records, calls = run(requests, arrived_s, policy, PAIR, sla_s=rng.choice([10.0, 1e3]), workers=workers)
    computed = np.sort(np.concatenate([call.requests for call in calls]))
    assert computed.tolist() == np.flatnonzero(records.answered).tolist()
    assert max(len(call.requests) for call in calls) <= policy.max_batch
    assert (records.arrived_s <= records.started_s)[records.answered].all()
    for worker in range(workers):
        mine = [(call.begin_s, call.end_s) for call in calls if call.worker == worker]
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(mine))
