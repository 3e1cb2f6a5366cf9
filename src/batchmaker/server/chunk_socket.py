"""One WebSocket connection, one sequence: its messages are chunks, each with one message as its answer, in order."""

from __future__ import annotations

import logging
from asyncio import get_running_loop
from collections.abc import Sequence as Sized
from typing import Final, NamedTuple, final

from batchmaker.server.auth import KnownKey
from batchmaker.server.chunk_form import ChunkForm
from batchmaker.server.chunk_lane import Lane
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.message_reader import framed
from batchmaker.server.parts import Site
from batchmaker.server.request_body import HeldBytes
from batchmaker.server.sequences import ConnectedSequence
from batchmaker.server.served_model import ServedModel
from batchmaker.server.socket_protocol import SocketProtocol

_LOG = logging.getLogger("batchmaker.server")


class Closing(NamedTuple):
    """The code of RFC 6455 for closing a connection, and the reason in at most 123 bytes."""

    code: int
    reason: str


STOPPING: Final = Closing(1001, "the server or the model is being stopped")
_IDLE: Final = Closing(1008, "no chunk came for as long as a sequence may be idle")
_FAILED: Final = Closing(1011, "the sequence has ended: a chunk has no answer, or nothing came for too long")
DEFECT: Final = Closing(1011, "the server failed")
LOOK_S: Final = 0.05
"""Seconds between two looks whether there is room for a chunk, where only others can make it."""


class _Taken(NamedTuple):
    """A chunk that the client has sent and for which there is no room yet. at_s: since when."""

    chunk: bytes | str
    at_s: float


@final
class ChunkSocket:
    """Takes chunks, has them computed and answers them: the Conversation of a connection that is one sequence.

    A chunk is never refused for want of room. No further chunk is taken while `max_chunks_ahead` of them have no answer
    that was handed to the connection, while the server holds as many bytes as it may, or while the rate of the key is
    used up; this slows down the client's sending. Answers are not handed over while the client leaves too much unread,
    which SocketProtocol limits. So a client that reads nothing is not read from either, and is then disconnected.
    """

    __slots__ = (
        "_held", "_is_first", "_key", "_lane", "_over", "_quiet_since_s", "_retry_s", "_served", "_site", "_socket",
        "_stopping", "_taken",
    )  # fmt: skip

    def __init__(
        self,
        site: Site,
        served: ServedModel,
        sequence: ConnectedSequence,
        form: ChunkForm,
        socket: SocketProtocol,
        *,
        key: str | None,
        client: str = "",
    ) -> None:
        """key: for counting each chunk. client: whose the bytes are."""
        self._site = site
        self._served = served
        self._socket = socket
        self._held = HeldBytes(site.bodies, client)
        self._lane = Lane(served, sequence, form, self._held, self)
        self._key = KnownKey(site.keys, key)
        self._is_first = True  # its key was counted when the connection was made
        self._taken: _Taken | None = None
        self._retry_s = 0.0  # when to try again
        self._stopping = False
        self._over = False
        self._quiet_since_s = get_running_loop().time()
        served.connected.add(self.stop)

    # --- chunks --------------------------------------------------------------------------------------------------

    @property
    def takes(self) -> bool:
        """Whether a chunk is taken now. See Conversation."""
        lane = self._lane
        return (
            self._taken is None
            and not self._stopping
            and lane.num_waiting < self._site.service.limits.max_chunks_ahead
            and lane.sequence.is_open
        )

    def received(self, message: bytes | str) -> None:
        """Take a chunk, and hand it to the engine if there is room."""
        self._take(_Taken(message, 0.0))

    def _take(self, taken: _Taken) -> None:
        """Hand a chunk to the engine; keep it if it must wait; refuse it if it has waited too long, or for ever."""
        size = len(taken.chunk)
        bodies, held = self._site.bodies, self._held
        try:
            if not bodies.fits(held.client, size):
                if self._may_wait(taken, LOOK_S):
                    return
                bodies.check(held.client, size)
            if not self._is_first:
                try:
                    self._key.count()
                except ServiceError as fault:
                    if fault.kind is FaultKind.TOO_MANY and self._may_wait(taken, fault.retry_after_s or 0.0):
                        return
                    raise
        except ServiceError as fault:
            self._taken = None
            self._lane.refuse(0, fault)
        else:
            self._taken = None
            self._is_first = False
            held.resize(held.size + size)
            self._lane.take(taken.chunk)
        if self._lane.is_done:
            self._answer()

    @property
    def _waits(self) -> bool:
        return self._taken is not None

    def _may_wait(self, taken: _Taken, wait_s: float) -> bool:
        """Keep a chunk to try it again, unless it has waited, or would wait, for too long. Returns whether it waits."""
        now_s = get_running_loop().time()
        if self._taken is None:
            taken = taken._replace(at_s=now_s)
        if now_s + wait_s > taken.at_s + self._site.service.limits.write_seconds:
            return False
        self._taken = taken
        self._retry_s = now_s + wait_s
        self._socket.plan(self._retry_s)
        return True

    # --- answers -------------------------------------------------------------------------------------------------

    def answered(self, lanes: Sized[Lane]) -> None:
        """Answer the chunks that have their results. See LaneOwner."""
        try:
            self._answer()
        except Exception:
            _LOG.exception("a WebSocket failed")
            self._close(DEFECT)

    def writable(self) -> None:
        """Go on with the answers that have waited for the client. See Conversation."""
        self.answered(())

    def _answer(self) -> None:
        if self._over or not self._socket.writable:
            return
        frames: list[bytes] = []
        ended = False
        for said, ended in self._lane.answers():
            frames.append(framed(said))
            if ended:
                break
        if not frames:
            return
        self._socket.write(frames[0] if len(frames) == 1 else b"".join(frames))
        if ended:
            self._close(STOPPING if self._stopping else _FAILED)
            return
        self._quiet_since_s = get_running_loop().time()
        if self._taken is not None:  # there may be room now
            self._take(self._taken)
        self._end_if_stopped()
        if not self._over:
            self._socket.go_on()

    # --- ends ----------------------------------------------------------------------------------------------------

    def look(self, now_s: float) -> float | None:
        """Close after too long without a chunk; try again what had no room. See Conversation."""
        if self._taken is not None:
            if self._retry_s <= now_s:
                self._take(self._taken)
                self._socket.go_on()
            return self._retry_s if self._waits else now_s + self._idle_s
        due_s = (now_s if self._lane.num_waiting else self._quiet_since_s) + self._idle_s
        if due_s <= now_s:
            self._close(_IDLE)
            return None
        return due_s

    @property
    def _idle_s(self) -> float:
        return self._site.service.limits.sequence_idle_seconds

    def stop(self) -> None:
        """Take no more; answer the chunks already taken, and end."""
        self._stopping = True
        self._end_if_stopped()

    def _end_if_stopped(self) -> None:
        if self._stopping and not self._over and not self._lane.num_waiting and self._taken is None:
            self._close(STOPPING)

    def lost(self, why: str, code: int) -> None:
        """Give up what is computed: nobody is there for it. See Conversation."""
        self._finish()

    def _close(self, closing: Closing) -> None:
        if not self._over:
            self._finish()
            self._socket.close(closing.code, closing.reason)

    def _finish(self) -> None:
        self._over = True
        self._taken = None
        self._served.connected.discard(self.stop)
        self._lane.close()
        self._held.release()
        self._site.service.disconnect()
