"""Refuses calls by their heads alone: an overloaded server must not spend time on refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import msgspec

from batchmaker.server.auth import KeyRing
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.gate import key_in, sent_id_in
from batchmaker.server.request_ids import HEADER, RequestIds
from batchmaker.server.service import Service

_PREFIX: Final = b"/v2/models/"
_CALLS: Final = frozenset({"infer", "generate", "generate_stream"})


@final
class Refusals:
    """Finds calls that would be refused for lack of room, before their bodies are read.

    The answer is the one that the call would get later. All other errors of a call are found later.
    """

    def __init__(self, service: Service, keys: KeyRing) -> None:
        self._repository = service.repository
        self._answered = service.answered
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
            served = self._repository.get(model, rest[1] if len(rest) == 3 else None)
        except ServiceError:
            return None
        try:
            served.check_room()
            return None
        except ServiceError as fault:
            refusal = fault
        try:
            self._keys.caller(key_in(headers))
        except ServiceError:
            return None
        served.statistics.refused[FaultKind.UNAVAILABLE] += 1
        self._answered["http", "503"] += 1
        body = msgspec.json.encode({"error": str(refusal)})
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"retry-after: {refusal.retry_after:d}\r\n{HEADER}: {self._ids.of(sent_id_in(headers))}\r\n\r\n"
        )
        return head.encode("latin-1") + body
