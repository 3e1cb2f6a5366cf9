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

from batchmaker.server.auth import KeyRing
from batchmaker.server.chunk_form import ChunkForm
from batchmaker.server.chunk_socket import ChunkSocket
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.limits import Limits
from batchmaker.server.messages import InferResponse
from batchmaker.server.request_body import BodyBudget
from batchmaker.server.served_model import Begun
from batchmaker.server.signature import Signature, TensorSpec
from batchmaker.server.tensors import Tensor

NUMBER = TensorSpec("n", "INT64", (1,))
GONE = {"type": "websocket.disconnect", "code": 1005}


class Connection:
    """A client, a model and a sequence. The model answers a chunk with its number, when it is let."""

    def __init__(self, **limits: Any) -> None:
        self.limits = Limits(**limits)
        self.bodies = BodyBudget(self.limits)
        self.connected: set[Any] = set()
        self.is_open = True
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.num_read = 0
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self.begun: list[int] = []
        self.said: list[Any] = []
        self.taken = asyncio.Event()
        self.taken.set()
        site = SimpleNamespace(service=SimpleNamespace(limits=self.limits), keys=KeyRing({}), bodies=self.bodies)
        form = ChunkForm(Signature((NUMBER,), (NUMBER,), request="value"), {})
        self.socket = ChunkSocket(site, self, self, form, key=None)  # type: ignore[arg-type]

    def start(self) -> asyncio.Task[Any]:
        return asyncio.create_task(self.socket.run(self.receive, self.send))

    def sends(self, *numbers: int) -> None:
        for number in numbers:
            self.incoming.put_nowait({"type": "websocket.receive", "bytes": np.int64(number).tobytes()})

    async def receive(self) -> dict[str, Any]:
        message = await self.incoming.get()
        self.num_read += message["type"] == "websocket.receive"
        return message

    async def send(self, message: dict[str, Any]) -> None:
        await self.taken.wait()
        said = json.loads(message["text"])
        self.said.append(said.get("n", said.get("status")))

    def refused(self, fault: ServiceError) -> ServiceError:
        self.is_open = False
        return fault

    def begin(self, request: Any, connected: Any) -> Begun:
        number = int(request.inputs[0].data[0])
        self.begun.append(number)
        self.waiting[number] = asyncio.get_running_loop().create_future()
        return Begun(request, self.waiting[number], None, 0.0, 0.0)  # type: ignore[arg-type]

    async def finish(self, begun: Begun) -> InferResponse:
        await begun.answer
        number = int(begun.request.inputs[0].data[0])
        return InferResponse("m", "1", (Tensor("n", "INT64", np.array([number])),), "", frozenset({"n"}))

    def answer(self, number: int) -> None:
        self.waiting[number].set_result(None)

    def fail(self, number: int) -> None:
        self.is_open = False
        self.waiting[number].set_exception(ServiceError(FaultKind.INTERNAL, "it failed"))


async def settled() -> None:
    """Let everything happen that can happen now."""
    for _ in range(50):
        await asyncio.sleep(0)


@settings(deadline=None)
@given(order=st.permutations(range(6)), ahead=st.integers(1, 4))
def test_answers_leave_in_order_and_no_more_chunks_are_read_than_may_be_ahead(order, ahead):
    async def body():
        there = Connection(max_chunks_ahead=ahead)
        running = there.start()
        there.sends(*range(6))
        ready = list(order)
        while len(there.said) < 6:
            await settled()
            assert there.num_read - len(there.said) <= ahead
            assert there.begun == sorted(there.begun)
            assert there.said == sorted(there.said)
            for number in [number for number in ready if number in there.waiting][:1]:
                ready.remove(number)
                there.answer(number)
        there.incoming.put_nowait(GONE)
        assert await running is None
        assert (there.bodies.held, there.connected) == (0, set())

    asyncio.run(body())


def test_a_client_that_takes_nothing_is_not_read_from():
    async def body():
        there = Connection(max_chunks_ahead=2)
        there.taken.clear()
        running = there.start()
        there.sends(*range(9))
        await settled()
        for number in (0, 1):
            there.answer(number)
        await settled()
        assert (there.num_read, there.said) == (2, [])
        there.taken.set()
        await settled()
        assert (there.num_read, there.said) == (4, [0, 1])
        there.incoming = asyncio.Queue()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(body())


def test_a_client_that_takes_nothing_for_too_long_is_left():
    async def body():
        there = Connection(write_seconds=0.01)
        there.taken.clear()
        running = there.start()
        there.sends(1)
        await settled()
        there.answer(1)
        assert await running is None

    asyncio.run(body())


