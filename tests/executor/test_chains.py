"""Chains found from what steps say of lanes, beside the same steps carried out one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker.core.commands import ZERO_TABLE, Keep, Lanes, RowSource, RunTask, Step, TableId, TaskLanes
from batchmaker.core.events import TaskId, WorkerId
from batchmaker.executor.cuda.chains import Chains, chains_of
from batchmaker.graph.spec import TypeId

H_LANES, C_LANES, H_ROWS, C_ROWS = (TableId(number) for number in (3, 4, 5, 6))


def step(
    lanes: list[int], arriving: Any = (), *, arriving_c: Any = None, keep: list[tuple[int, int]] | None = None
) -> Step:
    """One step. arriving: (table of h, row, position); of c the like, unless said otherwise. keep: (row, position)."""

    def sources(parts: Any, of_c: bool) -> tuple[RowSource, ...]:
        return tuple(
            RowSource(TableId(table + 1) if of_c and table else table, np.array([row]), np.array([position]))
            for table, row, position in parts
        )

    of_c = arriving if arriving_c is None else arriving_c
    state = Lanes((H_LANES, C_LANES), len(lanes), np.array(lanes), (sources(arriving, False), sources(of_c, True)))
    kept = None
    if keep:
        kept = Keep((H_ROWS, C_ROWS), np.array([row for row, _ in keep]), np.array([position for _, position in keep]))
    return Step(np.arange(len(lanes)), (), state, kept, ())


def one_by_one(steps: list[Step]) -> tuple[dict[Any, Any], list[list[Any]]]:
    """Return what is in memory afterwards, and the state after each step of each position: a nest of what it was."""
    memory: dict[Any, Any] = {}
    states = []
    for each in steps:
        lanes = each.lanes
        before = []
        for part, table in enumerate(lanes.tables):
            values = [memory.get((table, row), (table, row)) for row in lanes.rows.tolist()]
            for source in lanes.arriving[part]:
                for row, position in zip(source.rows.tolist(), source.positions.tolist(), strict=True):
                    place = (source.table, row)
                    values[position] = 0 if source.table == ZERO_TABLE else memory.get(place, place)
            before.append(values)
        after = [("step", state) for state in zip(*before, strict=True)]
        for part, table in enumerate(lanes.tables):
            memory.update({(table, row): (part, new) for row, new in zip(lanes.rows.tolist(), after, strict=True)})
        if each.keep is not None:
            for part, table in enumerate(each.keep.tables):
                for row, position in zip(each.keep.rows.tolist(), each.keep.positions.tolist(), strict=True):
                    memory[table, row] = (part, after[position])
        states.append(after)
    return memory, states


def at_once(task: RunTask, chains: Chains) -> list[Any]:
    """Return the state after each position, from the chains alone."""
    begins = [
        [0 if table == ZERO_TABLE else (table, row) for table, row in zip(*part, strict=True)]
        for part in zip(chains.begin_tables.tolist(), chains.begin_rows.tolist(), strict=True)
    ]
    states: dict[tuple[int, int], Any] = {}
    for chain, length in enumerate(chains.length.tolist()):
        state = ("step", (begins[0][chain], begins[1][chain]))
        for number in range(length):
            states[chain, number] = state
            state = ("step", ((0, state), (1, state)))
    return [states[place] for place in zip(chains.row.tolist(), chains.number.tolist(), strict=True)]


def task_of(steps: list[Step]) -> RunTask:
    """Put steps together to a task of their chains."""
    ends = np.cumsum([each.batch for each in steps])
    moves: list[tuple[int, list[tuple[int, int]]]] = []
    keeps: list[tuple[int, int]] = []
    for each, begin in zip(steps, (ends - [each.batch for each in steps]).tolist(), strict=True):
        for position, row in enumerate(each.lanes.rows.tolist()):
            found = [
                [(source.table, int(source.rows[0])) for source in part if int(source.positions[0]) == position]
                for part in each.lanes.arriving
            ]
            if any(found):
                own = [(table, row) for table in each.lanes.tables]
                moves.append((begin + position, [(mine or [stays])[0] for mine, stays in zip(found, own, strict=True)]))
        if each.keep is not None:
            keeps += zip((begin + each.keep.positions).tolist(), each.keep.rows.tolist(), strict=True)
    keeps.sort()
    at = np.array([position for position, _ in moves], np.int64)
    tables, rows = (
        np.array([[move[part][what] for _, move in moves] for part in range(2)], np.int64).reshape(2, len(moves))
        for what in range(2)
    )
    flags = np.zeros(len(steps), np.bool_)
    lanes = TaskLanes(
        (H_LANES, C_LANES), np.concatenate([each.lanes.rows for each in steps]), ~flags, flags, at, tables, rows
    )
    keep = None
    if keeps:
        positions, kept = np.array(keeps).T
        keep = Keep((H_ROWS, C_ROWS), kept.copy(), positions.copy())
    none = np.zeros((0, int(ends[-1])), np.int64)
    nodes, largest = np.arange(int(ends[-1])), max(each.batch for each in steps)
    return RunTask(TaskId(0), WorkerId(0), TypeId(0), largest, ends, nodes, none, none, lanes, keep, (), flags)


def check(steps: list[Step]) -> Chains | None:
    task = task_of(steps)
    chains = chains_of(task)
    if chains is None:
        return None
    memory, states = one_by_one(steps)
    assert at_once(task, chains) == [state for after in states for state in after]
    assert (np.diff(chains.length) <= 0).all()
    left = {lane: states_of(chains, states, row) for lane, row in zip(chains.lane, chains.lane_row, strict=True)}
    assert len(left) == len(chains.lane)
    for lane, state in left.items():
        assert memory[H_LANES, int(lane)] == (0, state)
    return chains


def states_of(chains: Chains, states: list[list[Any]], row: int) -> Any:
    """Return a row's last state."""
    after = [state for step in states for state in step]
    (position,) = np.flatnonzero((chains.row == row) & (chains.number + 1 == chains.length[row]))
    return after[position]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_the_steps_are_the_chains_compute_the_same_or_are_refused(seed: int) -> None:
    random = np.random.default_rng(seed)
    steps = []
    for _ in range(random.integers(1, 6)):
        batch = int(random.integers(1, 5))
        tables = [ZERO_TABLE, H_LANES, H_ROWS]
        arriving = [
            (tables[random.integers(3)], int(random.integers(6)), position)
            for position in range(batch)
            if random.random() < 0.3
        ]
        keep = [(int(random.integers(20)), position) for position in range(batch) if random.random() < 0.2]
        keep = list(dict(keep).items())
        steps.append(step(random.permutation(6)[:batch].tolist(), arriving, keep=keep))
    check(steps)


