"""What lies inside schedulers, engines, models, kernels and servers, for tests that must look there: private names, in
one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from torch import Tensor

import batchmaker as bm
from batchmaker.clock import Clock
from batchmaker.compile.binding import BoundCell
from batchmaker.compile.forms import PlainModule
from batchmaker.compile.node_loop import NodeLoop
from batchmaker.compile.state_loop import StateLoop
from batchmaker.core import batching
from batchmaker.core.events import RequestArrived, StepsFinished
from batchmaker.core.scheduler import Scheduler
from batchmaker.core.state import SchedulerState
from batchmaker.core.urgency import Urgency
from batchmaker.device.core import DeviceCore
from batchmaker.device.layout import PageWord
from batchmaker.engine import setup
from batchmaker.engine.answer import Answer
from batchmaker.engine.decided_tasks import DecidedTasks
from batchmaker.engine.heartbeat import Watchdog
from batchmaker.engine.request import Ticket
from batchmaker.engine.worker import Worker
from batchmaker.engine.workers import Workers
from batchmaker.executor.memories import MemoryReader
from batchmaker.graph.recorder import Recorder
from batchmaker.kernels.cpu import choice
from batchmaker.lab.baselines.scheduler import GraphScheduler
from batchmaker.model.unfolding import Unfolding
from batchmaker.policies.auto import AutoPolicy
from batchmaker.policies.run_lengths import RunLengths

num_beside = batching._num_beside
loop_times = choice._Times
say_where_nothing_is_kept = setup._say_where_nothing_is_kept


def workers(engine: bm.Engine) -> tuple[Worker, ...]:
    return tuple(engine._workers.members)


def adapting_workers(engine: bm.Engine) -> Workers:
    """The workers of an engine, as with `workers="auto"` on many processors."""
    engine._workers._adapts = True
    return engine._workers


def lone_table_bytes(engine: bm.Engine) -> int:
    """The bytes of the tables in which requests that come alone run."""
    return int(engine.driver._lone._executor.table_bytes)


def plain_form(cell: BoundCell) -> PlainModule:
    return cell._forms._plain


@contextmanager
def loops_everywhere() -> Iterator[None]:
    """Single nodes run in compiled loops within this wherever their cells have one, faster or not, from the first."""

    def loop_for(cell: BoundCell, batch: int) -> NodeLoop | None:
        if cell._node_loop is None:
            cell._node_loop = cell._nodes_in_loop()
        cell._node_loop.faster = np.ones(1, np.bool_)  # whatever has been measured
        return cell._node_loop.loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundCell, "node_loop_for", loop_for)
        yield


@contextmanager
def decided_together() -> Iterator[list[int]]:
    """Notes how many tasks followed each other in each call, of engines in this process."""
    runs, run = list[int](), DecidedTasks.run

    def noted(tasks: DecidedTasks, now_s: float) -> StepsFinished | None:
        finished = run(tasks, now_s)
        if finished is not None and finished.went_on is not None:
            runs.append(len(finished.went_on.ran))
        return finished

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecidedTasks, "run", noted)
        yield runs


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


def submit_ticket(engine: bm.Engine, ticket: Ticket) -> Answer:
    """Submit a request that has been made before."""
    return engine._submitter.submit(ticket, stream=False)


def deal(engine: bm.Engine, tickets: list[Ticket]) -> None:
    """Let the workers have these requests, each its share."""
    engine._workers.send(tickets)


def policies_of(engine: bm.Engine) -> list[Any]:
    """The policy of each worker."""
    return [drivers.policy for drivers in engine._drivers]


def locks_of(engine: bm.Engine) -> list[Any]:
    """The locks that a thread which sends something may hold: of a worker, the room and the sequences."""
    limit: Any = engine._limit
    return [workers(engine)[0]._lock, room(engine)._freed, limit._lock]


def num_waiting_for(answer: Answer) -> int:
    """Threads and event loops that wait for an answer."""
    return len(answer._waiting)


def watchdog(worker: Worker) -> Any:
    return worker._watchdog


def is_woken(watched: Watchdog) -> bool:
    """Whether the watchdog looks at once, however long it would have slept."""
    return watched._woken.is_set()


def use_clock(worker: Worker, clock: Clock) -> None:
    """Let the times of a worker's turns be those of another clock."""
    worker._clock = clock


