"""The reasons why a call has no result, independent of the protocol. HTTP and gRPC have a code for each."""

from __future__ import annotations

import math
from enum import Enum
from typing import Final, final

from batchmaker.errors import (
    BatchmakerError,
    CancelledError,
    CellError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    MemoryLimitError,
    NodeLimitError,
    RefusedError,
    SavedModelError,
    SequenceError,
    SequenceLimitError,
    SequenceStateError,
    StoppedError,
)
from batchmaker.graph.misuse import without_line


class FaultKind(Enum):
    """The kind of error, which tells who can correct it. The value is the reason in the metrics."""

    INVALID = "BAD_REQUEST"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    FORBIDDEN = "FORBIDDEN"
    NOT_FOUND = "NOT_FOUND"
    CONFLICT = "CONFLICT"
    TOO_LARGE = "TOO_LARGE"
    TOO_SLOW = "TOO_SLOW"
    ENCODING = "ENCODING"
    TOO_MANY = "RATE_LIMIT"
    UNAVAILABLE = "REJECTED"
    DEADLINE = "DEADLINE"
    CANCELLED = "CANCELED"
    UNSUPPORTED = "UNSUPPORTED"
    INTERNAL = "BACKEND"


STATUS: Final[dict[FaultKind, int]] = {
    FaultKind.INVALID: 400,
    FaultKind.UNAUTHENTICATED: 401,
    FaultKind.FORBIDDEN: 403,
    FaultKind.NOT_FOUND: 404,
    FaultKind.TOO_SLOW: 408,
    FaultKind.CONFLICT: 409,
    FaultKind.TOO_LARGE: 413,
    FaultKind.ENCODING: 415,
    FaultKind.TOO_MANY: 429,
    FaultKind.CANCELLED: 499,
    FaultKind.INTERNAL: 500,
    FaultKind.UNSUPPORTED: 501,
    FaultKind.UNAVAILABLE: 503,
    FaultKind.DEADLINE: 504,
}
"""The status of HTTP for each kind."""


@final
class ServiceError(BatchmakerError):
    """A call was refused or has failed. The message is for the client: how to correct it, without internals.

    retry_after_s: when trying again may help; None if it never does.
    """

    def __init__(self, kind: FaultKind, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s

    @property
    def retry_after(self) -> int:
        """When to try again, in whole seconds for HTTP; at least 1."""
        return max(1, math.ceil(self.retry_after_s or 0.0))


def invalid(message: str) -> ServiceError:
    """Return the fault for an invalid call."""
    return ServiceError(FaultKind.INVALID, message)


def fault_of(error: BaseException) -> ServiceError:
    """Return the fault that a client sees for any error. Messages that quote the model's own code are left out."""
    match error:
        case ServiceError():
            return error
        case InvalidRequestError() if error.__cause__ is not None:
            return invalid(
                "the model cannot use this request. Check names, shapes and values against the model's metadata "
                "(GET /v2/models/NAME)."
            )
        case InvalidRequestError() | NodeLimitError() | SequenceStateError():
            return invalid(without_line(str(error)))
        case MemoryLimitError():
            return invalid("the values of this request do not fit into the server's memory; send less at a time")
        case SequenceLimitError():
            return ServiceError(
                FaultKind.UNAVAILABLE,
                "as many sequences are open as may be; end one with sequence_end, or try again later",
                retry_after_s=1.0,
            )
        case SequenceError():
            return invalid(
                "the sequence has ended, or a request of it that was sent before this one has no answer; begin anew "
                "with sequence_start"
            )
        case RefusedError():
            return ServiceError(
                FaultKind.UNAVAILABLE, "the deadline cannot be met with what is waiting now", retry_after_s=1.0
            )
        case DeadlineError():
            return ServiceError(FaultKind.DEADLINE, "the deadline passed before the request was done")
        case CancelledError():
            return ServiceError(FaultKind.CANCELLED, "the request was given up")
        case CellError():
            return ServiceError(FaultKind.INTERNAL, "the model failed while it computed this request")
        case EngineError():
            return ServiceError(
                FaultKind.INTERNAL, "the model's engine failed and has begun anew; the server's log says more"
            )
        case StoppedError():
            return ServiceError(FaultKind.UNAVAILABLE, "the model is being stopped", retry_after_s=1.0)
        case SavedModelError():
            return ServiceError(FaultKind.INTERNAL, "the model cannot be loaded; the server's log says why")
    return ServiceError(FaultKind.INTERNAL, "the server failed; its log says more under this request's id")
