"""Chunks of sequences whose graphs are shared begin, and are answered, in the compiled turn: nobody can tell it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import ChunkProgram, Harness, cell_type, host, same
from test_scheduler_properties import make_cells, random_chunk

from batchmaker.core import sequence_store
from batchmaker.core.commands import Admit, RunTask
from batchmaker.core.events import Event, RequestArrived
from batchmaker.graph.recorder import Recorder
from insides import listen_to_arrivals

CELL, OTHER = cell_type(0, "step"), cell_type(1, "other")


def step(cell: Any = CELL) -> ChunkProgram:
    """One node, on the node that is kept or on a number; it is kept."""

    def program(recorder: Recorder, kept: list[list[Any]]) -> Any:
        before = kept[0][0] if kept else host(7)
        (value,) = recorder.node(cell, [before])
        recorder.keep(np.array([value.node]))
        return [value]
        yield

    return program


class Shared:
    """A harness whose chunks share the graph of those before them with the same program and as much that is kept."""

    def __init__(self, harness: Harness, monkeypatch: Any) -> None:
        self.harness, self.num_arrived = harness, 0
        self._graphs: dict[Any, Any] = {}

        def counted(events: Sequence[RequestArrived]) -> None:
            self.num_arrived += len(events)

        listen_to_arrivals(monkeypatch, counted)
        handle = harness.handle
        monkeypatch.setattr(harness, "handle", lambda events: handle([self._sharing(event) for event in events]))

    def _sharing(self, event: Event) -> Event:
        if not isinstance(event, RequestArrived) or event.sequence is None or event.open:
            return event
        key = (event.graph.num_nodes, event.graph.first, repr(event.graph))
        graph = self._graphs.setdefault(key, event.graph)
        graph.shared = True
        return replace(event, graph=graph)


def commands_without_sharing(harness: Harness) -> list[Any]:
    """What a scheduler commands for the same events, if no two requests have the same graph."""
    again, commands = harness.make(), list[Any]()
    for events in harness.events:
        alone = [
            replace(one, graph=replace(one.graph, shared=False)) if isinstance(one, RequestArrived) else one
            for one in events
        ]
        commands += again.handle(*alone)
        again.check_invariants()
    return commands


def check_nobody_can_tell(harness: Harness) -> None:
    harness.check_nothing_left()
    alone = commands_without_sharing(harness)
    assert len(alone) == len(harness.commands)
    for one, other in zip(alone, harness.commands, strict=True):
        assert same(one, other)


def test_live_chunks_of_many_sequences_begin_in_the_compiled_turn(harness, monkeypatch):
    one = harness([CELL])
    shared, program = Shared(one, monkeypatch), step()
    for sequence in range(5):
        chunks = [(100 * sequence + number, program, None) for number in range(6)]
        one.arrive_chunks(sequence, chunks, at_s=0.0, gap_s=0.5)
    one.run()
    assert shared.num_arrived <= 10  # the first of each of the two graphs is admitted, with those beside it
    assert sum(isinstance(command, Admit) for command in one.commands) == 30
    assert max(len(command.nodes) for command in one.commands if isinstance(command, RunTask)) == 4
    check_nobody_can_tell(one)


def test_a_chunk_whose_sequence_keeps_a_node_of_another_type_is_admitted_as_a_new_graph(harness, monkeypatch):
    one = harness([CELL, OTHER])
    shared, program = Shared(one, monkeypatch), step()
    one.arrive_chunks(0, [(number, program, None) for number in range(3)], at_s=0.0, gap_s=0.5)
    before = shared.num_arrived
    one.arrive_chunks(1, [(10, step(OTHER), None), (11, program, None)], at_s=50.0, gap_s=0.5)
    one.run()
    assert before < shared.num_arrived
    check_nobody_can_tell(one)


@pytest.mark.parametrize("words", [1, 1 << 16])
def test_lists_of_what_is_kept_that_nobody_needs_are_dropped_and_nobody_can_tell(harness, monkeypatch, words):
    monkeypatch.setattr(sequence_store, "LIST_WORDS", words)
    one = harness([CELL])

    def growing(recorder: Recorder, kept: list[list[Any]]) -> Any:
        (value,) = recorder.node(CELL, [kept[-1][0] if kept else host(7)])
        recorder.keep(np.arange(value.node + 1))  # all before it, too: each chunk's list is another
        return [value]
        yield

    before = len(one.scheduler.state.arena.keeps)
    for sequence in range(3):
        chunks = [(100 * sequence + number, growing, None) for number in range(50)]
        one.arrive_chunks(sequence, chunks, at_s=float(sequence), gap_s=1.0)
    one.run()
    assert (len(one.scheduler.state.arena.keeps) == before) == (words == 1), "all lists together are longer"
    one.check_nothing_left()
    one.check_replay()


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_random_chunks_that_share_graphs_get_the_values_and_commands_of_others(
    monkeypatch, seed, max_steps, num_programs, num_workers, in_one_turn
):
    """in_one_turn: chunks arrive in turns in which others end, where numbers are given out in another order."""
    rng = random.Random(seed)
    cells = make_cells(1, 4, rng)
    one = Harness(cells, max_steps=max_steps, num_workers=num_workers)
    with monkeypatch.context() as patch:
        Shared(one, patch)
        programs = [random_chunk(cells, rng.randrange(2**32), size=3, waits=False) for _ in range(num_programs)]
        for sequence in range(4):
            chunks = [(100 * sequence + number, rng.choice(programs), None) for number in range(4)]
            at_s, gap_s = (float(rng.randint(0, 2)), 1.0) if in_one_turn else (rng.random(), rng.random())
            one.arrive_chunks(sequence, chunks, at_s=at_s, gap_s=gap_s)
        one.run()
    if in_one_turn:
        one.check_nothing_left()
        one.check_replay()
    else:
        check_nobody_can_tell(one)
