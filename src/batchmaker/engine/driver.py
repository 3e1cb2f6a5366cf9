"""What the engine's loop drives: cellular batching of cells, or graph batching of whole requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from batchmaker.engine.request import Settled, Ticket
from batchmaker.engine.stats import DriverStats, StepSeen
from batchmaker.errors import (
    RAISED_BY_USERS,
    BatchmakerError,
    CancelledError,
    CellError,
    DeadlineError,
    InvalidRequestError,
    RefusedError,
    said_by,
)
from batchmaker.scheduler.commands import Fail, FailureKind
from batchmaker.scheduler.events import RequestId

_FAILURES: dict[FailureKind, type[BatchmakerError]] = {
    FailureKind.CANCELLED: CancelledError,
    FailureKind.DEADLINE: DeadlineError,
    FailureKind.REFUSED: RefusedError,
    FailureKind.CELL: CellError,
    FailureKind.UNFOLD: InvalidRequestError,
}


def error_of(command: Fail) -> BatchmakerError:
    """Return what the caller of a failed request gets to see."""
    return _FAILURES[command.kind](f"request {command.request}: {command.reason}")


def blamed(error: BaseException) -> BatchmakerError:
    """Return what a request's own code raised as the request's error, which can be shown."""
    if isinstance(error, BatchmakerError) and _can_be_shown(error):
        return error
    if isinstance(error, Exception):
        blamed = InvalidRequestError(f"what unfold returned or yielded cannot be used ({said_by(error)})")
    else:
        blamed = InvalidRequestError(f"the unfold function raised {said_by(error)}")
    blamed.__cause__ = error
    return blamed


def _can_be_shown(error: BaseException) -> bool:
    try:
        str(error)
    except RAISED_BY_USERS:
        return False
    return True


class Driver(Protocol):
    """Takes tickets and settles each exactly once, by calling `settle` with some of them at a time."""

    stats: DriverStats
    observer: Callable[[StepSeen], None] | None

    def start(self, notify: Callable[[], None], settle: Callable[[Sequence[Settled]], None]) -> None: ...

    def cancel(self, request_id: RequestId) -> None:
        """Give a request up, if it is in flight."""

    def cancel_all(self) -> None:
        """Give up every request in flight."""

    def tickets(self) -> Sequence[Ticket]:
        """Return the tickets taken and not settled."""

    def poll(self) -> None:
        """Fetch finished work from the workers; where the engine's own thread computes, do some."""

    def advance(self, tickets: Sequence[Ticket]) -> None:
        """Take note of what was collected and of new requests together, then start more work."""

    def next_wakeup_s(self) -> float | None:
        """Engine time at which `advance` must be called even if nothing finishes."""

    @property
    def wants_requests(self) -> bool:
        """Whether the workers may soon run out of requests that are ready."""

    @property
    def num_in_flight(self) -> int:
        """Requests taken and not settled."""

    def finish(self) -> None:
        """Let the workers finish what they hold for requests that are gone, and take note of it."""

    def stop(self) -> None:
        """End the workers, after what they hold."""
