"""How many steps a task has where it is bounded by time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from scheduler_harness import Harness, Program, cell_type, chain, complete_tree, host

from batchmaker.core.batching import MOST_AHEAD, SATURATED_BUDGETS, TASKS_WORTH
from batchmaker.policies.auto import AutoPolicy
from batchmaker.policies.base import ReadyView
from batchmaker.policies.cellular import CellularPolicy

CHAIN = cell_type(0, "chain", 2, 1, (1, 4))
BUDGET_STEPS = 10
"""Steps that fit into a budget; each takes a second."""


def play(num_requests: int, *, length: int = 200, cells: Any = (CHAIN,), priority: int = 0, **options: Any) -> Harness:
    core = Harness(
        list(cells), policy=CellularPolicy(budget_ms=1e3 * BUDGET_STEPS), tells_time=True, reports=lambda: 64, **options
    )
    for request in range(num_requests):
        core.arrive(request, chain(cells[0], length), priority=priority if request == 0 else 0)
    return core


def test_a_task_has_as_many_steps_as_fit_into_the_budget_once_their_time_is_known() -> None:
    assert play(3).run().steps_per_task()[1:4] == [BUDGET_STEPS] * 3


def test_a_task_takes_more_while_a_full_batch_waits_behind_its_own() -> None:
    assert play(12).run().steps_per_task()[1] == SATURATED_BUDGETS * BUDGET_STEPS


@pytest.mark.parametrize("num_requests", [4, 7])
def test_a_task_takes_one_budget_where_newcomers_can_still_join(num_requests: int) -> None:
    assert play(num_requests).run().steps_per_task()[1] == BUDGET_STEPS


def test_a_task_takes_one_budget_while_another_type_waits() -> None:
    other = cell_type(1, "other", 2, 1, (1, 4))
    core = play(12, cells=(CHAIN, other))
    core.arrive(100, chain(other, 200))
    core.run()
    tasks = [ran.task for ran in core.log if ran.cell == "chain" and ran.start_s < 300]
    sizes = [tasks.count(task) for task in sorted(set(tasks))]
    assert max(sizes[1:]) == BUDGET_STEPS


def test_a_task_takes_one_budget_while_priorities_differ() -> None:
    assert play(12, priority=1).run().steps_per_task()[1] == BUDGET_STEPS


def stopping_after(cell: Any, steps: int) -> Any:
    """A loop of at most so many steps that a value may end."""

    def program(recorder: Any) -> Any:
        outputs = recorder.run(cell, [host(*range(1, steps + 1))], None, open_ended=True)
        return list(outputs)
        yield

    return program


@pytest.mark.parametrize("loops_ahead", [False, True])
def test_loops_that_a_value_ends_have_several_steps_in_a_task_where_they_run_ahead(loops_ahead: bool) -> None:
    cell = cell_type(0, "loop", 2, 1, (1, 4))
    core = Harness(
        [cell], policy=CellularPolicy(budget_ms=1e3 * BUDGET_STEPS), tells_time=True, loops_ahead=loops_ahead
    )
    for request in range(4):
        core.arrive(request, stopping_after(cell, 30))
    core.run()
    core.check_nothing_left()
    assert (max(core.steps_per_task()) > 1) == loops_ahead


class Watching(CellularPolicy):
    """Sees what is left of each request when it is answered, and what was done."""

    watches_requests: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(budget_ms=1e3 * BUDGET_STEPS)
        self.counts: list[tuple[int, int]] = []

    def requests_finished(self, view: ReadyView, slots: Sequence[int]) -> None:
        left, done = view.requests.left, view.requests.done
        self.counts += [(int(left[slot].sum()), int(done[slot].sum())) for slot in slots]


def test_steps_behind_the_end_of_a_loop_count_as_neither_done_nor_left() -> None:
    seen = []
    for loops_ahead in (False, True):
        cell, policy = cell_type(0, "loop", 1, 1, (1, 4)), Watching()
        core = Harness([cell], policy=policy, tells_time=True, loops_ahead=loops_ahead)
        for request in range(4):
            core.arrive(request, chain(cell, 20 + request, open_ended=True))
        core.run()
        assert (max(core.steps_per_task()) > 1) == loops_ahead
        assert [left for left, _ in policy.counts] == [0] * 4
        seen.append(sorted(done for _, done in policy.counts))
    assert seen[0] == seen[1]
    assert seen[0][-1] > 1


@pytest.mark.parametrize(("task_s", "most"), [(0.0, 1), (0.2, int(0.2 * TASKS_WORTH)), (1.0, BUDGET_STEPS)])
def test_where_tasks_cost_something_a_step_for_step_policy_gives_them_steps_in_proportion(
    task_s: float, most: int
) -> None:
    cells = (CHAIN, cell_type(1, "other", 2, 1, (1, 4)))
    core = Harness(
        list(cells), policy=AutoPolicy(budget_ms=1e3 * BUDGET_STEPS), tells_time=True, reports=lambda: 64, task_s=task_s
    )
    for request in range(4):
        core.arrive(request, chain(cells[request % 2], 200))
    core.run()
    assert max(core.steps_per_task()[2:8]) == most


def test_single_nodes_fill_a_task_whose_steps_are_weighed() -> None:
    leaf, inner = cell_type(0, "leaf", 1, 1, (1, 4)), cell_type(1, "inner", 2, 1, (1, 4))
    core = Harness(
        [leaf, inner], policy=AutoPolicy(budget_ms=1e3 * BUDGET_STEPS), tells_time=True, reports=lambda: 64, task_s=1.0
    )
    core.arrive(0, complete_tree(leaf, inner, 64))
    core.run()
    assert core.steps_per_task()[0] == MOST_AHEAD


def steps_of(program: Program, cells: Any, **options: Any) -> list[tuple[str, int]]:
    """What runs of one request, as the type and the number of steps of each task."""
    policy = AutoPolicy(budget_ms=1e3 * BUDGET_STEPS)
    core = Harness(list(cells), policy=policy, **{"reports": lambda: 64, "task_s": 1.0} | options)
    core.arrive(0, program)
    core.run()
    core.check_nothing_left()
    tasks = [ran.task for ran in core.log]
    return [(next(ran.cell for ran in core.log if ran.task == task), tasks.count(task)) for task in sorted(set(tasks))]


@pytest.mark.parametrize(
    ("options", "tasks"),
    [({}, [1, 4]), ({"task_s": 0.0}, [1] * 5), ({"num_workers": 2}, [1] * 5)],
    ids=["one worker", "tasks cost nothing", "another worker could take them"],
)
def test_nodes_of_a_tree_follow_their_children_within_a_task(options: dict[str, Any], tasks: list[int]) -> None:
    leaf, inner = cell_type(0, "leaf", 1, 1, (1, 32)), cell_type(1, "inner", 2, 1, (1, 32))
    found = steps_of(complete_tree(leaf, inner, 16), (leaf, inner), **options)
    assert [steps for _, steps in found] == tasks


@pytest.mark.parametrize(("num_held_up", "steps"), [(1, 2), (2, 1)])
def test_followers_wait_where_another_type_holds_up_more_than_half_as_many(num_held_up: int, steps: int) -> None:
    a, b = cell_type(0, "a", 2, 1, (1, 16)), cell_type(1, "b", 1, 1, (1, 16))

    def program(recorder: Any) -> Any:
        """Three nodes, each with one that follows it; some of these read a node of the other type, too."""
        first = [recorder.node(a, [host(i), host(i)])[0] for i in range(3)]
        between = [recorder.node(b, [first[i]])[0] for i in range(num_held_up)]
        return [recorder.node(a, [first[i], between[i] if i < num_held_up else host(i)])[0] for i in range(3)]
        yield

    assert steps_of(program, (a, b)) == [("a", steps), ("b", 1), ("a", 1)]


def test_a_node_that_comes_later_waits_until_those_of_its_type_from_before_are_done() -> None:
    """The first step is known while a chain of nodes behind it runs, and a node that reads the end of it comes then."""
    a = cell_type(0, "a", 2, 1, (1, 4))

    def program(recorder: Any) -> Any:
        nodes = [recorder.node(a, [host(0), host(0)])[0]]
        for i in range(5):
            nodes.append(recorder.node(a, [nodes[-1], host(i)])[0])
        yield [nodes[0]]
        return [recorder.node(a, [nodes[-1], host(9)])[0]]

    assert steps_of(program, (a,), reports=lambda: 1) == [("a", 6), ("a", 1)]
