"""Ids of calls, shared by the log and the client."""

from __future__ import annotations

import itertools
import re
import secrets
from typing import Final, final

HEADER: Final = "x-request-id"
"""The header of the client's id and of the answer's."""

_SENT: Final = re.compile(r"[!-~]{1,128}")


@final
class RequestIds:
    """Gives every call an id."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def of(self, sent: str | None) -> str:
        """Return the client's id if it is safe to write anywhere, or a new one."""
        if sent is not None and _SENT.fullmatch(sent):
            return sent
        return f"{self._prefix}-{next(self._numbers)}"
