"""A scheduler that plans no rows decides as one that does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_scheduler_properties import make_cells, random_program

from batchmaker.core.commands import Command, Fail, Reply, RunTask
from batchmaker.graph.recorder import Recorder
from batchmaker.lab.simulator.cell_simulation import CellSimulation
from batchmaker.lab.simulator.costs import SimulatedDevice, StepCosts
from batchmaker.lab.simulator.workload import Offered, Records, SimulatedModel, SimulatedRequest
from batchmaker.policies.agenda import AgendaPolicy
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.cellular import CellularPolicy
from batchmaker.policies.depth import DepthPolicy
from batchmaker.policies.lazy import LazyPolicy


@st.composite
def situations(draw: Any) -> dict[str, Any]:
    max_batch = draw(st.integers(1, 8))
    return {
        "seed": draw(st.integers(0, 2**32)),
        "policy": draw(st.sampled_from(["cellular", "agenda", "depth", "lazy"])),
        "max_batch": max_batch,
        "min_batch": draw(st.integers(1, max_batch)),
        "num_workers": draw(st.integers(1, 3)),
        "run_ahead": draw(st.integers(0, 2)),
        "num_graphs": draw(st.integers(1, 4)),
        "num_requests": draw(st.integers(1, 12)),
        "spread": draw(st.sampled_from([0, 5, 30])),
        "give_up_late": draw(st.booleans()),
    }


def make_policy(name: str, max_steps: int) -> CellPolicy:
    if name == "lazy":
        return LazyPolicy(max_steps=max_steps)
    return {"cellular": CellularPolicy, "agenda": AgendaPolicy, "depth": DepthPolicy}[name]()


def graph_of(cells: Any, seed: int, size: int) -> SimulatedRequest:
    recorder = Recorder()
    try:
        next(random_program(cells, seed, size=size, waits=False)(recorder))
    except StopIteration as end:
        for value in end.value:
            recorder.fetch(value)
    return SimulatedRequest(recorder.take(), 1)


def play(case: dict[str, Any], *, plan_rows: bool) -> tuple[list[tuple[Any, ...]], Records]:
    """What was commanded, turn by turn, with the nodes of each step in order of number."""
    rng = random.Random(case["seed"])
    cells = make_cells(case["min_batch"], case["max_batch"], rng)
    shapes = [graph_of(cells, rng.randrange(2**32), rng.randint(1, 8)) for _ in range(case["num_graphs"])]
    arrived_s = np.array(sorted(float(rng.randint(0, case["spread"])) for _ in range(case["num_requests"])))
    requests = [rng.choice(shapes) for _ in arrived_s]
    seconds = np.array([[0.0] + [rng.choice([1.0, 2.0, 5.0]) for _ in range(case["max_batch"])] for _ in cells])
    simulation = CellSimulation(
        SimulatedModel("random", tuple(cells)),
        make_policy(case["policy"], rng.randint(1, 3)),
        Offered(requests, arrived_s),
        SimulatedDevice(StepCosts(seconds), case["num_workers"], case["run_ahead"]),
        sla_s=10.0,
        give_up_late=case["give_up_late"],
        plan_rows=plan_rows,
    )
    told: list[tuple[Any, ...]] = []
    handle = simulation.scheduler.handle

    def listen(*events: Any) -> list[Command]:
        commands = handle(*events)
        simulation.scheduler.check_invariants()
        told.append(tuple(map(plainly, [c for c in commands if isinstance(c, RunTask | Reply | Fail)])))
        return commands

    simulation.scheduler.handle = listen  # type: ignore[method-assign]
    return told, simulation.run()


def plainly(command: Command) -> tuple[Any, ...]:
    if isinstance(command, RunTask):
        nodes = tuple(tuple(sorted(step.nodes.tolist())) for step in command.steps)
        return (command.task, command.worker, command.type_id, nodes)
    return (type(command).__name__, command.request)  # type: ignore[union-attr]


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(situations())
def test_without_rows_the_same_nodes_run_in_the_same_tasks(case: dict[str, Any]) -> None:
    planned, records = play(case, plan_rows=True)
    bare, others = play(case, plan_rows=False)
    assert bare == planned
    assert np.array_equal(records.finished_s, others.finished_s)
    assert np.array_equal(records.outcome, others.outcome)


def test_a_bare_step_says_nothing_of_where_values_lie() -> None:
    cells = make_cells(1, 4, random.Random(0))
    steps: list[Any] = []
    request = graph_of(cells, 3, 8)
    simulation = CellSimulation(
        SimulatedModel("random", tuple(cells)),
        CellularPolicy(),
        Offered([request, request], np.zeros(2)),
        SimulatedDevice(StepCosts(np.ones((len(cells), 5)))),
    )
    handle = simulation.scheduler.handle

    def listen(*events: Any) -> list[Command]:
        commands = handle(*events)
        steps.extend(step for command in commands if isinstance(command, RunTask) for step in command.steps)
        return commands

    simulation.scheduler.handle = listen  # type: ignore[method-assign]
    simulation.run()
    assert steps
    assert all((step.inputs, step.lanes, step.keep, step.fetches) == ((), None, None, ()) for step in steps)
    assert simulation.scheduler.num_rows == 0
