"""The open sequences of an engine, without an engine: time is virtual and nothing is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from engine_models import Totals

from batchmaker.clock import VirtualClock
from batchmaker.core.events import RequestId
from batchmaker.engine.open_sequences import Sequences
from batchmaker.engine.request import Chunk, SequenceEntry, Settled, Ticket
from batchmaker.errors import CancelledError, DeadlineError, SequenceError
from insides import num_time_outs


class Desk:
    """Sends chunks and answers those that have begun. outcomes: by request, its error or None."""

    def __init__(self, *, give_up_late: bool = True) -> None:
        self.clock = VirtualClock()
        self.sequences = Sequences(self.clock, give_up_late=give_up_late)
        self.sequences.settle = self.settle
        self.begun: list[int] = []
        self.outcomes: dict[int, BaseException | None] = {}
        self._tickets: dict[int, Ticket] = {}

    def open(self, idle_timeout_s: float) -> SequenceEntry:
        entry = self.sequences.make(idle_timeout_s)
        self.sequences.open(entry)
        return entry

    def send(self, entry: SequenceEntry, request: int, deadline_s: float | None = None, era: int = 0) -> None:
        ticket = Ticket(RequestId(request), None, self.clock.now_s(), deadline_s, model=Totals())
        ticket.chunk = Chunk(entry, era)
        self._tickets[request] = ticket
        entry.accept([ticket])
        self.begun += [begun.request_id for begun in self.sequences.may_begin([ticket])]

    def settle(self, outcomes: Sequence[Settled]) -> None:
        for ticket, _, error in outcomes:
            assert ticket.request_id not in self.outcomes, "settled twice"
            self.outcomes[ticket.request_id] = error
            assert ticket.chunk is not None
            self.sequences.settled([(ticket, ticket.chunk, error)])
            self.begun += [due.request_id for due in self.sequences.take_due()]

    def answer(self, request: int, error: BaseException | None = None) -> None:
        self.settle([(self._tickets[request], None, error)])

    def at(self, now_s: float) -> None:
        self.clock.advance(now_s - self.clock.now_s())
        self.sequences.expire(now_s)


def test_chunks_of_a_sequence_begin_one_after_another_and_those_of_others_do_not_wait() -> None:
    desk = Desk()
    one, other = desk.open(60), desk.open(60)
    for request in (1, 2, 3):
        desk.send(one, request)
    desk.send(other, 4)
    assert desk.begun == [1, 4]
    desk.answer(1)
    assert desk.begun == [1, 4, 2]
    assert desk.sequences.num_waiting == 1


def test_the_time_out_counts_from_the_last_answer_and_not_while_a_chunk_is_open() -> None:
    desk = Desk()
    entry = desk.open(10)
    assert desk.sequences.next_wakeup_s() == 10
    desk.at(9)
    desk.send(entry, 1)
    desk.at(25)  # it takes long
    assert entry.ended is None
    desk.answer(1)
    desk.at(34.5)
    assert entry.ended is None
    desk.at(35)
    assert entry.ended == "no chunk came for 10 s"
    assert desk.sequences.take_closed() == [entry.sequence_id]
    assert desk.sequences.num_open == 0
    desk.send(entry, 2)
    assert isinstance(desk.outcomes[2], SequenceError)


def test_many_chunks_leave_one_time_out_behind() -> None:
    desk = Desk()
    entry = desk.open(1000)
    for request in range(500):
        desk.send(entry, request)
        desk.answer(request)
    assert num_time_outs(desk.sequences) == 1
    assert (entry.outstanding, entry.waiting, entry.failed) == ({}, {}, {})


def test_a_chunk_whose_deadline_passes_while_it_waits_fails_then_and_takes_those_behind_it_along() -> None:
    desk = Desk()
    entry = desk.open(math.inf)
    desk.send(entry, 1)
    desk.send(entry, 2)
    desk.send(entry, 3, deadline_s=5)
    desk.send(entry, 4)
    assert desk.sequences.next_wakeup_s() == 5
    desk.at(5)
    assert isinstance(desk.outcomes[3], DeadlineError)
    assert isinstance(desk.outcomes[4], SequenceError)
    desk.answer(1)
    desk.answer(2)
    assert desk.begun == [1, 2]
    desk.send(entry, 5)
    desk.send(entry, 6, era=1)
    assert isinstance(desk.outcomes[5], SequenceError)
    assert desk.begun == [1, 2, 6]


def test_late_chunks_wait_on_where_late_requests_are_finished() -> None:
    desk = Desk(give_up_late=False)
    entry = desk.open(math.inf)
    desk.send(entry, 1)
    desk.send(entry, 2, deadline_s=5)
    desk.at(6)
    desk.answer(1)
    assert (desk.begun, desk.outcomes) == ([1, 2], {1: None})


@pytest.mark.parametrize("failing", [1, 2])
def test_who_said_resume_is_not_taken_along(failing: int) -> None:
    desk = Desk()
    entry = desk.open(math.inf)
    desk.send(entry, 1)
    desk.send(entry, 2)
    desk.send(entry, 3)
    desk.send(entry, 4, era=1)
    if failing == 1:
        desk.answer(1, CancelledError("given up"))
    else:
        assert desk.sequences.cancel(RequestId(2))
        desk.answer(1)
    assert isinstance(desk.outcomes[3], SequenceError)
    assert desk.begun == [1, 4]


def test_a_thousand_chunks_behind_one_that_fails_all_fail() -> None:
    desk = Desk()
    entry = desk.open(math.inf)
    for request in range(2000):
        desk.send(entry, request)
    desk.answer(0, CancelledError("given up"))
    assert len(desk.outcomes) == 2000
    assert desk.sequences.num_waiting == 0
