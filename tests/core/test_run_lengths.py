"""What is expected of runs that values end: what a profile told, or what runs that ended have shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, Program, cell_type, host
from situation import enter

from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.cost.lengths import LengthProfile
from batchmaker.cost.profile import CostProfile, PredictedLength, ProfileOptions
from batchmaker.graph.cell_graph import Work
from batchmaker.graph.recorder import Recorder
from batchmaker.policies.auto import AutoPolicy
from batchmaker.policies.expectation import StepsLeft
from batchmaker.policies.requests import RequestTable
from batchmaker.policies.run_lengths import RunLengths
from insides import lengths_of

READ, WRITE = 0, 1
CELLS = (cell_type(READ, "read"), cell_type(WRITE, "write"))
NEVER = float("inf")


def reading(table: RequestTable, slot: int, letters: int, at_most: int, read: int = 0, written: int = 0) -> None:
    """A request that reads letters, then writes until a value ends it; some of it is done."""
    work = Work(np.arange(2), *[np.array([letters, at_most])] * 2)
    enter(table, slot, NEVER, work)
    table.begin([slot], 0.0)
    for type_id, done in ((READ, read), (WRITE, written)):
        table.submitted(np.full(done, slot), type_id)


def made(*, stops: bool = True) -> RequestTable:
    table = RequestTable()
    for type_id in (READ, WRITE):
        table.add_type()
        table.note_run(type_id, may_stop=stops and type_id == WRITE)
    return table


def serving(*, stops: bool = True) -> tuple[RunLengths, RequestTable]:
    """Lengths of which no profile told anything, and a table without requests."""
    lengths = RunLengths()
    lengths.learn_types(CELLS)
    return lengths, made(stops=stops)


def told(pairs: list[tuple[int, int]]) -> CostProfile:
    lengths = PredictedLength("write", "read", LengthProfile.from_pairs(*zip(*pairs, strict=True)))
    costs = LatencyTable((CellLatency("write", (1,), (1e-3,), (1e-3,)),))
    return CostProfile("writer", ProfileOptions("float32", 1, "a processor", "0"), costs, (lengths,))


def write_and_end(lengths: RunLengths, table: RequestTable, slot: int, written: int) -> None:
    reading(table, slot, 4, 20, 4, written)
    table.stopped(np.array([slot]), WRITE, np.array([20 - written]), np.array([0]))
    lengths.requests_finished(table, [slot])
    table.leave([slot])
    table.forget([slot])


def reads_and_writes(letters: list[int], at_most: int) -> Program:
    def program(recorder: Recorder) -> Any:
        ends = recorder.run(CELLS[READ], [host(*letters)], None)
        written = recorder.run(CELLS[WRITE], [], ends, max_steps=at_most, open_ended=True)
        recorder.fetch(written[0].steps)
        return list(written)
        yield

    return program


def test_auto_expects_of_a_new_request_what_those_it_has_answered_have_shown() -> None:
    core = Harness(list(CELLS), policy=(policy := AutoPolicy()), tells_time=True)
    for request in range(60):
        core.arrive(request, reads_and_writes([request + 1, request + 2], at_most=60), 2.0 * request)
    core.run()
    table = made()
    reading(table, 0, 2, 60)
    assert lengths_of(policy).remaining(table, np.array([0]))[0, WRITE] < 15  # one token in four ends a run


def test_until_a_run_has_ended_a_request_is_expected_to_write_as_much_as_it_may() -> None:
    lengths, table = serving()
    reading(table, 0, 5, 20, read=2)
    assert lengths.remaining(table, np.array([0])).tolist() == [[3, 20]]


def test_after_runs_of_seven_steps_a_request_is_expected_to_write_seven_and_never_fewer_than_one_more() -> None:
    lengths, table = serving()
    for slot in range(30):
        write_and_end(lengths, table, slot, written=7)
    reading(table, 0, 5, 20)
    reading(table, 1, 5, 20, read=5, written=4)
    reading(table, 2, 5, 20, read=5, written=9)
    assert lengths.remaining(table, np.array([0, 1, 2])).tolist() == [[5, 7], [0, 3], [0, 1]]


def test_a_request_is_not_expected_to_write_more_than_its_graph_allows() -> None:
    lengths, table = serving()
    write_and_end(lengths, table, 0, written=7)
    reading(table, 0, 5, 4)
    assert lengths.remaining(table, np.array([0])).tolist() == [[5, 4]]


def test_runs_side_by_side_count_as_the_steps_that_they_take_together() -> None:
    lengths, table = serving()
    enter(table, 0, NEVER, Work(np.array([WRITE]), np.array([80]), np.array([20])))  # four runs of at most 20
    table.begin([0], 0.0)
    table.submitted(np.zeros(40, np.int64), WRITE)
    table.stopped(np.array([0]), WRITE, np.array([40]), np.array([0]))
    lengths.requests_finished(table, [0])
    enter(table, 1, NEVER, Work(np.array([WRITE]), np.array([80]), np.array([20])))
    assert lengths.remaining(table, np.array([1]))[0, WRITE] == 10


def test_runs_that_no_value_ends_stay_as_long_as_the_graph_says() -> None:
    lengths, table = serving(stops=False)
    write_and_end(lengths, table, 0, written=7)
    reading(table, 0, 5, 20)
    assert lengths.remaining(table, np.array([0])).tolist() == [[5, 20]]


def test_what_was_learnt_stays_when_a_cell_type_is_added() -> None:
    lengths, table = serving()
    write_and_end(lengths, table, 0, written=7)
    lengths.learn_types((*CELLS, cell_type(2, "score")))
    table.add_type()
    reading(table, 0, 5, 20)
    assert lengths.remaining(table, np.array([0])).tolist() == [[5, 7, 0]]


def test_another_profile_takes_the_place_of_what_the_first_one_told() -> None:
    lengths, table = RunLengths(), made()
    lengths.use(told([(5, 9)]))
    lengths.learn_types(CELLS)
    reading(table, 0, 5, 20)
    before = lengths.remaining(table, np.array([0])).tolist()
    lengths.use(replace(told([(5, 9)]), lengths=()))
    lengths.learn_types(CELLS)
    assert (before, lengths.remaining(table, np.array([0])).tolist()) == ([[5, 9]], [[5, 20]])


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=120),
    later=st.lists(st.integers(1, 40), max_size=40),
    under_way=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50), st.booleans()), min_size=1, max_size=8),
)
def test_a_profile_is_read_as_lazybatching_reads_it_also_when_more_was_learnt(
    pairs: list[tuple[int, int]], later: list[int], under_way: list[tuple[int, int, bool]]
) -> None:
    ours, theirs, table = RunLengths(), StepsLeft("conditional", 0.75, 90.0), made()
    for one in (ours, theirs):
        one.use(told(pairs))
        one.learn_types(CELLS)
    for written in later:
        reading(table, 0, 4, 60, 4, written)
        for one in (ours, theirs):
            one.remaining(table, np.array([0]))  # what is looked up is made anew now and then, when it is asked for
            one.requests_finished(table, [0])
        table.leave([0])
        table.forget([0])
    for slot, (letters, written, is_open) in enumerate(under_way):
        reading(table, slot, letters, 60, letters, written)
        table.open[slot] = is_open
    slots = np.arange(len(under_way))
    assert ours.predicted_types == {WRITE}
    assert ours.remaining(table, slots).tolist() == theirs.remaining(table, slots).tolist()
