"""The engine: one loop around a driver. Requests come from any thread or event loop; each is answered exactly once."""

from __future__ import annotations

import asyncio
import itertools
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from batchmaker import policies
from batchmaker.cells.model import Model
from batchmaker.cells.registry import CellRegistry
from batchmaker.clock import RealClock
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.engine.driver import Driver, DriverStats, StepSeen
from batchmaker.engine.graph_driver import GraphDriver
from batchmaker.engine.materialise import materialise
from batchmaker.engine.ticket import Outbox, Stream, Ticket
from batchmaker.errors import BatchmakerError, ModelError, OptionError, StoppedError
from batchmaker.executor.base import Executor
from batchmaker.executor.cpu import CpuExecutor, default_threads
from batchmaker.executor.inline import InlineExecutor
from batchmaker.graph.recorder import DEFAULT_MAX_NODES
from batchmaker.policies.base import CellPolicy, GraphPolicy
from batchmaker.scheduler.core import Scheduler
from batchmaker.scheduler.events import RequestId

SWITCH_INTERVAL_S = 5e-4
"""Longest that a worker waits for the interpreter after an operation while another thread runs Python. The default of
5 ms turns steps of 1 ms into 5 ms; the engine lowers it for the process when it starts, and never raises it."""

MAX_ARRIVALS_PER_TURN = 64
"""Requests unfolded before finished work is looked at again."""


@final
class _Cancel:
    __slots__ = ("request_id",)

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id


_WAKE = object()
_STOP = object()


