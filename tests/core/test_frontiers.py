"""The state of frontiers agree with a plain look at the graphs, whatever comes, runs, stops, fails or goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, cell_type, chain, host
from test_scheduler_properties import play, settings_of_a_run

from batchmaker.core.events import GraphExtended, RequestArrived
from batchmaker.core.layout import DONE, READY, SUBMITTED
from batchmaker.core.scheduler import Scheduler
from batchmaker.errors import InvariantError
from batchmaker.graph.cell_graph import Run
from batchmaker.graph.recorder import Recorder
from batchmaker.policies import AgendaRemainingPolicy, CellularPolicy, SufficientPolicy


def frontiers_of(harness: Harness) -> list[int]:
    """Count, for each type, the units with something left to submit and no ancestor of their type that has: by walking
    over the graphs as the programs have recorded them."""
    state = harness.scheduler.state
    counts = [0] * len(harness.cells)
    for request, slot in state.requests.items():
        if slot in state.line:
            continue
        blocked: dict[int, frozenset[int]] = {}  # by node: types left above it or in it
        recorded = [
            event.graph
            for events in harness.events
            for event in events
            if isinstance(event, RequestArrived | GraphExtended) and event.request == request
        ]
        for graph, extent in zip(recorded, state.own_extents(slot), strict=True):
            for part in graph.parts:
                for type_id, nodes, sources in units_of(part):
                    above = frozenset().union(*(blocked.get(source, frozenset()) for source in sources))
                    left = is_left(harness, nodes[-1] - graph.first + extent.base)
                    counts[type_id] += left and type_id not in above
                    assert left or not above, "a unit ran before what it waits for"
                    blocked |= dict.fromkeys(nodes, above | {type_id} if left else above)
    return counts


def units_of(part: Any) -> list[tuple[int, list[int], list[int]]]:
    if isinstance(part, Run):
        sources = [source for source, _ in part.init if source >= 0]
        sources += [int(node) for column in part.sequences if column is not None for node in column[0]]
        return [(part.type_id, list(range(part.first, part.first + part.length)), sources)]
    return [
        (int(part.types[i]), [part.first + i], [int(s) for s in part.sources[:, i] if s >= 0])
        for i in range(part.count)
    ]


def is_left(harness: Harness, node: int) -> bool:
    """Whether a unit, given by its last node, still has something to submit."""
    arena = harness.scheduler.state.arena
    if arena.state[node] in (SUBMITTED, DONE):
        return False
    if arena.end[arena.subgraph[node]] == 0:
        return True
    tasks = harness.scheduler.state.tasks.values()
    submitted = {int(n) for task in tasks for n in task.unfinished}
    return node not in submitted  # a run whose last step is on a worker


def compared(run: dict[str, Any], every: int = 1) -> int:
    """Play a run and compare after every turn, or some; return how many of those something was in flight."""
    turns = passed = 0
    check = Scheduler.check_invariants

    with pytest.MonkeyPatch.context() as patch:
        made: list[Harness] = []
        init = Harness.__init__

        def noted(harness: Harness, *args: Any, **options: Any) -> None:
            made.append(harness)
            init(harness, *args, **options)

        def checked(scheduler: Scheduler) -> None:
            nonlocal turns, passed
            check(scheduler)
            passed += 1
            if scheduler is made[-1].scheduler and passed % every == 0:
                found = [scheduler.frontiers.independent(t) for t in range(len(made[-1].cells))]  # type: ignore[arg-type]
                assert found == frontiers_of(made[-1])
                turns += any(found)

        patch.setattr(Harness, "__init__", noted)
        patch.setattr(Scheduler, "check_invariants", checked)
        play(run).check_nothing_left()
    return turns


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(settings_of_a_run())
def test_counts_are_exact_for_any_programs_on_any_device(run: dict[str, Any]) -> None:
    compared(run | {"policy": "sufficient"})


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(settings_of_a_run())
def test_counts_are_exact_where_nodes_follow_within_a_task(run: dict[str, Any]) -> None:
    compared(run | {"policy": "auto", "num_workers": 1, "task_s": 1.0})


def test_runs_that_fail_are_cancelled_and_wait_are_among_them() -> None:
    run: dict[str, Any] = {
        "seed": 5, "max_batch": 3, "min_batch": 1, "max_steps": 2, "num_workers": 2, "run_ahead": 1,
        "num_requests": 10, "size": 6, "waits": True, "mishaps": True, "priorities": (0, 1), "spread": 5,
        "num_sequences": 2, "num_chunks": 3, "policy": "sufficient", "patience": 5,
    }  # fmt: skip
    assert compared(run) > 50


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(settings_of_a_run())
def test_counts_are_exact_where_connected_nodes_wait_together(run: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SufficientPolicy, "node_by_node", False)
        compared(run | {"policy": "sufficient", "num_sequences": 0})


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(settings_of_a_run(), st.integers(2, 12))
def test_counts_are_exact_where_nobody_has_asked_before(run: dict[str, Any], every: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SufficientPolicy, "rank", lambda policy, view: view.ready)
        compared(run | {"policy": "sufficient"}, every)


# --- by hand -----------------------------------------------------------------------------------------------------

A, B = cell_type(0, "a", 2, sizes=(1, 9)), cell_type(1, "b", 1, sizes=(1, 9))


def test_a_run_is_one_node_and_leaves_with_its_last_step() -> None:
    core = Harness([A], policy=SufficientPolicy())
    core.arrive(0, chain(A, 3))
    core.arrive(1, chain(A, 2))
    seen = []
    for now_s in (0.0, 1.0, 2.0):
        core.run(now_s)
        seen.append((core.scheduler.num_ready(0), core.scheduler.frontiers.independent(0)))  # type: ignore[arg-type]
    assert seen == [(2, 2), (1, 1), (0, 0)]


def test_a_unit_waits_for_ancestors_of_its_type_through_any_others_and_through_several_edges() -> None:
    """a0 -> b1 -> a2 -> b3 -> a4, and a0 -> a4: one of type a at a time is independent, as is one of type b."""

    def program(recorder: Recorder) -> Any:
        (first,) = recorder.node(A, [host(1), host(1)])
        (second,) = recorder.node(A, [recorder.node(B, [first])[0], host(1)])
        return list(recorder.node(A, [recorder.node(B, [second])[0], first]))
        yield

    core = Harness([A, B], policy=SufficientPolicy())
    core.arrive(0, program)
    seen = []
    for now_s in range(5):
        seen.append([core.scheduler.frontiers.independent(t) for t in range(2)])  # type: ignore[arg-type]
        core.run(float(now_s))
    assert seen[0] == [0, 0]
    assert seen[1:] == [[1, 1], [1, 1], [1, 1], [1, 0]]
    core.run()
    core.check_nothing_left()


def test_frontiers_are_kept_from_the_first_question_until_nothing_is_left() -> None:
    core = Harness([A, B], policy=SufficientPolicy())
    entry = core.scheduler.frontiers
    for request in range(2):
        core.arrive(request, chain(A, 3))
    core.run(0.0)
    assert not entry.is_kept  # one type is ready: nothing to choose
    assert entry.independent(0) == 2
    assert entry.is_kept
    core.run()
    assert not entry.is_kept
    assert not entry.left.any()


def test_frontiers_are_not_kept_for_policies_that_do_not_ask() -> None:
    for policy in (CellularPolicy(), AgendaRemainingPolicy()):
        with pytest.raises(InvariantError, match="needs_frontiers"):
            _ = Scheduler(policy).frontiers


# --- what the policy makes of it ---------------------------------------------------------------------------------


def alternating(first: Any, second: Any, length: int) -> Any:
    """A chain of single nodes: one of the first type, then one of the second, and so on."""

    def program(recorder: Recorder) -> Any:
        value = host(1)
        for i in range(length):
            cell = (first, second)[i % 2]
            (value,) = recorder.node(cell, [value] * len(cell.inputs))
        return [value]
        yield

    return program


def test_a_type_whose_nodes_wait_for_others_lets_those_go_first() -> None:
    """Six requests begin with a and two with b, which then comes to a as well: if b runs first, all a's run at once."""
    core = Harness([A, B], policy=SufficientPolicy())
    for request in range(6):
        core.arrive(request, alternating(A, B, 1))
    for request in (6, 7):
        core.arrive(request, alternating(B, A, 2))
    core.run()
    assert [(ran.cell, ran.step.batch) for ran in core.log] == [("b", 2), ("a", 8)]
    core.check_nothing_left()