def test_what_is_computed_is_not_idle():
    """The model takes several times as long as a sequence may be idle."""

    async def body():
        there = Connection(sequence_idle_seconds=0.01)
        running = there.start()
        there.sends(1)
        asyncio.get_running_loop().call_later(0.05, lambda: there.answer(1))
        closing = await running
        assert (there.said, closing.code) == ([1], 1008)

    asyncio.run(body())


def test_a_chunk_that_fails_is_the_last_that_is_answered():
    async def body():
        there = Connection()
        running = there.start()
        there.sends(1, 2, 3)
        await settled()
        there.fail(2)
        there.answer(3)
        await settled()
        assert there.said == []  # the first has no answer yet
        there.answer(1)
        assert (await running).code == 1011
        assert there.said == [1, 500]

    asyncio.run(body())


def test_a_chunk_that_is_refused_is_the_last_and_those_before_it_are_answered():
    async def body():
        there = Connection()
        running = there.start()
        there.sends(1, 2)
        there.incoming.put_nowait({"type": "websocket.receive", "bytes": b"123"})
        there.sends(3)
        await settled()
        assert (there.begun, there.num_read) == ([1, 2], 3)
        there.answer(1)
        there.answer(2)
        assert (await running).code == 1011
        assert (there.said, there.begun) == ([1, 2, 400], [1, 2])
        assert there.bodies.held == 0

    asyncio.run(body())


@pytest.mark.parametrize("own", [0, 1])
def test_a_chunk_for_which_there_is_no_memory_waits_and_is_computed_then(own):
    """Memory comes back with the connection's own answers, or from others."""

    async def body():
        there = Connection(max_total_body_bytes=12)
        running = there.start()
        there.bodies.held = 0 if own else 9
        there.sends(*range(1 + own))
        await settled()
        assert (there.begun, there.num_read) == ([0][:own], 1 + own)
        if own:
            there.answer(0)
        there.bodies.held -= 0 if own else 9
        while there.begun != [0, 1][: 1 + own]:
            await asyncio.sleep(0.001)
        there.answer(own)
        await settled()
        assert there.said == [0, 1][: 1 + own]
        there.incoming.put_nowait(GONE)
        assert await running is None
        assert there.bodies.held == 0

    asyncio.run(body())


def test_a_chunk_for_which_there_never_is_memory_is_refused_and_the_last():
    async def body():
        there = Connection(max_total_body_bytes=12, write_seconds=0.01)
        running = there.start()
        there.bodies.held = 9
        there.sends(1, 2)
        assert (await running).code == 1011
        assert (there.said, there.begun, there.bodies.held) == ([503], [], 9)

    asyncio.run(body())


def test_a_chunk_that_waits_for_memory_is_not_lost_when_the_sequence_is_looked_at():
    """The time without a chunk is looked at while a chunk waits: it is the same chunk that goes on."""

    async def body():
        there = Connection(max_total_body_bytes=12, sequence_idle_seconds=0.02, max_chunks_ahead=4)
        running = there.start()
        there.sends(1)
        await settled()
        there.sends(2)
        await asyncio.sleep(0.05)  # more than the sequence may be idle, with the first not answered
        assert there.begun == [1]
        there.answer(1)
        while there.begun != [1, 2]:
            await asyncio.sleep(0.001)
        there.answer(2)
        assert (await running).code == 1008
        assert there.said == [1, 2]

    asyncio.run(body())


@pytest.mark.parametrize("num_open", [0, 1, 2])
def test_told_to_stop_it_answers_what_was_read(num_open):
    async def body():
        there = Connection(max_chunks_ahead=2)
        running = there.start()
        there.sends(*range(num_open))
        await settled()
        for stop in there.connected:
            stop()
        await settled()
        there.sends(7)
        await settled()
        for number in range(num_open):
            there.answer(number)
        assert (await running).code == 1001
        assert (there.said, there.num_read) == (list(range(num_open)), num_open)

    asyncio.run(body())


def test_a_client_that_leaves_gives_up_what_is_computed():
    async def body():
        there = Connection()
        running = there.start()
        there.sends(1, 2)
        await settled()
        there.incoming.put_nowait(GONE)
        assert await running is None
        assert all(future.cancelled() for future in there.waiting.values())
        assert there.bodies.held == 0

    asyncio.run(body())


def test_a_defect_is_not_hidden():
    async def body():
        there = Connection()
        running = there.start()
        there.sends(1)
        await settled()
        there.waiting[1].set_exception(KeyError("a defect"))
        with pytest.raises(KeyError):
            await running

    asyncio.run(body())
