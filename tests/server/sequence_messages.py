"""Messages of connections that carry many sequences, by the documentation: see docs/live-audio.md."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

HEAD = struct.Struct("<IBBHI")
BEGIN, END, RESET, GIVE_UP = 1, 2, 4, 8
VALUES, NOTHING, STATE = 0, 1, 2


def frame(number: int, content: Any = None, flags: int = 0, kind: int | None = None) -> bytes:
    """A frame; an int is a chunk of the model `counter`, None is nothing."""
    content = np.int64(content).tobytes() if isinstance(content, int) else content
    kind = (NOTHING if content is None else VALUES) if kind is None else kind
    return HEAD.pack(number, flags, kind, 0, len(content or b"")) + (content or b"")


Answer = tuple[int, int, int, Any]


def read(message: bytes | str, dtype: str = "<i8") -> list[Answer]:
    """The answers in a message: number, flags, kind, and what they hold; an error is its status."""
    if isinstance(message, str):
        said = json.loads(message)
        return [(said["sequence"], 0, -1, said["status"])]
    found, at = [], 0
    while at < len(message):
        number, flags, kind, zero, size = HEAD.unpack_from(message, at)
        assert zero == 0
        at += HEAD.size + size
        content: Any = message[at - size : at]
        found.append((number, flags, kind, np.frombuffer(content, dtype).tolist() if kind == VALUES else content))
    return found