def test_chains_that_go_on_are_rows_the_longest_first() -> None:
    chains = check([step([0, 1]), step([0, 1, 2], [(ZERO_TABLE, 9, 2)]), step([2, 0])])
    assert chains is not None
    assert chains.length.tolist() == [3, 2, 2]
    assert chains.row.tolist() == [0, 1, 0, 1, 2, 2, 0]
    assert chains.is_last(np.array([5, 6]))
    assert not chains.is_last(np.array([0]))


def test_a_chain_that_moves_into_the_place_of_another_stays_the_same_row() -> None:
    chains = check([step([0, 1, 2]), step([0, 1], [(H_LANES, 2, 0)])])
    assert chains is not None
    assert chains.length.tolist() == [2, 2, 1]
    assert sorted(zip(chains.lane.tolist(), chains.lane_row.tolist(), strict=True)) == [(0, 1), (1, 0)]


def test_two_chains_may_change_places() -> None:
    chains = check([step([0, 1]), step([0, 1], [(H_LANES, 1, 0), (H_LANES, 0, 1)])])
    assert chains is not None
    assert len(chains.length) == 2


@pytest.mark.parametrize(
    "steps",
    [
        [step([0]), step([0, 1], [(H_LANES, 0, 1)])],  # two successors in one step
        [step([0]), step([1], [(H_LANES, 0, 0)]), step([0])],  # one that goes on from where another has gone on
        [step([0, 1]), step([0], [(H_LANES, 1, 0)], arriving_c=[])],  # h of one chain and c of another
        [step([0], keep=[(7, 0)]), step([1], [(H_ROWS, 7, 0)])],  # begins where one ends
        [step([0, 1], keep=[(7, 0)]), step([0, 1], keep=[(7, 1)])],  # a row that is written twice
    ],
)
def test_what_branches_is_refused(steps: list[Step]) -> None:
    assert chains_of(task_of(steps)) is None
