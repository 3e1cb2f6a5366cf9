"""A turn of the scheduler is one compiled call, which changes nothing more where a table lacks room."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import Harness, cell_type, chain, complete_tree

from batchmaker.core import scheduler
from batchmaker.core.steps import LANES_WANTED, NUM_STEPS, ROWS_WANTED
from batchmaker.core.turn import NUM_TYPES
from batchmaker.policies import make
from batchmaker.policies.order import ALGORITHM_1, MEAN_DEPTH, READY_SHARE, ranked

CELL, LEAF, INNER = cell_type(0, "chain", 2), cell_type(1, "leaf"), cell_type(2, "inner", 2)


class Turns:
    """Counts the compiled calls, and looks whether one that lacks room for a task changes any table."""

    def __init__(self, monkeypatch: Any) -> None:
        self.count = self.num_lacking = 0
        self.harness: Harness | None = None
        self._turn = scheduler.turn
        monkeypatch.setattr(scheduler, "turn", self)

    def __call__(self, addresses: Any, forms: Any, task: Any, first: int, end: int, *others: Any) -> Any:
        self.count += 1
        before = None if first < end or others[3].shape[1] else self._tables()
        found, formed = self._turn(addresses, forms, task, first, end, *others)
        if found[NUM_TYPES]:
            assert not formed[NUM_STEPS]
            assert formed[ROWS_WANTED] or formed[LANES_WANTED]
            if before is not None:
                self.num_lacking += 1
                assert all(np.array_equal(*both) for both in zip(before, self._tables(), strict=True))
        return found, formed

    def _tables(self) -> list[Any]:
        assert self.harness is not None
        arena = self.harness.scheduler.state.arena
        return [table.copy() for table in (arena.nodes, arena.subgraphs, arena.types, arena.queue, arena.pools,
                arena.workers, arena.lanes, arena.occupant, arena.counts)]  # fmt: skip


def test_steps_that_have_run_and_the_next_task_are_one_compiled_call(harness, monkeypatch):
    one = harness([CELL], max_steps=2)
    one.arrive(1, chain(CELL, 9))
    one.run(1.5)
    turns = Turns(monkeypatch)
    turns.harness = one
    handle, num_handled = one.scheduler.handle, []
    monkeypatch.setattr(one.scheduler, "handle", lambda *events: (num_handled.append(events), handle(*events))[1])
    one.run(5.5)
    assert len(one.log) > 5
    assert turns.count == len(num_handled) > 2


@pytest.mark.parametrize("policy", ["cellular", "agenda", "sufficient"])
def test_a_turn_that_lacks_room_for_a_task_changes_nothing_and_is_called_again(harness, monkeypatch, policy):
    one = harness([CELL, LEAF, INNER], policy=make(policy))
    turns = Turns(monkeypatch)
    turns.harness = one
    one.arrive(0, chain(CELL, 3))
    one.arrive(1, complete_tree(LEAF, INNER, 300))
    one.run()
    assert turns.num_lacking > 0
    assert one.answers[1][1] == "reply"


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(0, 3), st.integers(-2, 2)), min_size=1, max_size=6
    )
)
def test_types_are_ranked_by_what_each_order_says(types):
    """types: (ready, max_batch, measure, priority) of each."""
    ready = np.arange(len(types)) * 2
    columns = [np.array(column, np.int64) for column in zip(*types, strict=True)]
    num_ready, max_batch, measure, priority = columns
    keys = {
        ALGORITHM_1: lambda n, most, m, p: (0 if n >= most else 2 if m > 0 else 1, -p),
        MEAN_DEPTH: lambda n, most, m, p: (m,),
        READY_SHARE: lambda n, most, m, p: (n < most, -n / (m + 1), -n),
    }
    for order, key in keys.items():
        looked_at = (measure + 1 if order == READY_SHARE else measure).astype(np.float64)
        found = ranked(order, ready, num_ready, max_batch, looked_at, priority).tolist()
        assert found == [2 * i for i in sorted(range(len(types)), key=lambda i: (*key(*types[i]), i))]
