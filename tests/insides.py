"""What lies inside engines and models, for tests that look there: each private name once, in one place."""

from __future__ import annotations

from typing import Any

import batchmaker as bm
from batchmaker.engine.request import Ticket
from batchmaker.engine.worker import Worker


def workers(engine: bm.Engine) -> tuple[Worker, ...]:
    return tuple(engine._workers.members)


def scheduler(engine: bm.Engine) -> Any:
    """The scheduler of the first worker."""
    return scheduler_of(engine.driver)


def schedulers(engine: bm.Engine) -> list[Any]:
    return [scheduler_of(driver) for driver in engine.drivers]


def scheduler_of(driver: Any) -> Any:
    return driver._scheduler


def unanswered(engine: bm.Engine) -> list[Ticket]:
    """The accepted requests whose callers have no answer."""
    return [ticket for worker in workers(engine) for ticket in worker._unanswered.unsettled()]


def num_unanswered(engine: bm.Engine) -> int:
    """Requests that the workers hold, also those whose callers another thread has answered."""
    return sum(len(worker._unanswered) for worker in workers(engine))


def tickets_of(engine: bm.Engine, requests: list[Any]) -> list[Ticket]:
    """Requests as the workers take them, not submitted."""
    return engine._tickets.many(engine._catalogue.find(None), requests, None, 0)


def cancel(engine: bm.Engine, request: int) -> None:
    """Cancel a request by its number, as its answer does."""
    engine._workers.cancel(request)  # type: ignore[arg-type]


def watchdog(worker: Worker) -> Any:
    return worker._watchdog


def room(engine: bm.Engine) -> Any:
    """The places of an engine with `max_queue`."""
    found = engine._submitter._room
    assert found is not None
    return found


def num_free(engine: bm.Engine) -> int:
    """Places that are free."""
    return room(engine)._num_free


def num_waiting_for_room(engine: bm.Engine) -> int:
    """Threads that wait for a place."""
    return len(room(engine)._freed._waiters)


def network_of(model: Any) -> Any:
    """The module of torch whose layers a network of the zoo, or a model that was made of a module, computes."""
    return model._network if hasattr(model, "_network") else model._module
