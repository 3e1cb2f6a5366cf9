"""Several models that share a device in the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_models import CHAIN, PAIR, chain, costs, pair

from batchmaker import policies
from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.cost.profile import CostProfile, ProfileOptions
from batchmaker.errors import OptionError
from batchmaker.graph.work import work_of
from batchmaker.lab.baselines.window import WindowPolicy
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.simulation import Computed
from batchmaker.lab.simulator.together import Together
from batchmaker.lab.simulator.workload import Offered, SimulatedModel
from batchmaker.policies.lazy import LazyPolicy


def profile_of(model: SimulatedModel, seconds: float = 1.0) -> CostProfile:
    cells = tuple(CellLatency(cell.name, (1, 4), (seconds, seconds), (seconds, seconds)) for cell in model.cells)
    return CostProfile(model.name, ProfileOptions("float32", 1, "none", "none"), LatencyTable(cells))


BOTH = Together([CHAIN, PAIR])


def test_cells_carry_the_names_of_their_models() -> None:
    assert [cell.name for cell in BOTH.model.cells] == [
        *(f"{CHAIN.name}/{cell.name}" for cell in CHAIN.cells),
        *(f"{PAIR.name}/{cell.name}" for cell in PAIR.cells),
    ]
    assert BOTH.request(0, one := chain(2)) is BOTH.request(0, one)
    with pytest.raises(OptionError, match="names of their own"):
        Together([CHAIN, CHAIN])


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=12),
    st.sampled_from(["lazy", "lazy:stack=recent", "cellular", "agenda", "graph:window_ms=1", "serial", "orloj"]),
)
def test_every_request_of_every_model_is_answered_and_models_never_share_a_batch(requests, name) -> None:
    requests.sort(key=lambda request: request[2])
    shapes = [BOTH.request(1, pair(n, n)) if second else BOTH.request(0, chain(n)) for second, n, _ in requests]
    calls: list[Computed] = []
    policy = policies.make(name)
    if isinstance(policy, LazyPolicy):
        policy.use_profile(BOTH.profile([profile_of(CHAIN), profile_of(PAIR)]))
    arrived_s = np.array([float(at_s) for _, _, at_s in requests])
    device = SimulatedDevice(costs(BOTH.model.cells))
    records = simulate(BOTH.model, policy, Offered(shapes, arrived_s), device, sla_s=1000.0, observe=calls.append)
    assert records.answered.all()
    for call in calls:
        assert len({requests[i][0] for i in call.requests.tolist()}) == 1
    if call.what != "graph":
        assert sum(len(call.requests) for call in calls) == sum(
            int(work_of(shape.graph).nodes.sum()) for shape in shapes
        )


def test_the_model_with_the_least_slack_goes_first() -> None:
    both = [BOTH.request(0, chain(3)), BOTH.request(1, pair(2, 2))]
    calls: list[Computed] = []
    policy = LazyPolicy(BOTH.profile([profile_of(CHAIN), profile_of(PAIR)]), benefit=False, slack="none")
    simulate(
        BOTH.model,
        policy,
        Offered(both, np.zeros(2)),
        SimulatedDevice(costs(BOTH.model.cells)),
        sla_s=9.0,
        observe=calls.append,
    )
    assert calls[0].requests.tolist() == [1]  # four steps to go leave it less slack than three


def test_windows_of_graph_batching_are_per_model() -> None:
    requests = [BOTH.request(0, chain(1)), BOTH.request(1, pair(1, 1)), BOTH.request(0, chain(1))]
    calls: list[Computed] = []
    simulate(
        BOTH.model, WindowPolicy(window_ms=500.0), Offered(requests, np.zeros(3)),
        SimulatedDevice(costs(BOTH.model.cells)), observe=calls.append,
    )  # fmt: skip
    assert sorted(call.requests.tolist() for call in calls) == [[0, 2], [1]]
