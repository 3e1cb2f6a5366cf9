"""A connection that is a sequence, with everything around it in its place: order, bounds and ends."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker.server.access.auth import KeyRing
from batchmaker.server.access.request_body import BodyBudget
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.chunk_form import ChunkForm
from batchmaker.server.formats.messages import InferResponse
from batchmaker.server.formats.signature import Signature, TensorSpec
from batchmaker.server.formats.tensors import Tensor
from batchmaker.server.limits import Limits
from batchmaker.server.observe.statistics import ModelStatistics
from batchmaker.server.service.served_model import StopCause
from batchmaker.server.ws.deadlines import Watch
from batchmaker.server.ws.one_sequence import ChunkSocket
from waiting import pass_time, run_in_virtual_time, until

NUMBER = TensorSpec("n", "INT64", (1,))


class Connection:
    """A client, a model and a sequence. The model answers a chunk with its number, when it is let."""

    def __init__(self, **limits: Any) -> None:
        self.limits = Limits(**limits)
        self.bodies = BodyBudget(self.limits)
        self.connected: set[Any] = set()
        self.num_conversations = 1
        self.is_open = True
        self.stop_cause: Any = None
        self.ended_by_server: bool | None = None
        self.unread: list[bytes] = []
        self.num_read = 0
        self.waiting: dict[int, Any] = {}
        self.begun: list[int] = []
        self.said: list[Any] = []
        self.cancelled: list[int] = []
        self.writable = True
        self.closing: Any = None
        self.reason = ""
        self.watch = Watch()
        self.planned: Any = None
        self.statistics = ModelStatistics()
        self.exchange = SimpleNamespace(send=self.send, hand_over=lambda: None)
        self.sequence = object()
        service = SimpleNamespace(limits=self.limits, disconnect=self.disconnect)
        site = SimpleNamespace(service=service, keys=KeyRing({}), bodies=self.bodies)
        form = ChunkForm(Signature((NUMBER,), (NUMBER,), request="value"), {})
        self.socket = ChunkSocket(site, self, self, form, self, key=None)  # type: ignore[arg-type]
        self.plan(0.0)

    # --- the client and its connection: what SocketProtocol does ---

    def sends(self, *numbers: int) -> None:
        self.unread += [np.int64(number).tobytes() for number in numbers]
        self.go_on()

    def go_on(self) -> None:
        while self.unread and self.closing is None and self.socket.takes:
            self.num_read += 1
            self.socket.received(self.unread.pop(0))

    def leaves(self) -> None:
        self.closing = "gone"
        self.socket.lost("the client has gone", 1006)

    def write(self, frames: bytes) -> None:
        while frames:
            begin = 2 if frames[1] < 126 else 4
            size = frames[1] if begin == 2 else int.from_bytes(frames[2:4], "big")
            said = json.loads(frames[begin : begin + size])
            self.said.append(said.get("n", said.get("status")))
            frames = frames[begin + size :]

    def close(self, code: int = 0, reason: str = "", *, stopped: bool | None = None) -> None:
        if stopped is None:
            self.closing, self.reason = code, reason
        else:  # the sequence
            self.is_open, self.ended_by_server = False, stopped
            self.cancelled += [number for number, chunk in self.waiting.items() if not chunk.done]

    def plan(self, at_s: float) -> None:
        self.planned = self.watch.plan(at_s, self, self.planned)

    def look(self, now_s: float) -> None:
        if self.closing is None and (next_s := self.socket.look(now_s)) is not None:
            self.plan(next_s)

    # --- the model and the sequence ---

    def disconnect(self) -> None:
        self.num_conversations -= 1

    def refused(self, fault: ServiceError) -> ServiceError:
        self.is_open = False
        return fault

    def failed(self, error: BaseException, fault: ServiceError) -> ServiceError:
        self.is_open = False
        return fault

    def count_refusal(self, fault: ServiceError) -> None:
        pass

    def fault_of(self, error: Any) -> Any:
        if not isinstance(error, ServiceError):
            raise error
        return error

    def send(self, sequence: Any, data: Any, deadline_ms: Any, chunk: Any) -> None:
        self.begun.append(data)
        self.waiting[data] = chunk

    def response(self, request: Any, result: Any) -> InferResponse:
        return InferResponse("m", "1", (Tensor("n", "INT64", np.array([result])),), "", frozenset({"n"}))

    def answer(self, number: int) -> None:
        self.settle(number, number, None)

    def fail(self, number: int) -> None:
        self.settle(number, None, ServiceError(FaultKind.INTERNAL, "it failed"))

    def settle(self, number: int, result: Any, error: Any) -> None:
        chunk = self.waiting[number]
        chunk.settle(result, error, accepted=True)
        self.socket.answered([chunk.lane])

    async def closed(self) -> Any:
        await until(lambda: self.closing is not None)
        return self.closing


@settings(deadline=None)
@given(order=st.permutations(range(6)), ahead=st.integers(1, 4))
def test_answers_leave_in_order_and_no_more_chunks_are_read_than_may_be_ahead(order, ahead):
    async def body():
        there = Connection(max_chunks_ahead=ahead)
        there.sends(*range(6))
        ready = list(order)
        while len(there.said) < 6:
            assert there.num_read - len(there.said) <= ahead
            assert there.begun == sorted(there.begun)
            assert there.said == sorted(there.said)
            for number in [number for number in ready if number in there.waiting][:1]:
                ready.remove(number)
                there.answer(number)
        there.leaves()
        assert (there.bodies.held, there.connected, there.num_conversations) == (0, set(), 0)

    asyncio.run(body())


def test_a_client_that_takes_nothing_is_not_read_from():
    async def body():
        there = Connection(max_chunks_ahead=2)
        there.writable = False
        there.sends(*range(9))
        for number in (0, 1):
            there.answer(number)
        assert (there.num_read, there.said) == (2, [])
        there.writable = True
        there.socket.writable()
        assert (there.num_read, there.said) == (4, [0, 1])
        there.leaves()

    asyncio.run(body())


def test_what_is_computed_is_not_idle():
    """The model takes several times as long as a sequence may be idle."""

    async def body():
        there = Connection(sequence_idle_seconds=0.02)
        there.sends(1)
        asyncio.get_running_loop().call_later(0.1, lambda: there.answer(1))
        assert await there.closed() == 1008
        assert there.said == [1]

    run_in_virtual_time(body())


def test_a_chunk_that_fails_is_the_last_that_is_answered():
    async def body():
        there = Connection()
        there.sends(1, 2, 3)
        there.fail(2)
        there.answer(3)
        assert there.said == []  # the first has no answer yet
        there.answer(1)
        assert (there.said, there.closing) == ([1, 500], 1011)

    asyncio.run(body())


def test_a_chunk_that_is_refused_is_the_last_and_those_before_it_are_answered():
    async def body():
        there = Connection()
        there.sends(1, 2)
        there.unread.append(b"123")
        there.sends(3)
        assert (there.begun, there.num_read) == ([1, 2], 3)
        there.answer(1)
        there.answer(2)
        assert (there.said, there.begun, there.closing) == ([1, 2, 400], [1, 2], 1011)
        assert there.bodies.held == 0

    asyncio.run(body())


@pytest.mark.parametrize("own", [0, 1])
def test_a_chunk_for_which_there_is_no_memory_waits_and_is_computed_then(own):
    """Memory comes back with the connection's own answers, or from others."""

    async def body():
        there = Connection(max_total_body_bytes=12)
        there.bodies.held = 0 if own else 9
        there.sends(*range(1 + own))
        assert (there.begun, there.num_read) == ([0][:own], 1 + own)
        if own:
            there.answer(0)
        there.bodies.held -= 0 if own else 9
        await until(lambda: there.begun == [0, 1][: 1 + own])
        there.answer(own)
        assert there.said == [0, 1][: 1 + own]
        there.leaves()
        assert there.bodies.held == 0

    run_in_virtual_time(body())


