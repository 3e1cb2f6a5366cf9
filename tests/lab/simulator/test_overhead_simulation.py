"""What an engine needs beside its cells, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_models import CHAIN, PAIR, chain, costs, offered, pair

from batchmaker.cost.profile import Overhead
from batchmaker.errors import OptionError
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.simulation import Computed
from batchmaker.policies.auto import AutoPolicy
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.cellular import CellularPolicy


def test_an_engine_needs_time_beside_its_cells() -> None:
    overhead = Overhead(step_s=0.25, row_s=0.125, turn_s=0.5, request_s=4.0)
    device = SimulatedDevice(costs(CHAIN.cells), overhead=overhead)
    calls: list[Computed] = []
    records = simulate(CHAIN, CellularPolicy(1), offered([chain(2)] * 2, [0.0, 1.0]), device, observe=calls.append)
    # The first is unfolded from 0 to 4; the second, which came meanwhile, when the first step has ended.
    assert [(call.begin_s, call.end_s) for call in calls] == [(4.0, 5.875), (9.875, 11.875), (11.875, 13.75)]
    assert records.finished_s.tolist() == [11.875, 13.75]
    assert records.busy_s == 1.875 + 2.0 + 1.875


def test_policies_are_told_of_the_copies_in_a_step_and_not_of_the_turn_after_it() -> None:
    told: list[float] = []

    class Listening(CellPolicy):
        """Notes what steps take."""

        name = "listening"
        max_steps = 1

        def rank(self, view: Any) -> Any:
            return view.ready

        def step_finished(self, type_id: Any, batch: int, seconds: float) -> None:
            told.append(seconds)

    device = SimulatedDevice(costs(CHAIN.cells), overhead=Overhead(0.25, 0.125, 0.5, 4.0))
    simulate(CHAIN, Listening(), offered([chain(1)] * 2, [0.0, 0.0]), device)
    assert told == [1.5]


def test_tasks_are_as_long_as_the_engines_however_little_a_task_costs_on_this_machine() -> None:
    """27 times 0.15 ms: 40 steps of 0.1 ms and their overhead, which a newcomer waits for."""
    device = SimulatedDevice(costs(CHAIN.cells, fixed_s=1e-4), overhead=Overhead(turn_s=1e-6))
    records = simulate(CHAIN, AutoPolicy(), offered([chain(100), chain(1)], [0.0, 0.05e-3]), device)
    assert 4.0e-3 < records.finished_s[1] < 4.4e-3


def test_overhead_is_that_of_an_engine_with_one_worker() -> None:
    with pytest.raises(OptionError, match="got 2 workers"):
        SimulatedDevice(costs(CHAIN.cells), workers=2, overhead=Overhead(turn_s=1e-4))


def test_types_take_turns_where_the_device_does() -> None:
    requests, arrived_s = [pair(2, 3), pair(2, 3)], [0.0, 2.5]

    def order(*, take_turns: bool) -> list[str]:
        calls: list[Computed] = []
        device = SimulatedDevice(costs(PAIR.cells), take_turns=take_turns)
        simulate(PAIR, CellularPolicy(1), offered(requests, arrived_s), device, observe=calls.append)
        return [call.what[0] for call in calls]

    assert order(take_turns=False) == list("eedddeeddd")
    assert order(take_turns=True) == list("eedededdd")
