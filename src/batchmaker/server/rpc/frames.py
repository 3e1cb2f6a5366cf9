"""Frames of HTTP/2 (RFC 9113, section 4) as they go by: what begins and ends where, without reading what is inside."""

from __future__ import annotations

from typing import Final, NamedTuple, final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client sends first."""

DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, CONTINUATION = 0, 1, 3, 4, 7, 9
END_STREAM, END_HEADERS = 0x1, 0x4
NO_ERROR, ENHANCE_YOUR_CALM = 0, 11

_HEAD_BYTES: Final = 9
_STREAM_BITS: Final = 0x7FFFFFFF


class Piece(NamedTuple):
    """A frame, or a part of it. begin, end: in the data that was read. begins, ends: whether the frame does, here."""

    kind: int
    flags: int
    stream: int
    begin: int
    end: int
    begins: bool
    ends: bool

    @property
    def payload_bytes(self) -> int:
        """Bytes of it that are no head of a frame."""
        return self.end - self.begin - (_HEAD_BYTES if self.begins else 0)


@final
class FrameScanner:
    """Follows one direction of a connection. The head of a frame is kept until it is whole."""

    def __init__(self) -> None:
        self._rest = b""
        self._missing = 0  # bytes of the present frame that have not arrived
        self._kind = self._flags = self._stream = 0

    @property
    def is_between_frames(self) -> bool:
        """Whether another frame may be put in here."""
        return not self._missing and not self._rest

    def read(self, data: bytes) -> tuple[bytes, list[Piece]]:
        """Return the data to pass on, and the pieces of frames that make it up."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        pieces: list[Piece] = []
        at, size = 0, len(data)
        while at < size:
            begin, begins = at, not self._missing
            if begins:
                if size - at < _HEAD_BYTES:
                    self._rest, data = data[at:], data[:at]
                    break
                self._missing = int.from_bytes(data[at : at + 3], "big")
                self._kind, self._flags = data[at + 3], data[at + 4]
                self._stream = int.from_bytes(data[at + 5 : at + 9], "big") & _STREAM_BITS
                at += _HEAD_BYTES
            there = min(self._missing, size - at)
            self._missing -= there
            at += there
            pieces.append(Piece(self._kind, self._flags, self._stream, begin, at, begins, not self._missing))
        return data, pieces


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return b"%s%c%c%s%s" % (len(payload).to_bytes(3, "big"), kind, flags, stream.to_bytes(4, "big"), payload)


def goaway(last_stream: int, error: int, reason: str) -> bytes:
    """Return a frame that ends a connection: streams after `last_stream` were not looked at."""
    head = last_stream.to_bytes(4, "big") + error.to_bytes(4, "big")
    return frame(GOAWAY, 0, 0, head + reason.encode("ascii", "replace"))


def literal_header(name: str, value: str) -> bytes:
    """Return a header as HPACK writes it without a table (RFC 7541, section 6.2.2). Both have less than 127 bytes."""
    return b"\0%c%s%c%s" % (len(name), name.encode("ascii"), len(value), value.encode("ascii"))