def turn(worker: Worker) -> None:
    """One turn of a worker that has no thread."""
    worker._turn()


def forbid_unfolding(driver: Any) -> None:
    """Let requests that must be unfolded fail; those that a template answers do not."""
    driver._unfolder._unfolded = None


def num_time_outs(sequences: Any) -> int:
    """Time-outs that are kept for open sequences."""
    return len(sequences._idle.heap)


def room(engine: bm.Engine) -> Any:
    """The places of an engine with `max_queue`."""
    found = engine._submitter._room
    assert found is not None
    return found


def num_free(engine: bm.Engine) -> int:
    """Places that are free."""
    return int(room(engine)._num_free)


def num_waiting_for_room(engine: bm.Engine) -> int:
    """Threads that wait for a place."""
    return len(room(engine)._freed._waiters)


def network_of(model: Any) -> Any:
    """The module of torch whose layers a network of the zoo, or a model that was made of a module, computes."""
    return model._network if hasattr(model, "_network") else model._module


# --- the scheduler and its policies ----------------------------------------------------------------------------------


def listen_to_arrivals(patch: pytest.MonkeyPatch, heard: Callable[[Sequence[RequestArrived]], None]) -> None:
    """Call `heard` with the requests that a scheduler enters in Python, not in its compiled turn."""
    arrived = Scheduler._arrived

    def entered(of: Scheduler, events: Sequence[RequestArrived], *given: Any) -> None:
        heard(events)
        arrived(of, events, *given)

    patch.setattr(Scheduler, "_arrived", entered)


def state_of(urgency: Urgency) -> SchedulerState:
    return urgency._state


def hurry(urgency: Urgency, request: Any, from_s: float, until_s: float) -> None:
    """Let a request seem short of time between these times."""
    living = urgency._state.requests
    urgency._short.add(from_s, request, living, len(living))
    urgency._over.add(until_s, request, living, len(living))


def list_places(frames: Any) -> tuple[int, int]:
    """Of the places for lists that requests collect: those that are free, and all."""
    lists, free = frames._machine.lists, 0
    place = int(lists[1, 0])
    while place != -1:
        free, place = free + 1, int(lists[1, place])
    return free, int(lists[0, 0]) - 1


def num_waiting_for_values(frames: Any) -> int:
    """Nodes by whose values a request will decide."""
    return int((frames._machine.waits != -1).sum())


def code_words(frames: Any) -> int:
    """How long the code of all regions is together."""
    return int(frames._num_words)


def lengths_of(policy: AutoPolicy) -> RunLengths:
    """What the policy expects of runs that values end."""
    return policy._lengths


def num_deadlines(scheduler: GraphScheduler) -> int:
    """Deadlines that a scheduler of whole requests remembers."""
    return len(scheduler._deadlines)


# --- unfolding -------------------------------------------------------------------------------------------------------


def recorder_of(unfolding: Unfolding) -> Recorder:
    return unfolding._recorder


def begin_block(recorder: Recorder) -> None:
    """Let the next calls be in a block of their own."""
    recorder._flush()


# --- cells and their loops -------------------------------------------------------------------------------------------


def node_loop(cell: BoundCell) -> NodeLoop | None:
    return cell._forms.node_loop(cell.inputs, cell.outputs)


def state_loop(cell: BoundCell) -> StateLoop | None:
    count = cell.num_step_inputs or 0
    return cell._forms.state_loop(cell._need_split(), cell.inputs[count:], cell.outputs, count)


def say_faster(cell: BoundCell, faster: np.ndarray) -> None:
    """Let the cell's loop count as timed. faster: by number of rows."""
    choice: Any = cell._chain_loop or cell._node_loop
    choice._faster = faster


def recorded_sizes(persistent: Any) -> list[tuple[int, int]]:
    """The rows and steps for which the first layer of a module replays recorded steps."""
    return list(persistent._parts[0].layer._steps._recordings)


def barrier_memory(kernel: Any) -> tuple[Tensor, Tensor]:
    """Where the blocks of a kernel exchange states, and count those that have arrived."""
    return kernel._exchange, kernel._arrivals


