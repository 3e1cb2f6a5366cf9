"""WebSocket connections: frames, flow control, and limits on a client's partial, unread and stored messages."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, final

from websockets.exceptions import ProtocolError
from websockets.frames import Close

from batchmaker.server.access.request_body import BodyBudget, HeldBytes
from batchmaker.server.ws.deadlines import Watch, WatchEntry
from batchmaker.server.ws.message_reader import (
    CLOSE,
    NOT_TEXT,
    PING,
    PONG,
    PROTOCOL_ERROR,
    ControlFrame,
    MessageReader,
    WrongFrameError,
    frame_of,
)

_LOG = logging.getLogger("batchmaker.server")

SOCKET: Final = "batchmaker.socket"
"""Extension of ASGI, in a WebSocket's scope: its SocketProtocol, for a conversation that needs no task."""

_PIECE: Final = 16_384
"""So many bytes of a message that is not whole are held whatever others hold."""

_AHEAD: Final = 1 << 20
"""Bytes of messages that one connection stores before they are taken."""

_OBJECT: Final = 512
"""Bytes that a stored message takes in memory beside its own."""

_TOGETHER: Final = 64
"""Messages of one connection that are handled before others have their turn."""

_LAST_WORD_S: Final = 10.0
"""Seconds for a client to answer that the connection is closed."""

_MOST_REASON: Final = 123
"""Bytes of the reason in a close frame (RFC 6455, section 5.5)."""

_ABNORMAL: Final = 1006
"""How a connection has ended that was not closed (RFC 6455, section 7.4.1)."""

_CONNECTING, _OPEN, _CLOSING, _ENDED = range(4)


class Conversation(Protocol):
    """What takes the messages of a connection."""

    @property
    def takes(self) -> bool:
        """Whether it takes a message now. If not, it calls SocketProtocol.go_on when it does again."""
        ...

    def received(self, message: bytes | str) -> None:
        """Take a message."""
        ...

    def writable(self) -> None:
        """The client has read what was written; see SocketProtocol.writable."""
        ...

    def lost(self, why: str, code: int) -> None:
        """Nothing more comes or goes: the connection has ended, and not by SocketProtocol.close. Called once.

        code: the client's, or 1006.
        """
        ...

    def look(self, now_s: float) -> float | None:
        """Do what is due. Returns when to look again, None for not at all."""
        ...


@final
class SocketSite:
    """What the connections of one server share. most_bytes: of a message. state: uvicorn's."""

    __slots__ = ("bodies", "most_bytes", "state", "watch")

    def __init__(self, bodies: BodyBudget, watch: Watch, state: Any) -> None:
        self.bodies = bodies
        self.watch = watch
        self.state = state
        self.most_bytes = bodies.limits.max_body_bytes


