"""One WebSocket connection, one sequence: its messages are chunks, each with one message as its answer, in order."""

from __future__ import annotations

import logging
from asyncio import get_running_loop
from collections.abc import Sequence as Sized
from typing import Final, NamedTuple, final

import msgspec

from batchmaker.server.access.sender import NOBODY, Sender
from batchmaker.server.faults import ServiceError, invalid
from batchmaker.server.formats.chunk_form import ChunkForm, ControlMessage
from batchmaker.server.service.sequences import ConnectedSequence
from batchmaker.server.service.served_model import ServedModel, StopCause
from batchmaker.server.service.site import Site
from batchmaker.server.ws.chunk_room import ChunkRoom
from batchmaker.server.ws.lane import AnswerKind, Lane, LaneAnswer
from batchmaker.server.ws.message_reader import framed
from batchmaker.server.ws.protocol import SocketProtocol

_LOG = logging.getLogger("batchmaker.server")


class Closing(NamedTuple):
    """The code of RFC 6455 for closing a connection, and the reason in at most 123 bytes."""

    code: int
    reason: str


AFTER_ENGINE_S: Final = 0.05
"""The engine ends idle sequences itself, and says why; connections look so much later."""

GOING_AWAY: Final = 1001
"""The code for a server that stops, or a model that is unloaded (RFC 6455, section 7.4.1)."""

DEFECT: Final = Closing(1011, "the server failed")
_FINISHED: Final = Closing(1000, "the sequence was finished")
_IDLE: Final = Closing(1008, "no chunk came for as long as a sequence may be idle")
_FAILED: Final = Closing(1011, "the sequence has ended: a chunk has no answer, or nothing came for too long")