def each_of(benchmark: Any) -> Callable[..., list[dict[str, Any]]]:
    """The function of the kernels' benchmark that measures the rows of a section."""
    return cast(Callable[..., list[dict[str, Any]]], benchmark._each)


def listen_to_gathering(patch: pytest.MonkeyPatch, heard: Callable[[Any], object]) -> None:
    """Call `heard` with what is gathered of a memory, each time."""
    filled = MemoryReader._gathered

    def gathered(of: MemoryReader, *given: Any) -> Any:
        made = filled(of, *given)
        heard(made)
        return made

    patch.setattr(MemoryReader, "_gathered", gathered)


# --- GPUs, and those that schedule themselves ------------------------------------------------------------------------


def gpu_places(engine: bm.Engine) -> list[Any]:
    """The devices of the first worker, each with what is in flight there."""
    return list(engine.driver.executor._places)  # type: ignore[attr-defined]


def device_places(engine: bm.Engine) -> list[Any]:
    """The devices on which requests are scheduled, each with what is known of it."""
    driver: Any = engine.driver
    return list(driver.on_device._places)


def num_ended(core: DeviceCore) -> int:
    """Requests that have ended on the device."""
    return int(core._page[PageWord.ENDED])


def bytes_of_request(core: DeviceCore, slot: int) -> slice:
    """Where the memory of a request is among the bytes of the device's arena."""
    request = core._requests[slot]
    return slice(request.where, request.where + request.plan.num_bytes)


def take_entries_without_room() -> None:
    """Let every device core believe that its rings have room."""
    DeviceCore._has_entries = lambda self, plan: True  # type: ignore[method-assign]


# --- servers ---------------------------------------------------------------------------------------------------------


def idle(connections: Any) -> list[Any]:
    """The connections, or calls, that have no work, the longest idle one first."""
    return list(connections._idle)


def calls_of(server: Any) -> Any:
    """The calls that are open at a server of gRPC."""
    return server._handlers.service.calls


def core_of(server: Any) -> tuple[str, str]:
    """The address of gRPC's core in a server, and the secret name there of the connection that was opened first."""
    return server._listener.core, next(iter(server._listener._open))


def look_at(stream: Any, within_s: float, num_sent: int) -> None:
    """Look whether the client takes its answer, as a timer does. num_sent: bytes of it at the last look."""
    stream._look(within_s, num_sent)


def num_pooled(pool: Any) -> int:
    """Connections that the pool of WebSockets reads from."""
    return len(pool._members)


def sequences_with_names(sequences: Any) -> list[Any]:
    """The sequences that clients have given names, also ended ones that are still remembered."""
    return [held.sequence for held in sequences._named.values()]


def model_of(port: Any) -> Any:
    """The model of an engine that is served."""
    return port._model


def end_within_s() -> float:
    """Seconds in which the engine of a served model must have ended."""
    from batchmaker.server.service import served_model

    return served_model._END_S


def as_plain(value: Any, form: Any) -> Any:
    """A result of bulk work as its file holds it."""
    from batchmaker.fleet.bulk import _plain

    return _plain(value, form)


def listen_to_decoding(patch: pytest.MonkeyPatch, heard: Callable[[bytes], object]) -> None:
    """Call `heard` with each text of elements that is made into objects at once."""
    from batchmaker.server.formats import json_tensors

    made = json_tensors._decoder

    def decoder(*kind: Any) -> Any:
        def decode(text: bytes) -> Any:
            heard(text)
            return made(*kind).decode(text)

        return SimpleNamespace(decode=decode)

    patch.setattr(json_tensors, "_decoder", decoder)


def around_each_move(patch: pytest.MonkeyPatch, move: Callable[[Callable[[], Any]], Any]) -> None:
    """Let `move` open connections to the replicas that sequences move to: it is given what does so."""
    from batchmaker.fleet.sockets import Relay

    opened_at = Relay._opened_at

    async def opened(relay: Relay, new: Any) -> Any:
        return await move(lambda: opened_at(relay, new))

    patch.setattr(Relay, "_opened_at", opened)
