"""What the order of types under `auto` counts where nodes of a type follow each other: what frontiers count."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, Program, cell_type, complete_tree, host

from batchmaker.graph.recorder import Recorder
from batchmaker.policies.base import ReadyView
from batchmaker.policies.cellular import CellularPolicy
from batchmaker.policies.type_order import count_chains

READ, WRITE, SCORE = cell_type(0, "read"), cell_type(1, "write"), cell_type(2, "score")
JOIN = cell_type(3, "join", 2)
CELLS = (READ, WRITE, SCORE, JOIN)


def reads_writes_and_scores(letters: int, sounds: int, scores: int, *, open_ended: bool) -> Program:
    """A request of three runs; the second begins with the last state of the first."""

    def program(recorder: Recorder) -> Any:
        ends = recorder.run(READ, [host(*range(1, letters + 1))], None)
        written = recorder.run(WRITE, [], ends, max_steps=sounds, open_ended=open_ended)
        recorder.fetch(written[0].steps)
        scored = recorder.run(SCORE, [host(*range(1, scores + 1))], None)
        return [*written, *scored]
        yield

    return program


class Counting(CellularPolicy):
    """Counts what is in flight both ways before every task."""

    watches_requests: ClassVar[bool] = True
    needs_frontiers: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(max_steps=3)
        self.compared = self.left_to_frontiers = 0

    def rank(self, view: ReadyView) -> Any:
        table, counts = view.requests, np.zeros(len(CELLS), np.int64)
        if count_chains(np.arange(len(CELLS)), table.in_flight, table.left, table.width, counts):
            assert counts.tolist() == [max(view.frontiers.independent(cell.type_id), 1) for cell in CELLS]
            self.compared += 1
        else:
            self.left_to_frontiers += 1
        return super().rank(view)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.booleans(), st.integers(0, 12)),
        min_size=1,
        max_size=8,
    )
)
def test_runs_in_flight_are_counted_as_frontiers_count_them(requests: list[tuple[int, int, int, bool, int]]) -> None:
    core = Harness(list(CELLS), policy=(policy := Counting()), tells_time=True)
    for number, (letters, sounds, scores, open_ended, at_s) in enumerate(sorted(requests, key=lambda one: one[4])):
        core.arrive(number, reads_writes_and_scores(letters, sounds, scores, open_ended=open_ended), float(at_s))
    core.run()
    assert policy.compared
    assert not policy.left_to_frontiers


def test_a_tree_whose_nodes_run_side_by_side_is_left_to_frontiers() -> None:
    core = Harness(list(CELLS), policy=(policy := Counting()), tells_time=True)
    core.arrive(0, complete_tree(READ, JOIN, 4), 0.0)
    core.run()
    assert policy.left_to_frontiers == 2  # tasks: the leaves, and both levels above them
