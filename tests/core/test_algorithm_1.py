"""Schedule, Batch and FormBatchedTask, one sentence at a time."""

from __future__ import annotations

import numpy as np
from scheduler_harness import Harness, cell_type, chain, complete_tree, host


def two_types(priority_a=0, priority_b=0, sizes=(1, 4)):
    return [cell_type(0, "a", 2, 1, sizes, priority_a), cell_type(1, "b", 2, 1, sizes, priority_b)]


def singles(cell, count):
    def program(recorder):
        return list(recorder.map(cell, [host(*range(count))] * len(cell.inputs)))
        yield

    return program


def cells_in_order(core: Harness) -> list[str]:
    return [ran.cell for ran in core.log]


def test_a_full_batch_wins_over_a_type_that_is_not_running(harness):
    a, b = two_types(priority_b=9)
    core = harness([a, b])
    for request in range(4):
        core.arrive(request, chain(a, 1))
    core.arrive(9, chain(b, 1))
    assert cells_in_order(core.run()) == ["a", "b"]


def test_a_type_that_is_not_running_wins_over_one_that_is(harness):
    a, b = two_types(priority_a=9)
    core = harness([a, b], num_workers=2)
    core.arrive(1, chain(a, 1))
    core.arrive(2, chain(a, 1), 0.5)
    core.arrive(3, chain(b, 1), 0.5)
    core.run(0.4)
    assert cells_in_order(core) == ["a"]
    core.run()
    assert [(ran.start_s, ran.worker, ran.cell) for ran in core.log][1:] == [(0.5, 1, "b"), (1.0, 0, "a")]


def test_not_running_beats_priority_when_both_wait_for_one_worker(harness):
    a, b = two_types(priority_a=9)
    core = harness([a, b], num_workers=2, duration=lambda: 1.0)
    core.arrive(1, chain(a, 3))
    core.arrive(2, chain(a, 1), 0.5)
    core.arrive(3, chain(b, 1), 0.5)
    core.run()
    assert [(ran.start_s, ran.worker, ran.cell) for ran in core.log][:2] == [(0.0, 0, "a"), (0.5, 1, "b")]


def test_anything_ready_runs_even_if_its_type_runs_already(harness):
    a, b = two_types()
    core = harness([a, b], num_workers=2)
    core.arrive(1, chain(a, 2))
    core.arrive(2, chain(a, 2), 0.5)
    core.run()
    assert [(ran.start_s, ran.worker) for ran in core.log][:2] == [(0.0, 0), (0.5, 1)]


def test_priority_breaks_ties_between_full_batches_and_between_idle_types(harness):
    for count in (4, 1):
        a, b = two_types(priority_b=1)
        core = harness([a, b])
        for request in range(count):
            core.arrive(request, chain(a, 1))
            core.arrive(10 + request, chain(b, 1))
        assert cells_in_order(core.run()) == ["b", "a"]


def test_a_task_has_at_most_max_steps(harness):
    cell = cell_type(0, "a", 2)
    core = harness([cell], max_steps=5)
    core.arrive(1, chain(cell, 12))
    core.run()
    assert core.steps_per_task() == [5, 5, 2]


def test_a_late_request_joins_the_next_task(harness):
    cell = cell_type(0, "a", 2)
    core = harness([cell], max_steps=2)
    core.arrive(1, chain(cell, 4))
    core.arrive(2, chain(cell, 1), 0.5)
    core.run()
    assert core.timeline() == [(0, "a", (1,)), (1, "a", (1,)), (2, "a", (1, 2)), (3, "a", (1,))]


def test_a_batch_below_the_minimum_ends_the_task_but_never_starts_none(harness):
    cell = cell_type(0, "a", 2, sizes=(4, 8))
    core = harness([cell], max_steps=5)
    for request in range(5):
        core.arrive(request, chain(cell, 1 if request < 2 else 3))
    core.run()
    assert [ran.step.batch for ran in core.log] == [5, 3, 3]
    assert core.steps_per_task() == [1, 1, 1]


def test_a_pinned_chain_is_skipped_by_other_workers_and_free_after_its_last_step(harness):
    a, b = two_types(priority_b=5)
    core = harness([a, b], num_workers=2)
    core.arrive(1, chain(a, 4))
    core.run()
    assert {ran.worker for ran in core.log} == {0}
    core.arrive(2, chain(a, 2), 10.0)  # worker 0
    core.arrive(3, chain(b, 9), 10.5)  # worker 1
    core.run()
    assert next((ran.worker, ran.cell) for ran in core.log if ran.requests == (3,)) == (1, "b")


def test_a_chain_moves_to_another_worker_between_tasks_and_keeps_its_state(harness):
    a, b = two_types(priority_b=5)
    core = harness([a, b], num_workers=2, max_steps=1)
    core.arrive(1, chain(a, 5))
    core.arrive(2, chain(b, 5), 1.0)  # worker 0 prefers it, worker 1 takes the chain
    core.run()
    assert len({ran.worker for ran in core.log if 1 in ran.requests}) == 2
    assert all(how == "reply" for _, how in core.answers.values())


