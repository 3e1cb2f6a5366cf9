"""Messages in the frames of a WebSocket (RFC 6455), as a server reads and writes them."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, final

from websockets.frames import apply_mask  # type: ignore[attr-defined] # in C where websockets has it so

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
_WHOLE_TEXT, _WHOLE_BINARY = 0x80 | TEXT, 0x80 | BINARY
_MOST_CONTROL: Final = 125
_LENGTH_16, _LENGTH_64 = 126, 127
_SHORT_HEAD, _MEDIUM_HEAD, _LONG_HEAD = 6, 8, 14
"""Bytes of a frame's head, its mask included, by how its length is written."""

PROTOCOL_ERROR, NOT_TEXT, TOO_BIG = 1002, 1007, 1009
"""Codes for closing a connection (RFC 6455, section 7.4.1)."""


class WrongFrameError(Exception):
    """The client's bytes are no frames of a WebSocket. code, reason: for closing the connection."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class ControlFrame(NamedTuple):
    """A frame that is no message; also a part of a message (CONTINUATION) that is not whole yet."""

    opcode: int
    data: bytes


_PART: Final = ControlFrame(CONTINUATION, b"")


@final
class MessageReader:
    """Takes the bytes of a client, however they are cut, and gives what they hold, in order.

    most_bytes: of a message. num_partial: bytes of a frame or message that is not whole. Fragments are joined as they
    come, however small.
    """

    __slots__ = ("_at", "_data", "_is_text", "_joined", "_late", "_most_bytes", "_wanted")

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._data = b""
        self._at = 0  # what is before it in `_data` was read
        self._late: bytearray | None = None  # the beginning of a frame
        self._wanted = 0  # bytes of that frame, as far as they are known
        self._joined: bytearray | None = None  # the fragments of a message
        self._is_text = False

    @property
    def num_partial(self) -> int:
        return len(self._late or b"") + len(self._joined or b"")

    @property
    def num_unread(self) -> int:
        """Bytes that were fed and that `next` has not looked at."""
        return len(self._data) - self._at

    def feed(self, data: bytes) -> None:
        """Add bytes that have come."""
        late = self._late
        if late is not None:
            late += data
            if len(late) < self._wanted:
                return
            data = bytes(late)
            self._late = None
        elif self._at < len(self._data):
            data = self._data[self._at :] + data
        self._data = data
        self._at = 0

    def next(self) -> bytes | str | ControlFrame | None:
        """Return the next message, control frame or part of a message; None if no more has come whole.

        Raises WrongFrameError; nothing can be read after it.
        """
        data, at = self._data, self._at
        available = len(data) - at
        if available < 2:
            return self._waits(2) if available else None
        first, size = data[at], data[at + 1] - 0x80
        if size < 0:
            raise WrongFrameError(PROTOCOL_ERROR, "a frame of a client must be masked")
        if available < _SHORT_HEAD:
            return self._waits(_SHORT_HEAD)
        begin = at + _SHORT_HEAD
        if size >= _LENGTH_16:
            begin = at + (_MEDIUM_HEAD if size == _LENGTH_16 else _LONG_HEAD)
            if available < begin - at:
                return self._waits(begin - at)
            size = int.from_bytes(data[at + 2 : begin - 4], "big")
        plain = self._joined is None and first in (_WHOLE_BINARY, _WHOLE_TEXT)
        if not plain:
            self._check(first, size)
        is_control = first & 0x08
        if not is_control and size > self._most_bytes - (0 if self._joined is None else len(self._joined)):
            raise WrongFrameError(TOO_BIG, f"a message has more than {self._most_bytes} bytes")
        end = begin + size
        if end > len(data):
            return self._waits(end - at)
        self._at = end
        if end == len(data):
            self._data, self._at = b"", 0
        content = apply_mask(data[begin:end], data[begin - 4 : begin])
        if not plain:
            return self._odd(first, content)
        return content if first == _WHOLE_BINARY else _text(content)

    def _waits(self, wanted: int) -> ControlFrame | None:
        """Keep the beginning of a frame until so many bytes of it have come; return that nothing is whole."""
        self._late = bytearray(memoryview(self._data)[self._at :])
        self._wanted = wanted
        self._data, self._at = b"", 0
        return None

    def _check(self, first: int, size: int) -> None:
        """Raise WrongFrameError if a frame may not come now. first: its first byte."""
        opcode, is_last = first & 0x0F, first & 0x80
        if first & 0x70:
            raise WrongFrameError(PROTOCOL_ERROR, "a reserved bit is set, and no extension was agreed on")
        if opcode in (CLOSE, PING, PONG):
            if not is_last or size > _MOST_CONTROL:
                raise WrongFrameError(PROTOCOL_ERROR, "a control frame is in fragments, or longer than 125 bytes")
        elif opcode == CONTINUATION:
            if self._joined is None:
                raise WrongFrameError(PROTOCOL_ERROR, "a fragment continues no message")
        elif opcode not in (TEXT, BINARY):
            raise WrongFrameError(PROTOCOL_ERROR, f"a frame has the unknown opcode {opcode}")
        elif self._joined is not None:
            raise WrongFrameError(PROTOCOL_ERROR, "a message begins within the fragments of another")

    def _odd(self, first: int, content: bytes) -> bytes | str | ControlFrame:
        """Return what a frame is that is no whole message."""
        opcode = first & 0x0F
        if opcode in (CLOSE, PING, PONG):
            return ControlFrame(opcode, content)
        if self._joined is None:
            self._joined, self._is_text = bytearray(), opcode == TEXT
        self._joined += content
        if not first & 0x80:
            return _PART
        whole, self._joined = bytes(self._joined), None
        return _text(whole) if self._is_text else whole


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise WrongFrameError(NOT_TEXT, "a text message is not UTF-8") from None


def framed(data: bytes | str) -> bytes:
    """Return a message as a server sends it: text for a str."""
    if isinstance(data, str):
        return frame_of(TEXT, data.encode())
    return frame_of(BINARY, data)


def frame_of(opcode: int, data: bytes) -> bytes:
    """Return one whole frame of a server."""
    size = len(data)
    if size < _LENGTH_16:
        return bytes((0x80 | opcode, size)) + data
    if size < 1 << 16:
        return struct.pack("!BBH", 0x80 | opcode, _LENGTH_16, size) + data
    return struct.pack("!BBQ", 0x80 | opcode, _LENGTH_64, size) + data