@final
class ChunkSocket:
    """Takes chunks, has them computed and answers them: the Conversation of a connection that is one sequence.

    A chunk is never refused for want of room. No further chunk is taken while `max_chunks_ahead` of them have no answer
    that was handed to the connection, while the server holds as many bytes as it may, or while the rate of the key is
    used up; this slows down the client's sending. Answers are not handed over while the client leaves too much unread,
    which SocketProtocol limits. So a client that reads nothing is not read from either, and is then disconnected.
    """

    __slots__ = (
        "_form", "_has_ended", "_is_new", "_lane", "_quiet_since_s", "_room", "_sender", "_served", "_site",
        "_socket", "_stopping", "_waiting_message",
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
        sender: Sender = NOBODY,
    ) -> None:
        """key: for counting each chunk. sender: whose sequence it is, and whose the bytes are."""
        self._site = site
        self._served = served
        self._form = form
        self._socket = socket
        self._sender = sender
        self._room = ChunkRoom(site, key, sender.client)
        self._lane = Lane(served, sequence, form, self._room.held, self)
        self._is_new = True  # nothing has come yet
        self._waiting_message: bytes | str | None = None  # what has come, and for which there is no room yet
        self._stopping = False
        self._has_ended = False
        self._quiet_since_s = get_running_loop().time()
        served.connected.add(self.stop)

    # --- chunks --------------------------------------------------------------------------------------------------

    @property
    def takes(self) -> bool:
        """Whether a chunk is taken now. See Conversation."""
        lane = self._lane
        return (
            self._waiting_message is None
            and not self._stopping
            and lane.num_waiting < self._site.service.limits.max_chunks_ahead
            and lane.sequence.is_open
        )

    def received(self, message: bytes | str) -> None:
        """Take a chunk, and hand it to the engine if there is room."""
        size = len(message)
        try:
            if not self._room.enter(size):
                self._waiting_message = message
                self._socket.plan(self._room.retry_s)
                return
        except ServiceError as fault:
            self._waiting_message = None
            self._lane.refuse(0, fault)
        else:
            self._waiting_message = None
            if not isinstance(message, str) or not self._is_control(message):
                self._lane.take(message)
            self._is_new = False
        if self._lane.is_done:
            self._answer()

    def _is_control(self, message: str) -> bool:
        """Do what a text message asks for in place of a chunk. False for a chunk."""
        lane, held = self._lane, self._room.held
        try:
            control = self._form.read_control(message)
            if control is None:
                return False
            held.resize(held.size - len(message))
            self._do(control)
        except ServiceError as fault:
            lane.refuse(0, fault)
        return True

    def _do(self, control: ControlMessage) -> None:
        controls = [name for name, value in msgspec.structs.asdict(control).items() if value is not None]
        if len(controls) != 1:
            raise invalid("a message asks for one of end, reset, state and open")
        if control.open is not None:
            if not self._is_new:
                raise invalid("'open' must be the first message: the sequence has begun")
            self._lane.sequence.close()
            self._lane.sequence = self._served.connect(self._sender, self._form.priority, state=control.open.state)
            self._lane.confirm("open")
        elif control.end:
            self._lane.finish()
        elif control.reset:
            self._lane.reset()
        else:
            self._lane.ask_state()

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
        if self._has_ended or not self._socket.writable:
            return
        frames: list[bytes] = []
        last: LaneAnswer | None = None
        for answer in self._lane.answers():
            frames.append(framed(_said(answer)))
            last = answer
        if last is None:
            return
        self._socket.write(frames[0] if len(frames) == 1 else b"".join(frames))
        if last.is_last:
            if last.kind is not AnswerKind.FAULT:
                self._close(_FINISHED)
            else:
                self._close(stopping(self._served) if self._stopping else _FAILED)
            return
        self._quiet_since_s = get_running_loop().time()
        if self._waiting_message is not None:  # there may be room now
            self.received(self._waiting_message)
        self._end_if_stopped()
        if not self._has_ended:
            self._socket.go_on()

    # --- ends ----------------------------------------------------------------------------------------------------

    def look(self, now_s: float) -> float | None:
        """Close after too long without a chunk; try again what had no room. See Conversation."""
        idle_s = self._site.service.limits.sequence_idle_seconds + AFTER_ENGINE_S
        if self._waiting_message is not None:
            if self._room.retry_s <= now_s:
                self.received(self._waiting_message)
                self._socket.go_on()
            return min(self._room.retry_s, now_s + idle_s) if self._waits else now_s + idle_s
        due_s = (now_s if self._lane.num_waiting else self._quiet_since_s) + idle_s
        if due_s <= now_s:
            self._close(_IDLE)
            return None
        return due_s

    @property
    def _waits(self) -> bool:
        return self._waiting_message is not None

    def stop(self) -> None:
        """Take no more; answer the chunks already taken, and end."""
        self._stopping = True
        self._end_if_stopped()

    def _end_if_stopped(self) -> None:
        if self._stopping and not self._has_ended and not self._lane.num_waiting and self._waiting_message is None:
            self._close(stopping(self._served))

    def lost(self, why: str, code: int) -> None:
        """Give up what is computed: nobody is there for it. See Conversation."""
        self._finish()

    def _close(self, closing: Closing) -> None:
        if not self._has_ended:
            self._finish()
            self._socket.close(closing.code, closing.reason)

    def _finish(self) -> None:
        self._has_ended = True
        self._waiting_message = None
        self._served.connected.discard(self.stop)
        self._lane.close(stopped=self._stopping)
        self._room.held.release()
        self._site.service.disconnect()


def stopping(served: ServedModel) -> Closing:
    """Return how a connection is closed that reads no further because the server, or this model, stops."""
    return Closing(GOING_AWAY, served.stop_cause or StopCause.SERVER)


def _said(answer: LaneAnswer) -> bytes | str:
    """Return the message that is an answer."""
    if answer.kind is AnswerKind.STATE:
        return msgspec.json.encode({"state": answer.data}).decode()
    if answer.kind is AnswerKind.NOTHING:
        return msgspec.json.encode({answer.about: True}).decode()
    return answer.data
