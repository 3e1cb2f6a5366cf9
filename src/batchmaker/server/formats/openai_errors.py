"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from batchmaker.server.faults import STATUS, FaultKind

OPENAI: Final = "/v1/"
"""How the paths of OpenAI's API begin."""

_ERROR_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def openai_error(status: int | FaultKind, message: str) -> bytes:
    """Return an error as OpenAI's API has it."""
    return msgspec.json.encode({"error": openai_error_body(status, message)})


def openai_error_body(status: int | FaultKind, message: str) -> dict[str, Any]:
    """Return what is said of an error in OpenAI's API."""
    status = STATUS[status] if isinstance(status, FaultKind) else status
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": None, "code": None}
