"""Graphs that are shared are taken in as copies: nobody can tell it from what is commanded."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_plan_rows import graph_of, make_policy
from test_scheduler_properties import make_cells

from batchmaker.core import copies
from batchmaker.core.commands import Command
from batchmaker.lab.simulator.cell_simulation import CellSimulation
from batchmaker.lab.simulator.costs import SimulatedDevice, StepCosts
from batchmaker.lab.simulator.replay import EventLog, SchedulerOptions, check_replay
from batchmaker.lab.simulator.workload import Offered, SimulatedModel, SimulatedRequest


@st.composite
def situations(draw: Any) -> dict[str, Any]:
    return {
        "seed": draw(st.integers(0, 2**32)),
        "policy": draw(st.sampled_from(["cellular", "agenda", "depth", "lazy"])),
        "max_batch": draw(st.integers(1, 8)),
        "num_workers": draw(st.integers(1, 2)),
        "num_graphs": draw(st.integers(1, 4)),
        "num_shared": draw(st.integers(1, 4)),
        "num_requests": draw(st.integers(1, 12)),
        "spread": draw(st.sampled_from([0, 5, 30])),
    }


def play(case: dict[str, Any]) -> EventLog:
    """A simulation in which requests share graphs, some of which say so; invariants hold in every turn."""
    rng = random.Random(case["seed"])
    cells = make_cells(1, case["max_batch"], rng)
    shapes = [graph_of(cells, rng.randrange(2**32), rng.randint(1, 8)) for _ in range(case["num_graphs"])]
    for shape in shapes[: case["num_shared"]]:
        shape.graph.shared = True
    arrived_s = np.array(sorted(float(rng.randint(0, case["spread"])) for _ in range(case["num_requests"])))
    requests: list[SimulatedRequest] = [rng.choice(shapes) for _ in arrived_s]
    seconds = np.array([[0.0] + [rng.choice([1.0, 2.0, 5.0]) for _ in range(case["max_batch"])] for _ in cells])
    policy = make_policy(case["policy"], rng.randint(1, 3))
    simulation = CellSimulation(
        SimulatedModel("random", tuple(cells)),
        policy,
        Offered(requests, arrived_s),
        SimulatedDevice(StepCosts(seconds), case["num_workers"]),
        sla_s=10.0,
        give_up_late=True,
        plan_rows=True,
    )
    log = EventLog(SchedulerOptions("cellular", num_workers=case["num_workers"]))
    handle = simulation.scheduler.handle

    def listen(*events: Any) -> list[Command]:
        commands = handle(*events)
        simulation.scheduler.check_invariants()
        log.record(events, commands)
        return commands

    simulation.scheduler.handle = listen  # type: ignore[method-assign]
    simulation.run()
    return log


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(situations())
def test_a_scheduler_that_shares_no_graph_commands_the_same(case: dict[str, Any]) -> None:
    log = play(case)
    assert not any(event.graph.shared for turn in log.turns for event in turn.events if hasattr(event, "graph"))
    policy = make_policy(case["policy"], random_steps(case))
    check_replay(log, policy)


def random_steps(case: dict[str, Any]) -> int:
    """What `play` gave its policy."""
    rng = random.Random(case["seed"])
    cells = make_cells(1, case["max_batch"], rng)
    shapes = [(rng.randrange(2**32), rng.randint(1, 8)) for _ in range(case["num_graphs"])]
    times = [rng.randint(0, case["spread"]) for _ in range(case["num_requests"])]
    for _ in times:
        rng.choice(shapes)
    for _ in cells:
        for _ in range(case["max_batch"]):
            rng.choice([1.0, 2.0, 5.0])
    return rng.randint(1, 3)


@pytest.mark.parametrize("limit", ["MAX_FORMS", "MAX_NODES"])
def test_what_is_remembered_is_bounded_and_nobody_can_tell(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    case = {
        "seed": 5, "policy": "cellular", "max_batch": 4, "num_workers": 1, "num_graphs": 4, "num_shared": 4,
        "num_requests": 12, "spread": 5,
    }  # fmt: skip
    plenty = play(case)
    monkeypatch.setattr(copies, limit, 2)
    assert check_replay(replace_turns(play(case), plenty)) > 0


def replace_turns(one: EventLog, other: EventLog) -> EventLog:
    """Return the events of one log with the commands of another: a replay finds whether they are the same."""
    turns = [replace(mine, commands=theirs.commands) for mine, theirs in zip(one.turns, other.turns, strict=True)]
    return EventLog(SchedulerOptions("cellular:max_steps=" + str(random_steps_of(one)), num_workers=1), turns)


def random_steps_of(log: EventLog) -> int:
    return max(len(command.steps) for turn in log.turns for command in turn.commands if hasattr(command, "steps"))