def test_a_chunk_for_which_there_never_is_memory_is_refused_and_the_last():
    async def body():
        there = Connection(max_total_body_bytes=12, write_seconds=0.1)
        there.bodies.held = 9
        there.sends(1, 2)
        assert await there.closed() == 1011
        assert (there.said, there.begun, there.bodies.held) == ([503], [], 9)

    run_in_virtual_time(body())


def test_a_chunk_that_waits_for_memory_is_not_lost_when_the_sequence_is_looked_at():
    """The time without a chunk is looked at while a chunk waits: it is the same chunk that goes on."""

    async def body():
        there = Connection(max_total_body_bytes=12, sequence_idle_seconds=0.02, max_chunks_ahead=4)
        there.sends(1)
        there.sends(2)
        await pass_time(0.1)  # more than the sequence may be idle, with the first not answered
        assert there.begun == [1]
        there.answer(1)
        await until(lambda: there.begun == [1, 2])
        there.answer(2)
        assert await there.closed() == 1008
        assert there.said == [1, 2]

    run_in_virtual_time(body())


@pytest.mark.parametrize("num_open", [0, 1, 2])
def test_told_to_stop_it_answers_what_was_read(num_open):
    async def body():
        there = Connection(max_chunks_ahead=2)
        there.sends(*range(num_open))
        there.stop_cause = StopCause.UNLOADED
        for stop in tuple(there.connected):
            stop()
        there.sends(7)
        for number in range(num_open):
            there.answer(number)
        assert (there.closing, there.reason) == (1001, "the model is being unloaded")
        assert there.ended_by_server
        assert (there.said, there.num_read) == (list(range(num_open)), num_open)

    asyncio.run(body())


def test_a_client_that_leaves_gives_up_what_is_computed():
    async def body():
        there = Connection()
        there.sends(1, 2)
        there.leaves()
        assert there.cancelled == [1, 2]
        assert there.ended_by_server is False
        assert there.bodies.held == 0
        there.answer(1)  # it was too late to give it up
        assert there.said == []

    asyncio.run(body())


def test_a_defect_is_logged_and_closes_the_connection(caplog):
    async def body():
        there = Connection()
        there.sends(1)
        there.settle(1, None, KeyError("a defect"))
        assert there.closing == 1011

    asyncio.run(body())
    assert "a defect" in caplog.text