def test_other_subgraphs_become_ready_only_at_completion(harness):
    leaf, inner = cell_type(0, "leaf", 1, 2), cell_type(1, "inner", 4, 2, priority=9)
    core = harness([leaf, inner], run_ahead=2, max_steps=5)
    core.arrive(1, complete_tree(leaf, inner, 2))
    core.arrive(2, singles(leaf, 12), 0.5)
    core.run()
    leaves_done = max(ran.finish_s for ran in core.log if ran.cell == "leaf" and 1 in ran.requests)
    assert min(ran.start_s for ran in core.log if ran.cell == "inner") >= leaves_done


def test_run_ahead_submits_the_next_task_while_the_last_step_runs(harness):
    cell = cell_type(0, "a", 2)
    core = harness([cell], run_ahead=1, max_steps=2)
    core.arrive(1, chain(cell, 6))
    core.run(1.0)
    assert core.scheduler.num_tasks == 2
    core.run()
    assert core.left_s(1) == 6


def test_subgraphs_never_wait_for_each_other(harness):
    """Two types that take turns, with shortcuts, as in a decoder with attention: a -> b -> a."""
    a, b = cell_type(0, "a", 2), cell_type(1, "b", 1)
    core = harness([a, b])

    def program(recorder):
        (value,) = recorder.node(a, [host(1), host(2)])
        for _ in range(5):
            (seen,) = recorder.node(b, [value])
            (value,) = recorder.node(a, [value, seen])
        return [value]
        yield

    core.arrive(1, program)
    core.run()
    assert cells_in_order(core) == ["a", *["b", "a"] * 5]


# --- lanes and rows --------------------------------------------------------------------------------------------------


def test_an_unchanged_batch_stays_a_slice_and_brings_nothing(harness):
    cell = cell_type(0, "a", 2)
    core = harness([cell], max_steps=2)
    for request in range(3):
        core.arrive(request, chain(cell, 6))
    core.run()
    assert all(ran.step.lanes.rows is None for ran in core.log)
    assert [any(ran.step.lanes.arriving) for ran in core.log] == [True, False, False, False, False, False]


def test_one_row_moves_when_a_chain_leaves_and_a_newcomer_takes_the_free_lane(harness):
    cell = cell_type(0, "a", 2)
    core = harness([cell])
    for request, length in enumerate([2, 6, 6, 6]):
        core.arrive(request, chain(cell, length))
    core.arrive(9, chain(cell, 3), 3.5)
    core.run()
    arrived = [sum(len(source.rows) for source in ran.step.lanes.arriving[0]) for ran in core.log]
    assert arrived == [4, 0, 1, 0, 1, 0, 1]
    moving = core.log[2].step.lanes.arriving[0][0]
    assert (moving.rows.tolist(), moving.positions.tolist()) == ([3], [0])
    assert core.log[4].step.lanes.arriving[0][0].positions.tolist() == [3]


def test_a_tree_writes_into_its_childrens_rows(harness):
    leaf, inner = cell_type(0, "leaf", 1, 2, sizes=(1, 64)), cell_type(1, "inner", 4, 2, sizes=(1, 64))
    core = harness([leaf, inner])
    core.arrive(1, complete_tree(leaf, inner, 16))
    core.run()
    leaf_rows = set(core.log[0].step.keep.rows.tolist())
    for ran in core.log[1:-1]:
        assert set(ran.step.keep.rows.tolist()) <= leaf_rows
        assert ran.step.keep.rows.tolist() == ran.step.inputs[0][0].rows.tolist()


def test_a_shared_child_keeps_its_row_until_its_last_reader(harness):
    leaf, inner = cell_type(0, "leaf", 1, 2), cell_type(1, "inner", 4, 2)
    core = harness([leaf, inner])

    def program(recorder):
        leaves = recorder.map(leaf, [host(1, 2)])
        nodes = recorder.tree(inner, np.array([[0, 1], [0, 2], [0, 3]]), leaves, [])
        return [nodes[0][-1]]
        yield

    core.arrive(1, program)
    core.run()
    shared = int(core.log[0].step.keep.rows[0])
    assert all(shared not in ran.step.keep.rows for ran in core.log[1:] if ran.step.keep is not None)


def test_a_long_run_keeps_one_lane_and_no_row(harness):
    cell = cell_type(0, "a", 2)
    core = harness([cell], check_always=False)
    core.arrive(1, chain(cell, 2000))
    core.run(1000.0)
    assert core.scheduler.num_rows == 0
    assert int((core.scheduler.state.arena.occupants(0, 0) >= 0).sum()) == 1
    core.run()
