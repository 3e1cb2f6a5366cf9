"""The interface of drivers. Worker turns one driver.

CellDriver does cellular batching. GraphDriver of the lab does graph batching of whole requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Protocol

from batchmaker.compile.run_form import RunForm
from batchmaker.core.events import RequestId
from batchmaker.engine.request import InFlight, Settled, Ticket
from batchmaker.engine.stats import DriverStats, StepsSeen
from batchmaker.graph.spec import TypeId


class Driver(Protocol):
    """Takes tickets and settles each exactly once, by calling `settle` with some of them at a time.

    stats: counts since the start. observer: called with the finished steps that are reported together. The engine's
    thread calls all methods except `start`.
    """

    stats: DriverStats
    observer: Callable[[StepsSeen], None] | None

    def start(self, notify: Callable[[], None], settle: Callable[[Sequence[Settled]], None]) -> None:
        """Start the workers. notify: wakes the loop, from any thread. settle: answers requests."""
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Give a request up if it is in flight; otherwise do nothing."""

    def stop_all(self) -> None:
        """Give up every request in flight with StoppedError."""

    def withdraw(self, most: int) -> list[Ticket]:
        """Give up half of the requests that could begin elsewhere as well, `most` at most: nothing of them has run.
        Settle none."""
        ...

    def tickets(self) -> Sequence[Ticket]:
        """Return the tickets that were taken and are not settled."""

    def poll(self) -> None:
        """Fetch finished work from the workers. If the engine's own thread computes, it computes some steps here."""

    def advance(self, tickets: Sequence[Ticket]) -> None:
        """Handle the polled work and these new requests together, then start more work."""

    def next_wakeup_s(self) -> float | None:
        """Engine time at which `advance` must be called even if nothing finishes; None if there is none."""

    @property
    def own_tasks(self) -> Sized:
        """The tasks that the engine's own thread computes. They wait while it does anything else."""

    @property
    def wants_requests(self) -> bool:
        """Whether the workers may soon run out of ready work, so that new requests should be given at once."""

    @property
    def begin_together(self) -> int | None:
        """How many requests begin together when those in flight are done, and nobody before; None: as they come."""

    @property
    def has_live_streams(self) -> bool:
        """Whether chunks of live streams come, so that other work must not keep a turn long."""

    @property
    def num_in_flight(self) -> int:
        """Number of requests that were taken and are not settled."""

    @property
    def num_sequences(self) -> int:
        """Number of open sequences. Any thread may ask."""

    def finish(self) -> None:
        """Wait until the workers have finished the steps that they still hold, and handle the results.

        Called when no request is in flight: these steps belong to requests that have ended.
        """

    def stop(self) -> None:
        """End the workers once they have finished what they hold."""


class OnDevice(Protocol):
    """Takes requests that a device schedules itself. See `batchmaker.engine.device_driver.DeviceDriver`.

    settle: answers requests.
    """

    settle: Callable[[Sequence[Settled]], None]

    @property
    def num_in_flight(self) -> int:
        """Number of requests that were taken and are not answered."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether requests wait for room."""
        ...

    @property
    def next_wakeup_s(self) -> float | None:
        """Engine time of the next deadline; None if there is none."""
        ...

    def tickets(self) -> list[Ticket]:
        """Return the tickets of requests that were taken and are not answered."""
        ...

    def form_of(self, type_id: TypeId) -> RunForm | None:
        """Return the form of a type in requests that are taken; None if the scheduler has them all."""
        ...

    def why_not(self, type_id: TypeId) -> str:
        """Return why requests with this cell are the scheduler's; "" if they are not."""
        ...

    def materialise(self) -> None:
        """Record all known types and prove them. Nothing has been taken yet."""

    def take(self, requests: Iterable[InFlight]) -> set[RequestId]:
        """Take the requests that a device can compute. Returns which."""
        ...

    def turn(self) -> None:
        """Answer requests that have ended, and let others begin. Called in every turn of the engine."""

    def cancel(self, request_id: RequestId) -> bool:
        """Give a request up. False if it is not here."""
        ...

    def stop_all(self) -> None:
        """Give every request up with StoppedError."""
