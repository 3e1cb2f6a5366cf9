"""Refuses calls by their heads alone: an overloaded server must not spend time on refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol, final

import msgspec

from batchmaker.server.access.auth import KeyRing
from batchmaker.server.faults import ServiceError
from batchmaker.server.http.middleware import key_in, sent_id_in
from batchmaker.server.observe.request_ids import HEADER, RequestIds

_PREFIX: Final = b"/v2/models/"
_CALLS: Final = frozenset({"infer", "generate", "generate_stream"})


class CallRoom(Protocol):
    """What may lack room for the calls of a model."""

    def check_room(self) -> None:
        """Raise UNAVAILABLE, with when to try again, if no more requests are taken now."""

    def count_refusal(self, fault: ServiceError) -> None:
        """A call got this error before it was a request."""


@final
class Refusals:
    """Finds calls that would be refused for lack of room, before their bodies are read.

    The answer is the one that the call would get later. All other errors of a call are found later. room_of: returns
    where calls for a model and version go, or raises ServiceError. answered: counts answers by protocol and status.
    """

    def __init__(
        self, room_of: Callable[[str, str | None], CallRoom], answered: Counter[tuple[str, str]], keys: KeyRing
    ) -> None:
        self._room_of = room_of
        self._answered = answered
        self._keys = keys
        self._ids = RequestIds()

    def answer(self, method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
        """Return the answer after the status line 503 and without connection headers; None to go on with the call.

        target: path and query, as sent.
        """
        if method != b"POST" or not target.startswith(_PREFIX):
            return None
        model, *rest = target[len(_PREFIX) :].decode("latin-1").split("/")
        if not rest or rest[-1] not in _CALLS or (len(rest) > 1 and (len(rest) != 3 or rest[0] != "versions")):
            return None
        try:
            room = self._room_of(model, rest[1] if len(rest) == 3 else None)
        except ServiceError:
            return None
        try:
            room.check_room()
            return None
        except ServiceError as fault:
            refusal = fault
        try:
            self._keys.caller(key_in(headers))
        except ServiceError:
            return None
        room.count_refusal(refusal)
        self._answered["http", "503"] += 1
        body = msgspec.json.encode({"error": str(refusal)})
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"retry-after: {refusal.retry_after:d}\r\n{HEADER}: {self._ids.of(sent_id_in(headers))}\r\n\r\n"
        )
        return head.encode("latin-1") + body
