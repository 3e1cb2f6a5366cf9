"""The errors of requests that fail: of what the scheduler commands, and of what users' code and data raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from batchmaker.core.commands import Fail, FailureKind
from batchmaker.core.events import RequestId
from batchmaker.engine.request import Ticket
from batchmaker.errors import (
    RAISED_BY_USERS,
    BatchmakerError,
    CancelledError,
    CellError,
    DeadlineError,
    InvalidRequestError,
    MemoryLimitError,
    NodeLimitError,
    RefusedError,
    StoppedError,
    lacks_memory,
    said_by,
)

_FAILURES: dict[FailureKind, type[BatchmakerError]] = {
    FailureKind.CANCELLED: CancelledError,
    FailureKind.DEADLINE: DeadlineError,
    FailureKind.REFUSED: RefusedError,
    FailureKind.CELL: CellError,
    FailureKind.UNFOLD: InvalidRequestError,
    FailureKind.NODES: NodeLimitError,
    FailureKind.MEMORY: MemoryLimitError,
}

RETURNED: Final = "what unfold returned or yielded"

Item = TypeVar("Item")


def error_of(command: Fail, ticket: Ticket) -> BatchmakerError:
    """Return the error that the caller of a failed request gets. ticket: of the request."""
    said = f"request {command.request}: {command.reason}"
    if command.kind is FailureKind.DEADLINE:
        said = f"{said}, {ticket.due_after_s:.3f} s after it arrived"
    return _FAILURES[command.kind](said)


def stopped(request_id: RequestId) -> StoppedError:
    """Return the error of a request that had begun when the engine was stopped."""
    return StoppedError(f"request {request_id}: the engine was stopped before it was done")


def blamed(error: BaseException, what: str = RETURNED) -> BatchmakerError:
    """Turn an exception of a request's own code or data into the error of that request. what: cannot be used then.

    An error of batchmaker stays as it is if its message can be shown. Everything else becomes the cause of an
    InvalidRequestError; of a MemoryLimitError if there is too little memory.
    """
    blamed: BatchmakerError
    if isinstance(error, BatchmakerError) and _can_be_shown(error):
        return error
    if lacks_memory(error):
        blamed = MemoryLimitError(f"its values do not fit into memory ({said_by(error)})")
    elif isinstance(error, Exception):
        blamed = InvalidRequestError(f"{what} cannot be used ({said_by(error)})")
    else:
        blamed = InvalidRequestError(f"the unfold function raised {said_by(error)}")
    blamed.__cause__ = error
    return blamed


def at_fault(
    call: Callable[[Sequence[Item]], object], items: Sequence[Item], what: str = RETURNED
) -> list[tuple[Item, BatchmakerError]]:
    """Call a function with requests together; if it raises, with each alone, so that only those at fault fail.

    what: see `blamed`. Returns the requests with which it raises alone, and their errors.
    """
    try:
        if items:
            call(items)
    except RAISED_BY_USERS as error:
        if len(items) == 1:
            return [(items[0], blamed(error, what))]
        return [fault for item in items for fault in at_fault(call, [item], what)]
    return []


def _can_be_shown(error: BaseException) -> bool:
    """Whether `str` of an error works: a class of the user may raise there."""
    try:
        str(error)
    except RAISED_BY_USERS:
        return False
    return True
