"""Frames of HTTP/2 on their way through: nothing is lost, whatever the pieces in which they arrive."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpc_in_process import data, head, head_block

from batchmaker.server.access.connections import Connections
from batchmaker.server.access.request_body import BodyBudget
from batchmaker.server.limits import Limits
from batchmaker.server.rpc import frames
from batchmaker.server.rpc.connection import STREAM, CoreEnd, RpcConnection
from batchmaker.server.rpc.frames import FrameScanner
from insides import idle, look_at

FRAMES = st.builds(
    frames.frame, st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**31 - 1), st.binary(max_size=40)
)


def cut(content: bytes, places: list[int]) -> list[bytes]:
    """The content in pieces."""
    ends = [0, *sorted(place % (len(content) + 1) for place in places), len(content)]
    return [content[begin:end] for begin, end in pairwise(ends)]


@given(sent=st.lists(FRAMES), places=st.lists(st.integers(0, 10_000)))
def test_frames_are_found_in_whatever_pieces_they_come(sent, places):
    reader, come, passed, found = FrameScanner(), b"", b"", []
    partial = b""
    for piece in cut(b"".join(sent), places):
        come += piece
        there, pieces = reader.read(piece)
        passed += there
        assert sum(one.end - one.begin for one in pieces) == len(there)
        for one in pieces:
            assert one.begins == (not partial)
            partial += there[one.begin : one.end]
            assert one.payload_bytes == one.end - one.begin - 9 * one.begins
            if one.ends:
                found.append(partial)
                partial = b""
        assert reader.is_between_frames == (come == b"".join(found))
    assert passed == b"".join(sent)
    assert found == sent


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, content: bytes) -> None:
        self.written += content

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.written += b"CLOSED"

    pause_reading = resume_reading = abort = lambda self: None


class Passed:
    """A connection between two transports."""

    def __init__(self, **limits: Any) -> None:
        self.client, self.core = Transport(), Transport()
        self.bodies = BodyBudget(Limits(**limits))
        self.connections = Connections(9, 9)
        self.connection = RpcConnection("1.2.3.4", self.connections, self.bodies, self._dial)
        self.connections.opened(self.connection, "1.2.3.4")
        self.connection.connection_made(self.client)  # type: ignore[arg-type]

    def _dial(self, end: CoreEnd) -> asyncio.Future[Any]:
        self.end = end
        end.connection_made(self.core)  # type: ignore[arg-type]
        return asyncio.get_running_loop().create_future()

    def named(self, stream: int) -> bytes:
        """The frame that is added to a call's head."""
        name = frames.literal_header(STREAM, f"{self.connection.token}.{stream}")
        return frames.frame(frames.CONTINUATION, frames.END_HEADERS, stream, name)


HALF, REST = head_block("/a/b")[:30], head_block("/a/b")[30:]
CONTINUED = [frames.frame(1, 0, 3, HALF), frames.frame(9, 0, 3, REST[:9]), frames.frame(9, 4, 3, REST[9:])]
SETTINGS = frames.frame(frames.SETTINGS, 0, 0, b"\0\4\0\0\0\1")
SENT = [
    SETTINGS,
    head(1, "/a/b"),
    data(1, b"x" * 50),
    *CONTINUED,
    data(3, b"y" * 20, end=True),
    head(1, "/a/b", end=True),
]
"""Two calls, one with a head in three frames; the first ends with headers, as gRPC never does."""


@given(places=st.lists(st.integers(0, 10_000)))
def test_calls_get_their_name_and_all_else_passes_as_it_is(places):
    async def work():
        there = Passed()
        for piece in cut(frames.PREFACE + b"".join(SENT), places):
            there.connection.data_received(piece)
        head_1 = head(1, "/a/b", flags=0)
        last = frames.frame(9, 0, 3, REST[9:])
        assert there.core.written == frames.PREFACE + b"".join(
            [SETTINGS, head_1, there.named(1), SENT[2], *CONTINUED[:2], last, there.named(3), *SENT[-2:]]
        )
        assert {number: one.held.size for number, one in there.connection.streams.items()} == {1: 50, 3: 20}
        assert there.bodies.held == 70
        answer = [frames.frame(1, 4, 3, b"h"), frames.frame(0, 0, 3, b"answer"), frames.frame(1, 5, 3, b"t")]
        for piece in cut(b"".join(answer), places):
            there.end.data_received(piece)
        assert there.client.written == b"".join(answer)
        assert (there.bodies.held, list(there.connection.streams)) == (50, [1])
        there.connection.connection_lost(None)
        assert (there.bodies.held, there.connections.num_open) == (0, 0)

    asyncio.run(work())


def test_a_connection_is_idle_while_no_call_of_it_has_work():
    async def work():
        there = Passed()
        there.connection.data_received(frames.PREFACE + head(1, "/a/b") + head(3, "/a/b"))
        assert not idle(there.connections)
        there.connection.streams[1].is_busy = False  # it only watches
        there.end.data_received(frames.frame(3, 0, 3, b"\0" * 4))
        assert idle(there.connections) == [there.connection]
        there.connection.streams[1].is_busy = True
        assert not idle(there.connections)
        there.connection.data_received(frames.frame(3, 0, 1, b"\0" * 4))
        assert idle(there.connections) == [there.connection]

    asyncio.run(work())


def test_a_connection_that_makes_room_says_so_between_two_frames():
    async def work():
        there = Passed()
        there.connection.data_received(frames.PREFACE + head(7, "/a/b"))
        there.end.data_received(frames.frame(0, 0, 7, b"half")[:-1])
        there.connection.close_idle()
        assert there.client.written == frames.frame(0, 0, 7, b"half")[:-1] + b"CLOSED"
        there = Passed()
        there.connection.data_received(frames.PREFACE + head(7, "/a/b"))
        there.connection.close_idle()
        assert there.client.written == frames.goaway(7, 0, "closed to make room for others") + b"CLOSED"

    asyncio.run(work())


@pytest.mark.parametrize("in_one_frame", [True, False])
def test_a_head_larger_than_it_may_be_ends_the_connection(in_one_frame):
    async def work():
        there = Passed(max_head_bytes=1_000)
        block = head_block("/a/b", x="y" * 100)
        kinds = (
            [frames.frame(1, 4, 1, block * 9)]
            if in_one_frame
            else [frames.frame(1, 0, 1, block)] + [frames.frame(9, 0, 1, b"")] * 200
        )
        there.connection.data_received(frames.PREFACE)
        there.connection.data_received(b"".join(kinds))
        assert there.client.written == b"CLOSED"
        assert there.core.written == frames.PREFACE

    asyncio.run(work())


def test_an_answer_that_is_taken_slowly_goes_on_and_one_that_is_not_taken_ends_the_connection():
    async def work():
        there, over = Passed(), []
        there.connection.data_received(frames.PREFACE + head(1, "/a/b"))
        stream = there.connection.streams[1]
        stream.answered(1e6, lambda: over.append(1))
        there.end.data_received(data(1, b"half"))
        look_at(stream, 1e6, 0)
        assert not there.client.written.endswith(b"CLOSED")
        look_at(stream, 1e6, 4)
        assert there.client.written.endswith(b"CLOSED")
        assert not over
        there.connection.connection_lost(None)
        assert over == [1]
        stream.answered(1e6, lambda: over.append(2))
        assert over == [1, 2]

    asyncio.run(work())
