"""How requests end: each exactly once, and without harm to the others."""

from __future__ import annotations

import pytest
from scheduler_harness import cell_type, chain, host

from batchmaker.core.admission import GraphAdmission
from batchmaker.core.commands import Reply
from batchmaker.core.events import CellTypeAdded, RequestArrived, RequestCancelled, StepsFinished
from batchmaker.core.scheduler import Scheduler
from batchmaker.errors import InvariantError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.policies.cellular import CellularPolicy

CELL = cell_type(0, "a", 2)


def test_cancelled_before_it_runs(harness):
    core = harness([CELL])
    for request in range(5):
        core.arrive(request, chain(CELL, 3))
    core.cancel(4, 0.5)
    core.run()
    assert core.answers[4] == (0.5, "cancelled")
    assert not any(4 in ran.requests for ran in core.log)
    assert [core.left_s(r) for r in range(4)] == [3] * 4


def test_cancelled_while_it_runs(harness):
    core = harness([CELL], max_steps=2)
    core.arrive(1, chain(CELL, 10))
    core.arrive(2, chain(CELL, 4))
    core.cancel(1, 2.5)
    core.run()
    assert core.answers == {1: (2.5, "cancelled"), 2: (4, "reply")}
    assert sum(1 in ran.requests for ran in core.log) == 4


def test_a_deadline_that_passes_ends_the_request(harness):
    core = harness([CELL])
    core.arrive(1, chain(CELL, 10), deadline_s=2.5)
    core.arrive(2, chain(CELL, 10), deadline_s=10.5)
    core.run()
    assert core.answers == {1: (3, "deadline"), 2: (10, "reply")}


def test_time_alone_passes_a_deadline(harness):
    core = harness([CELL], duration=lambda: 5.0)
    core.arrive(1, chain(CELL, 1), deadline_s=2.0)
    core.tick(2.0)
    core.run()
    assert core.answers == {1: (2, "deadline")}


def test_a_failed_row_fails_only_its_request(harness):
    failures = iter([(1,)])
    core = harness([CELL], fails=lambda batch: next(failures, ()), max_steps=3)
    for request in range(3):
        core.arrive(request, chain(CELL, 5))
    core.run()
    assert sorted(how for _, how in core.answers.values()) == ["cell", "reply", "reply"]


def test_an_open_ended_run_stops_at_the_value_or_at_its_longest(harness):
    cell = cell_type(0, "decoder", 2, 2)
    core = harness([cell])
    for request, longest in enumerate([1, 2, 50]):
        core.arrive(request, chain(cell, longest, open_ended=True))
    core.run()
    steps = [sum(request in ran.requests for ran in core.log) for request in range(3)]
    assert steps[0] == 1
    assert steps[2] < 50


def test_a_request_without_nodes_is_answered_at_once(harness):
    def program(recorder):
        return []
        yield

    core = harness([CELL])
    core.arrive(1, program, 1.0)
    core.run()
    assert core.answers == {1: (1.0, "reply")}


def test_a_program_that_waits_goes_on_and_gives_its_rows_back(harness):
    held = []

    def program(recorder):
        (value,) = recorder.node(CELL, [host(1), host(2)])
        for _ in range(5):
            yield [value]
            (value,) = recorder.node(CELL, [value, host(3)])
            held.append(core.scheduler.num_rows)
        return [value]

    core = harness([CELL])
    core.arrive(1, program)
    core.run()
    assert core.answers == {1: (6, "reply")}
    assert max(held) <= 2


def test_a_node_on_a_worker_feeds_what_the_last_extension_adds(harness):
    fast, slow = cell_type(0, "fast", 1), cell_type(1, "slow", 1)

    def program(recorder):
        (one,) = recorder.node(fast, [host(1)])
        (other,) = recorder.node(slow, [host(2)])
        yield [one]
        return list(recorder.node(fast, [other]))

    durations = iter([1.0, 5.0])
    core = harness([fast, slow], num_workers=2, duration=lambda: next(durations, 1.0))
    core.arrive(1, program)
    core.run()
    assert core.answers == {1: (6, "reply")}


def test_steps_of_a_run_under_way_can_still_be_asked_for(harness):
    fast = cell_type(1, "fast", 1)

    def program(recorder):
        (end,) = recorder.run(CELL, [host(1, 2, 3, 4, 5)], None)
        (value,) = recorder.node(fast, [host(2)])
        yield [value]
        return [end.steps]

    core = harness([CELL, fast], max_steps=2)
    core.arrive(1, program)
    core.run()
    assert core.answers[1][1] == "reply"


def test_a_step_finished_out_of_turn_is_a_defect():
    scheduler = Scheduler(CellularPolicy())
    with pytest.raises(InvariantError, match="out of turn"):
        scheduler.handle(StepsFinished(0, 0, 1, 0.0))


def test_a_request_cannot_arrive_twice_and_an_unknown_one_cannot_be_cancelled():
    scheduler = Scheduler(CellularPolicy())
    scheduler.handle(CellTypeAdded(CELL, 0.0))
    assert scheduler.handle(RequestCancelled(7, 0.0)) == []
    commands = scheduler.handle(RequestArrived(1, CellGraph(0, 0), 0.0))
    assert isinstance(commands[-1], Reply)


def test_what_feeds_steps_that_an_open_ended_run_does_not_reach_is_given_back(harness):
    feeder = cell_type(1, "feeder", 1)

    def program(recorder):
        (fed,) = recorder.map(feeder, [host(*range(40))])
        return list(recorder.run(CELL, [fed], None, open_ended=True))
        yield

    core = harness([CELL, feeder])
    core.arrive(1, program)
    core.run()
    assert core.answers[1][1] == "reply"
    assert core.scheduler.num_rows == 0


def test_functions_that_go_on_in_one_turn_are_admitted_together(harness, monkeypatch):
    cell = cell_type(0, "step")

    def program(recorder):
        value = recorder.node(cell, [host(3)])[0]
        for _ in range(5):
            yield [value]
            value = recorder.node(cell, [value])[0]
        return [value]

    sizes = []
    admit = GraphAdmission.admit

    def counted(self, graphs, *given):
        sizes.append(len(graphs))
        return admit(self, graphs, *given)

    monkeypatch.setattr(GraphAdmission, "admit", counted)
    core = harness([cell])
    for request in range(4):
        core.arrive(request, program)
    core.run()
    assert sizes == [4] * 6