@final
class Engine:
    """Serves one model: continuous batching of its cells across requests.

        with Engine(model) as engine:
            results = engine.map(requests)          # from synchronous code, with a progress bar
        async with Engine(model) as engine:
            result = await engine.submit(request)   # from asyncio

    policy: a name (`cellular`, `padded`, `serial`) or a policy object. workers: 1 computes in the engine's own thread,
    more in threads of their own. threads: compute threads of each; by default the cores less one, shared out.
    run_ahead: steps that may be left on a worker when it gets its next task; by default 1 where workers have threads of
    their own. max_nodes: most nodes of one request. executor: another device; then `workers` and `threads` do not
    apply.
    The engine starts when it is entered, or at the first request.
    """

    def __init__(
        self,
        model: Model,
        policy: str | CellPolicy | GraphPolicy = "cellular",
        *,
        workers: int = 1,
        threads: int | None = None,
        run_ahead: int | None = None,
        max_nodes: int = DEFAULT_MAX_NODES,
        executor: Executor | None = None,
    ) -> None:
        if workers < 1:
            raise OptionError(f"workers must be at least 1, got {workers}")
        self._model = model
        self._clock = RealClock()
        self._registry = CellRegistry()
        self._policy = policies.make(policy) if isinstance(policy, str) else policy
        self._threads = default_threads(workers) if threads is None else threads
        self._driver = self._make_driver(workers, run_ahead, max_nodes, executor)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._woken = threading.Event()
        self._work_waits = False
        self._outbox = Outbox()
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._crash: BaseException | None = None
        self.on_settled: Callable[[Ticket, BaseException | None], None] | None = None

    def _make_driver(
        self, workers: int, run_ahead: int | None, max_nodes: int, executor: Executor | None
    ) -> CellDriver | GraphDriver:
        policy = self._policy
        if isinstance(policy, GraphPolicy):
            if type(self._model).batched is Model.batched:
                self._model.batched([])  # raises the advice
            if policy.max_batch > 1 and not self._model.can_pad:
                raise ModelError(
                    f"{type(self._model).__name__} cannot be padded: whole requests of it have no common form to be "
                    "computed together in. Use policy 'cellular', or 'serial' for one request at a time."
                )
            return GraphDriver(self._model, policy, self._clock, num_workers=workers, num_threads=self._threads)
        types, bound = self._registry.types, self._registry.bound
        if executor is None and workers == 1:
            executor = InlineExecutor(types, bound, num_threads=self._threads)
        elif executor is None:
            executor = CpuExecutor(types, bound, num_workers=workers, num_threads=self._threads)
        inline = isinstance(executor, InlineExecutor)
        if run_ahead is None:
            run_ahead = 0 if inline else 1
        scheduler = Scheduler(policy, num_workers=executor.num_workers, run_ahead=run_ahead, take_turns=inline)
        return CellDriver(self._model, self._registry, scheduler, executor, self._clock, max_nodes)

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Start the workers, prove and materialise the model's cells from its example request. Once is enough."""
        with self._lock:
            if self._stopping:
                raise StoppedError("the engine has been stopped; make a new one")
            if self._thread is not None:
                return self
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
            self._driver.start(self._notify, self._settle)
            self._thread = threading.Thread(target=self._loop, name="batchmaker-engine", daemon=True)
            self._thread.start()
        if self._model.example_request is not None:
            self._prove_example()
        return self

    def _prove_example(self) -> None:
        try:
            self.submit_future(self._model.example_request).result()
        except BatchmakerError as error:
            self.stop()
            raise ModelError(f"the model's example request failed: {error}") from error
        if isinstance(self._driver, CellDriver):
            materialise(self._registry, self._threads)

    def stop(self, *, drain: bool = True) -> None:
        """Take no more requests, finish those accepted (or cancel them, without `drain`) and end all threads."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        self._inbox.put((_STOP, drain))
        thread.join()

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(drain=kind is None)

    async def __aenter__(self) -> Engine:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(lambda: self.stop(drain=kind is None))

    # --- requests ------------------------------------------------------------------------------------------------

    async def submit(self, request: Any, *, deadline_s: float | None = None) -> Any:
        """Return the request's result as soon as its last cell is done.

        deadline_s: seconds from now after which the request is given up with DeadlineError. Cancelling the task that
        awaits this cancels the request. Raises the request's own error, whose class tells whose fault it was.
        """
        ticket = self._ticket(request, deadline_s)
        ticket.loop = asyncio.get_running_loop()
        ticket.future = ticket.loop.create_future()
        self._send(ticket)
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._inbox.put(_Cancel(ticket.request_id))
            raise

    def submit_future(self, request: Any, *, deadline_s: float | None = None) -> Future[Any]:
        """As `submit`, for threads: returns a concurrent future at once."""
        ticket = self._ticket(request, deadline_s)
        future: Future[Any] = Future()
        ticket.future = future
        self._send(ticket)
        return future

    def stream(self, request: Any, *, deadline_s: float | None = None) -> AsyncIterator[Any] | Iterator[Any]:
        """Return the request's values as they come: iterate with `async for` or `for`.

        An unfold function streams what it yields; one that returns a sequence streams its elements in order; any other
        streams its result alone. Leaving the iteration early cancels the request.
        """
        ticket = self._ticket(request, deadline_s)
        stream = Stream(lambda: self._inbox.put(_Cancel(ticket.request_id)))
        future: Future[Any] = Future()
        future.add_done_callback(lambda done: stream.end(done.exception()))
        ticket.future = future
        ticket.on_value = stream.put
        self._send(ticket)
        return stream  # type: ignore[return-value]

    def map(self, requests: Iterable[Any], *, progress: bool = True, max_in_flight: int = 4096) -> list[Any]:
        """Return the results of many requests in order, all batched together, with a progress bar on a terminal.

        The first error is raised once everything in flight is settled. max_in_flight: requests offered at once.
        """
        requests = list(requests)
        results: list[Any] = [None] * len(requests)
        errors: list[BaseException] = []
        room = threading.Semaphore(max_in_flight)
        done: queue.SimpleQueue[int] = queue.SimpleQueue()

        def settled(index: int, future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                results[index] = future.result()
            else:
                errors.append(error)
            done.put(index)
            room.release()

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not progress, transient=True) as bar:
            task = bar.add_task("requests", total=len(requests))
            for index, request in enumerate(requests):
                room.acquire()
                self.submit_future(request).add_done_callback(lambda f, i=index: settled(i, f))  # type: ignore[misc]
            for _ in requests:
                done.get()
                bar.advance(task)
        if errors:
            raise errors[0]
        return results

    # --- what can be seen ------------------------------------------------------------------------------------------

    @property
    def clock(self) -> RealClock:
        """The clock that tickets' times refer to."""
        return self._clock

    @property
    def stats(self) -> DriverStats:
        """Counts since the start; read them, do not write."""
        return self._driver.stats

    @property
    def driver(self) -> Driver:
        """What the loop drives; for observers and tests."""
        return self._driver

    @property
    def registry(self) -> CellRegistry:
        """The model's bound cells."""
        return self._registry

    @property
    def num_in_flight(self) -> int:
        """Requests accepted and not answered."""
        return self._driver.num_in_flight

    def observe(self, observer: Callable[[StepSeen], None] | None) -> None:
        """Call `observer` in the engine's thread with every finished step."""
        self._driver.observer = observer

    # --- inside ------------------------------------------------------------------------------------------------------

    def _ticket(self, request: Any, deadline_s: float | None) -> Ticket:
        now_s = self._clock.now_s()
        return Ticket(RequestId(next(self._ids)), request, now_s, None if deadline_s is None else now_s + deadline_s)

    def _send(self, ticket: Ticket) -> None:
        if self._thread is None:
            self.start()
        with self._lock:
            if self._stopping:
                raise StoppedError("the engine has been stopped and takes no more requests") from self._crash
            self._inbox.put(ticket)

    def _notify(self) -> None:
        """Wake the loop; many calls before it looks make one wake-up."""
        if not self._woken.is_set():
            self._woken.set()
            self._inbox.put(_WAKE)

    def _settle(self, ticket: Ticket, result: Any, error: BaseException | None) -> None:
        ticket.finished_s = self._clock.now_s()
        if self.on_settled is not None:
            self.on_settled(ticket, error)
        self._outbox.deliver(ticket, result, error)

    def _loop(self) -> None:
        backlog: list[Ticket] = []
        stopping = False
        try:
            while True:
                stopping |= self._take_inbox(backlog, wait=not self._work_waits and not self._should_accept(backlog))
                self._work_waits = False
                self._woken.clear()
                self._driver.collect()
                stopping |= self._take_inbox(backlog, wait=False)  # who came meanwhile joins the next task
                arrivals = backlog[:MAX_ARRIVALS_PER_TURN] if self._should_accept(backlog) else []
                self._driver.advance(arrivals)
                del backlog[: len(arrivals)]
                self._outbox.flush()
                if stopping and not backlog and self._driver.num_in_flight == 0 and self._inbox.empty():
                    self._driver.finish()
                    return
        except BaseException as error:  # a defect: whoever waits must hear of it
            self._fail_all(backlog, error)
            raise
        finally:
            self._driver.stop()

    def _should_accept(self, backlog: list[Ticket]) -> bool:
        """Whether to take requests now. While more waits than the workers can use soon, many are taken together."""
        if not backlog:
            return False
        urgent = self._driver.wants_requests or backlog[0].deadline_s is not None
        return urgent or len(backlog) >= MAX_ARRIVALS_PER_TURN

    def _take_inbox(self, backlog: list[Ticket], *, wait: bool) -> bool:
        """Move what has come into `backlog`, after waiting for something if told to. True once told to stop."""
        stopping = False
        while True:
            try:
                item = self._inbox.get(timeout=self._patience_s()) if wait else self._inbox.get_nowait()
            except queue.Empty:
                return stopping
            wait = False
            if isinstance(item, Ticket):
                backlog.append(item)
            elif isinstance(item, _Cancel):
                self._cancel(item.request_id, backlog)
            elif item is _WAKE:
                self._work_waits = True
            else:
                stopping = True
                if not item[1]:
                    for ticket in backlog:
                        self._settle(ticket, None, StoppedError("the engine was stopped before the request began"))
                    backlog.clear()
                    self._driver.cancel_all()

    def _cancel(self, request_id: RequestId, backlog: list[Ticket]) -> None:
        waiting = next((ticket for ticket in backlog if ticket.request_id == request_id), None)
        if waiting is None:
            self._driver.cancel(request_id)
        else:
            backlog.remove(waiting)
            self._driver.advance([waiting])
            self._driver.cancel(request_id)

    def _patience_s(self) -> float | None:
        wakeup_s = self._driver.next_wakeup_s()
        return None if wakeup_s is None else max(0.0, wakeup_s - self._clock.now_s())

    def _fail_all(self, backlog: list[Ticket], error: BaseException) -> None:
        with self._lock:
            self._stopping = True
            self._crash = error
        waiting = [*backlog, *self._driver.tickets()]
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Ticket):
                waiting.append(item)
        for ticket in {ticket.request_id: ticket for ticket in waiting}.values():
            if ticket.finished_s is not None:
                continue
            failure = StoppedError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._settle(ticket, None, failure)
        self._outbox.flush()
