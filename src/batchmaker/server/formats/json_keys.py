"""JSON objects that have each key once: of equal keys msgspec would take the last one, and say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import msgspec

from batchmaker.server.faults import invalid

_MOST_SAID: Final = 64
"""Characters of a key in a message."""


@final
class Key:
    """A key of an object. Equal ones cannot be in one dict: so reading ends at the first that comes again."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Key) and other.name == self.name:
            raise invalid(f"the key {self.name[:_MOST_SAID]!r} is sent twice in one object; send it once")
        return False


Check = Callable[[str], object]
"""Raises INVALID for a key that is not taken."""


def keys_once(kind: Any, check: Check | None = None) -> msgspec.json.Decoder[Any]:
    """Return a decoder of objects with values of a kind. INVALID for a key that comes again; see `by_name`."""

    def made(_: type, name: str) -> Key:
        if check is not None:
            check(name)
        return Key(name)

    return msgspec.json.Decoder(dict[Key, kind], dec_hook=made)


def by_name(decoded: dict[Key, Any]) -> dict[str, Any]:
    """Return what such a decoder has found, by the names of the keys."""
    return {key.name: value for key, value in decoded.items()}
