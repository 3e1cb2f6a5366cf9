"""The frames of many sequences in one binary message of a WebSocket; see docs/live-audio.md.

Each frame is a head of 12 bytes and its content, one after the other. All numbers are little-endian.

    uint32  the number of the sequence, chosen by the client
    uint8   flags: BEGIN, END, RESET, GIVE_UP
    uint8   what the content is: 0 values, 1 nothing, 2 a state
    uint16  0
    uint32  bytes of the content
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

HEAD: Final = struct.Struct("<IBBHI")
BEGIN, END, RESET, GIVE_UP = 1, 2, 4, 8
VALUES, NOTHING, STATE = 0, 1, 2


class SequenceFrame(NamedTuple):
    """One frame. begin: at this place of its message the next one begins."""

    number: int
    flags: int
    kind: int
    content: memoryview | str
    next_at: int


def read_frame(message: memoryview, at: int) -> SequenceFrame:
    """Return the frame that begins at `at`. ValueError, for the client, if there is none."""
    if len(message) - at < HEAD.size:
        raise ValueError(f"{len(message) - at} bytes are left for a frame's head of {HEAD.size}")
    number, flags, kind, zero, size = HEAD.unpack_from(message, at)
    begin = at + HEAD.size
    if size > len(message) - begin:
        raise ValueError(f"a frame has {size} bytes by its head, and {len(message) - begin} are left")
    if flags > BEGIN | END | RESET | GIVE_UP or kind > STATE or zero or (kind == NOTHING and size):
        raise ValueError("a frame's head has unknown flags, or another kind of content than 0, 1 and 2")
    return SequenceFrame(number, flags, kind, message[begin : begin + size], begin + size)


def written_frame(number: int, flags: int, kind: int, content: bytes) -> bytes:
    """Return one frame."""
    return HEAD.pack(number, flags, kind, 0, len(content)) + content