def test_ties_go_to_more_ready_nodes_and_then_to_the_lower_type() -> None:
    def order(counts: tuple[int, int]) -> list[str]:
        core = Harness([A, B], policy=SufficientPolicy())
        for cell, count in zip((A, B), counts, strict=True):
            for number in range(count):
                core.arrive(100 * cell.type_id + number, alternating(cell, cell, 1))
        core.run()
        return [ran.cell for ran in core.log]

    assert order((2, 3)) == ["b", "a"]
    assert order((3, 3)) == order((3, 2)) == ["a", "b"]


def test_nodes_are_released_one_by_one() -> None:
    """A node of type a that has its inputs does not wait for its neighbour's, which come from a second b."""

    def program(recorder: Recorder) -> Any:
        (early,) = recorder.node(B, [host(1)])
        (late,) = recorder.node(B, recorder.node(B, [host(2)]))
        (left,) = recorder.node(A, [early, host(3)])
        (right,) = recorder.node(A, [left, late])
        return [right]
        yield

    def order(policy: Any) -> list[str]:
        core = Harness([A, B], policy=policy)
        core.arrive(0, program)
        core.run()
        core.check_nothing_left()
        return [ran.cell for ran in core.log]

    assert order(CellularPolicy()) == ["b", "b", "a", "a"]  # the two a's are one subgraph
    assert order(SufficientPolicy()) == ["b", "a", "b", "a"]


def test_counts_do_not_change_with_the_order_of_numbers() -> None:
    """Numbers are used again: what a request leaves behind must not matter to the next."""
    core = Harness([A, B], policy=SufficientPolicy())
    rng = np.random.default_rng(0)
    for request in range(40):
        core.arrive(request, alternating(A, B, int(rng.integers(1, 9))), float(request))
        if request % 3 == 0:
            core.cancel(request, request + 1.5)
    core.run()
    core.check_nothing_left()
    assert not core.scheduler.frontiers.left.any()
    assert core.scheduler.state.arena.state[0] != READY