@final
class SocketProtocol(asyncio.Protocol):
    """One connection, from the end of its handshake. It hands messages to a conversation when that takes them.

    Messages are read ahead, so pings among them are answered though the messages wait. Reading ahead stops with
    `_AHEAD` bytes stored, or with any if half of the budget is used or its client holds as much as it may. Receiving
    stops only if more data then comes, since each stop and start is a call of the system. A message has `body_seconds`
    to arrive in, unless it has to wait. A client has `write_seconds` to read what was written. Pings of a client that
    does not read are not answered. What a client that has gone left unread is dropped.

    There is no task and no timer of its own, and a message costs a few calls.
    """

    __slots__ = (
        "_conversation", "_held", "_loop", "_on_lost", "_partial_since_s", "_planned", "_reader", "_site", "_state",
        "_stopped", "_stored", "_stored_bytes", "_transport", "_turn_waits", "_unread_since_s", "_until_s", "_works",
        "client",
    )  # fmt: skip

    def __init__(
        self,
        site: SocketSite,
        transport: asyncio.Transport,
        client: str,
        conversation: Conversation,
        on_lost: Callable[[SocketProtocol], None],
    ) -> None:
        """client: its address. conversation: what takes messages until `hand_over`. on_lost: called at the end."""
        self._site = site
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._conversation = conversation
        self._on_lost = on_lost
        self.client = client
        self._reader = MessageReader(site.most_bytes)
        self._held = HeldBytes(site.bodies, client)
        self._state = _CONNECTING
        self._stored: deque[bytes | str] | None = None
        self._stored_bytes = 0
        self._stopped = False  # receiving
        self._works = False
        self._turn_waits = False  # more has come than is handled in one turn
        self._planned: WatchEntry | None = None
        self._partial_since_s: float | None = None
        self._unread_since_s: float | None = None
        self._until_s: float | None = None  # for the client to answer that the connection is closed
        site.state.connections.add(self)

    # --- for the conversation ----------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._state == _OPEN

    @property
    def is_gone(self) -> bool:
        """Whether nothing that is written arrives any more."""
        return self._state == _ENDED or self._transport.is_closing()

    @property
    def writable(self) -> bool:
        """Whether to write: not while the client leaves much unread."""
        return self._unread_since_s is None

    def answer_handshake(self, answer: bytes, *, opened: bool) -> None:
        """Send the answer. opened: the connection is open then; otherwise it is refused, and ends."""
        self._transport.write(answer)
        if opened:
            self._state = _OPEN
            self.go_on()
        else:
            self._state = _ENDED
            self._transport.close()

    def is_taken_by(self, conversation: Conversation) -> bool:
        """Whether this takes the messages."""
        return self._conversation is conversation

    def hand_over(self, conversation: Conversation) -> None:
        """Have this take all messages from now on."""
        self._conversation = conversation
        if self._state == _ENDED:
            self._end("the client has gone")
            return
        self.plan(self._loop.time())
        self.go_on()

    def write(self, frames: bytes) -> None:
        """Send frames."""
        if self._state == _OPEN:
            self._transport.write(frames)

    def go_on(self) -> None:
        """Hand over what waits, if it is taken now."""
        if self._works or self._turn_waits or self._state not in (_OPEN, _CLOSING):
            return
        if self._stored or self._reader.num_unread or self._stopped:
            self._work()

    def plan(self, at_s: float) -> None:
        """Have the conversation's `look` be called no later than this."""
        self._planned = self._site.watch.plan(at_s, self, self._planned)

    def close(self, code: int, reason: str) -> None:
        """Tell the client the end, and wait a little for its answer. The conversation is over and is not called."""
        if self._state == _OPEN:
            self._conversation = _NOBODY
            self._transport.write(_closing(code, reason))
            self._state = _CLOSING
            self._drop_stored()
            self._until_s = self._loop.time() + _LAST_WORD_S
            self.plan(self._until_s)
            self.go_on()

    def abort(self) -> None:
        """End the connection without a word."""
        self._end("the connection was cut off")
        self._transport.abort()

    # --- for the transport -------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Read bytes; messages are handled in the turn of this connection. Reading pauses while it is full."""
        if self._state == _ENDED:
            return
        if not self._stopped and (self._turn_waits or self._is_full):
            self._stopped = True
            self._transport.pause_reading()
        self._reader.feed(data)
        if not self._turn_waits and self._state != _CONNECTING:
            self._work()
        else:
            self._note_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the client has gone")
        self._transport.abort()  # nothing is read or written there any more
        if self._planned is not None:
            self._planned.watched = None
        self._site.state.connections.discard(self)
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._unread_since_s = self._loop.time()
        self.plan(self._unread_since_s + self._site.bodies.limits.write_seconds)

    def resume_writing(self) -> None:
        self._unread_since_s = None
        self._conversation.writable()

    def close_idle(self) -> None:
        """End the connection; see Connections. It is always counted as busy, so this is not called."""
        self.abort()

    def shutdown(self) -> None:
        """End, for uvicorn: the server does."""
        if self._state == _CONNECTING:
            self._transport.write(b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        elif self._state == _OPEN:
            self._transport.write(_closing(1012, ""))
        self._end("the server has ended")
        self._transport.close()

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        """Whether nothing more may be read ahead."""
        if self._state == _CONNECTING:
            return True
        if not self._stored:
            return False
        bodies = self._site.bodies
        return self._stored_bytes >= _AHEAD or bodies.is_scarce or not bodies.fits(self.client, 0)

    def _work(self) -> None:
        """Handle what has come, up to some messages."""
        self._works = True
        try:
            if not self._handled_all():
                self._turn_waits = True
                self._loop.call_soon(self._next_turn)
        except WrongFrameError as error:
            self._fail(error.code, error.reason)
        except Exception:
            _LOG.exception("a WebSocket failed")
            self._fail(1011, "the server failed")
        finally:
            self._works = False
        self._note_unread()
        if self._stopped and not self._turn_waits and not self._is_full and not self._transport.is_closing():
            self._stopped = False
            self._transport.resume_reading()

    def _next_turn(self) -> None:
        self._turn_waits = False
        if self._state in (_OPEN, _CLOSING):
            self._work()

    def _handled_all(self) -> bool:
        """Handle `_TOGETHER` messages. Returns whether nothing is left that could be handled now."""
        reader = self._reader
        for _ in range(_TOGETHER):
            conversation = self._conversation
            if self._stored:
                if conversation.takes:
                    conversation.received(self._unstored())
                    continue
                if self._is_full:
                    return True
            if self._state not in (_OPEN, _CLOSING):
                return True
            message = reader.next()
            if message is None:
                return True
            if isinstance(message, ControlFrame):
                self._control(message)
                continue
            self._partial_since_s = None
            if not self._stored and conversation.takes:
                conversation.received(message)
            elif self._state == _OPEN:
                self._store(message)
        return not (reader.num_unread or (self._stored and self._conversation.takes))

    def _control(self, frame: ControlFrame) -> None:
        if frame.opcode == PING:
            if self.writable and self._state == _OPEN:
                self._transport.write(frame_of(PONG, frame.data))
        elif frame.opcode == CLOSE:
            try:
                said = Close.parse(frame.data)
            except ProtocolError:
                raise WrongFrameError(PROTOCOL_ERROR, "a close frame has a wrong code") from None
            except UnicodeDecodeError:
                raise WrongFrameError(NOT_TEXT, "the reason of a close frame is not UTF-8") from None
            if self._state == _OPEN:
                self._transport.write(frame_of(CLOSE, frame.data))
            self._end(f"the client has closed it: {said.reason or said.code}", said.code)
            self._transport.close()

    def _store(self, message: bytes | str) -> None:
        if self._stored is None:
            self._stored = deque()
        self._stored.append(message)
        self._stored_bytes += _OBJECT + len(message)

    def _unstored(self) -> bytes | str:
        assert self._stored is not None
        message = self._stored.popleft()
        self._stored_bytes -= _OBJECT + len(message)
        if not self._stored:
            self._stored = None
        return message

    def _drop_stored(self) -> None:
        self._stored, self._stored_bytes = None, 0

    def _note_unread(self) -> None:
        """Count the bytes of unread and incomplete messages, and limit the time for the rest of one."""
        if self._state == _ENDED:
            return
        partial = self._reader.num_partial
        size = partial + self._reader.num_unread + self._stored_bytes
        if size != self._held.size:
            self._held.resize(size)
        if not partial:
            self._partial_since_s = None
            return
        if self._partial_since_s is None:
            self._partial_since_s = self._loop.time()
            self.plan(self._partial_since_s + self._site.bodies.limits.body_seconds)
        if partial > _PIECE and not self._site.bodies.fits(self.client, 0):
            self._fail(1013, "the server holds as many bytes as it may; try again")

    # --- limits and ends ---------------------------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """Do what is due, and plan the next look. See Watch."""
        limits = self._site.bodies.limits
        due_s: list[float] = []
        if self._unread_since_s is not None:
            due_s.append(self._unread_since_s + limits.write_seconds)
            if due_s[-1] <= now_s:
                self.abort()
                return
        if self._until_s is not None:
            due_s.append(self._until_s)
            if self._until_s <= now_s:
                self._end("the client did not close")
                self._transport.abort()
                return
        if self._partial_since_s is not None:
            if self._is_full or self._turn_waits:
                self._partial_since_s = now_s
            due_s.append(self._partial_since_s + limits.body_seconds)
            if due_s[-1] <= now_s:
                self._fail(1008, "the message came too slowly")
                return
        if self._state == _OPEN:
            try:
                next_s = self._conversation.look(now_s)
            except Exception:
                _LOG.exception("a WebSocket failed")
                self._fail(1011, "the server failed")
                return
            if next_s is not None:
                due_s.append(next_s)
        if due_s and self._state != _ENDED:
            self.plan(min(due_s))

    def _fail(self, code: int, reason: str) -> None:
        """Close the connection because of a client's fault, or of the server's: nothing more can be read."""
        if self._state == _OPEN and not self._transport.is_closing():
            self._transport.write(_closing(code, reason))
        self._end(reason)
        self._transport.close()

    def _end(self, why: str, code: int = _ABNORMAL) -> None:
        if self._state == _ENDED and self._conversation is _NOBODY:
            return
        self._state = _ENDED
        self._drop_stored()
        self._held.release()
        self._partial_since_s = self._until_s = None
        self._reader = MessageReader(0)
        conversation, self._conversation = self._conversation, _NOBODY
        conversation.lost(why, code)


def _closing(code: int, reason: str) -> bytes:
    """Return the frame that closes a connection. reason: cut to what one may have."""
    return frame_of(CLOSE, Close(code, reason.encode()[:_MOST_REASON].decode(errors="ignore")).serialize())


@final
class _Nobody:
    """Takes the messages of a connection that is being closed: nobody does."""

    takes = True

    def received(self, message: bytes | str) -> None:
        pass

    def writable(self) -> None:
        pass

    def lost(self, why: str, code: int) -> None:
        pass

    def look(self, now_s: float) -> float | None:
        return None


_NOBODY: Final = _Nobody()
