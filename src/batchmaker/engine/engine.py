"""The engine: takes requests from any thread or event loop, and answers each exactly once. One loop turns a driver."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Any, Final, Literal, final

from batchmaker.clock import RealClock
from batchmaker.engine.answer import Answer
from batchmaker.engine.bulks import FEWEST_IN_BULK, MOST_IN_BULK, SHARED_IN_BULK
from batchmaker.engine.catalogue import Catalogue
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.engine.driver import Driver
from batchmaker.engine.explain import Explanation, explained
from batchmaker.engine.heartbeat import Heartbeat
from batchmaker.engine.observers import Onlooker
from batchmaker.engine.open_sequences import DEFAULT_IDLE_TIMEOUT_S, DEFAULT_MAX_SEQUENCES, SequenceLimit
from batchmaker.engine.python_settings import tune_interpreter
from batchmaker.engine.request import AnswerTaker, SequenceEnded, Settled, Ticket
from batchmaker.engine.sequence import Sequence
from batchmaker.engine.setup import Drivers, choose_policy, make_driver, only_steps, prepare_scheduler, separated
from batchmaker.engine.start import Start
from batchmaker.engine.stats import DriverStats, ServiceStats, StepSeen, StepsSeen
from batchmaker.engine.submission import Room, Submitter, Tickets
from batchmaker.engine.worker import Worker
from batchmaker.engine.workers import Workers
from batchmaker.errors import BatchmakerError, OptionError, StoppedError
from batchmaker.executor.base import Executor
from batchmaker.executor.processors import default_threads, found_processors
from batchmaker.graph.recorder import DEFAULT_MAX_NODES
from batchmaker.model.model import Model
from batchmaker.model.moved_state import identity_of, read
from batchmaker.model.options import check_choice, check_flag, check_number, check_whole, checked_priority
from batchmaker.model.ragged import Ragged, separate
from batchmaker.model.registry import CellRegistry
from batchmaker.model.structure import owned
from batchmaker.model.template_cache import ProvenTemplates
from batchmaker.model.unfolding import takes_last
from batchmaker.policies.ageing import AGED_EVERY
from batchmaker.policies.base import CellPolicy, GraphPolicy

_LOG: Final = logging.getLogger("batchmaker.engine")

_END_S: Final = 30.0
"""Seconds for the threads of an engine to end whose start has failed."""


@final
class Engine:
    """Serves models: continuous batching of their cells across requests.

        with Engine(model) as engine:
            results = engine.map(requests)          # from synchronous code, with a progress bar
        async with Engine(model) as engine:
            result = await engine.submit(request)   # from asyncio; in a thread, submit(request).result()

    - model: one model, or several by name. With several, each request names its model.
    - policy: a name, such as `cellular` or `padded`, or a policy object. Default: `auto`; on GPUs `cellular`, unless
      `refuse` is set.
    - workers: threads that serve, each with a scheduler and rows of its own; requests are dealt to them by work, and
      unfold functions run in all of them. `auto`: as many as there are compute threads (see `threads`), of one thread
      each, where there are more than two processors; otherwise one.
    - threads: compute threads of each worker. Default: `OMP_NUM_THREADS`, or all usable processors but one, divided
      among the workers; a cgroup's quota counts (`executor.processors`).
    - run_ahead: a worker gets its next task when at most so many of its tasks are unfinished (of its steps, if the
      policy has no budget of time). Default: 0 on the CPU, otherwise 1.
    - max_nodes: the most nodes of one request.
    - device: `cpu`; `cuda` for all GPUs, with one worker for each; or some of them, as `cuda:0,1`. DeviceError if there
      is no such GPU.
    - tf32: let products of float32 on GPUs round their factors to 10 bits.
    - executor: another kind of device. `workers` and `threads` do not apply to GPUs and executors.
    - deadline_ms: deadline of requests to models that have none of their own, in milliseconds from arrival.
    - late: `give-up`: a request fails at its deadline. `finish`: it is computed to its end and counted as late.
    - priorities: `aged`: one turn of eight goes to whoever has waited longest, whatever its priority. `strict`: a lower
      priority waits for as long as there is a higher one.
    - refuse: turn a request away before anything of it is computed, if the policy sees that it cannot be in time.
    - max_sequences: the most sequences that are open at once.
    - max_queue: the most requests that are accepted and not answered; None for no limit.
    - deterministic: a request's bits do not depend on other requests, on the policy, on the number of workers or on the
      run (of the same model, requests, processor, versions and `threads`; the default is then 1). A cell is computed in
      one form, at batch sizes at which a row is proved to get the same bits everywhere; a ModelError tells if a cell
      cannot be. For cells on the CPU: OptionError with a device, an executor, or a policy for whole requests.
    - when_full: what `submit` does at this limit: `refuse` raises QueueFullError, `wait` blocks the caller's thread
      until there is room. The thread of an event loop is never blocked: it gets QueueFullError in both cases.

    The engine starts when it is entered (`with`), or at the first request.
    """

    def __init__(
        self,
        model: Model | Mapping[str, Model],
        policy: str | CellPolicy | GraphPolicy | None = None,
        *,
        workers: int | Literal["auto"] = "auto",
        threads: int | None = None,
        run_ahead: int | None = None,
        max_nodes: int = DEFAULT_MAX_NODES,
        device: str = "cpu",
        tf32: bool = False,
        executor: Executor | None = None,
        deadline_ms: float | None = None,
        late: Literal["give-up", "finish"] = "give-up",
        priorities: Literal["aged", "strict"] = "aged",
        refuse: bool = False,
        deterministic: bool = False,
        max_sequences: int = DEFAULT_MAX_SEQUENCES,
        max_queue: int | None = None,
        when_full: Literal["refuse", "wait"] = "refuse",
    ) -> None:
        check_whole("threads", threads, least=1, optional=True)
        if workers != "auto":
            check_whole("workers", workers, least=1)
        check_flag("deterministic", deterministic)
        if deterministic and threads is None:
            threads = 1  # not as many as there are: another number makes other bits
        adapts = workers == "auto"
        workers, threads = found_processors().divided(workers, threads)
        check_whole("run_ahead", run_ahead, least=0, optional=True)
        check_whole("max_nodes", max_nodes, least=1)
        self._max_nodes = max_nodes
        self._identities: dict[int, str] = {}  # by model
        check_whole("max_sequences", max_sequences, least=0)
        check_whole("max_queue", max_queue, least=1, optional=True)
        check_choice("when_full", when_full, "refuse", "wait")
        check_choice("late", late, "give-up", "finish")
        check_choice("priorities", priorities, "aged", "strict")
        aged_every = AGED_EVERY if priorities == "aged" else None
        self._clock = RealClock()
        self._computes_here = computes_here = executor is None and device == "cpu"
        threads = default_threads(workers) if threads is None else threads
        chosen = choose_policy(policy, refuse=refuse, on_cpu=computes_here)
        self._registry = CellRegistry(
            deterministic_for=threads if deterministic else None,
            only_steps=only_steps(chosen, deterministic=deterministic, computes_here=computes_here),
            watches_weights=computes_here,
        )
        self._catalogue = Catalogue(model, self._registry, deadline_ms)
        if deterministic and not (computes_here and isinstance(chosen, CellPolicy)):
            where = "here" if computes_here else "on this device or executor"
            raise OptionError(
                f"deterministic=True is for policies of cells on the CPU, not for {chosen.name!r} {where}"
            )
        several = workers if computes_here and isinstance(chosen, CellPolicy) else 1
        self._limit = SequenceLimit(max_sequences)
        room = None if max_queue is None else Room(max_queue, waits=when_full == "wait")
        make = partial(
            make_driver,
            catalogue=self._catalogue,
            registry=self._registry,
            clock=self._clock,
            workers=workers,
            threads=threads,
            run_ahead=run_ahead,
            max_nodes=max_nodes,
            device=device,
            tf32=tf32,
            executor=executor,
            give_up_late=late == "give-up",
            limit=self._limit,
            aged_every=aged_every,
        )
        proven = ProvenTemplates()
        self._drivers = [Drivers(each, make, proven=proven) for each in separated(chosen, several)]
        self._service = [[ServiceStats() for _ in self._catalogue] for _ in self._drivers]  # by worker and by model
        made = [
            Worker(
                drivers.first(),
                drivers.another,
                self._clock,
                partial(self._settled, service),
                give_up_late=late == "give-up",
                on_leave=(lambda _: None) if room is None else room.leave,
                starting=lambda: self._start.said,
                aged_every=aged_every,
            )
            for drivers, service in zip(self._drivers, self._service, strict=True)
        ]
        self._workers = Workers(made, adapts=adapts)
        self._start = Start(
            self._catalogue,
            self._registry,
            self._workers.members,
            self._drivers,
            threads if computes_here else None,
            lambda request, name: self._ticket(request, math.inf, 0, name),
            lambda name: self.open_sequence(deadline_ms=math.inf, model=name),
        )
        self._submitter = Submitter(self._workers.entrance, self.start, room)
        self._tickets = Tickets(self._clock)
        self._on_settled: Onlooker[[Ticket, BaseException | None]] | None = None
        self._telling = Lock()  # one worker at a time calls observers

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Start the workers, then prove and materialise the cells with the models' example requests.

        A second call does nothing. Raises ModelError if an example request fails, StoppedError after `stop`.
        """
        tune_interpreter()
        if isinstance(self.policy, CellPolicy):
            models = [served.model for served in self._catalogue]
            prepare_scheduler(self.policy, models, on_cpu=self._computes_here)
        if not self._workers.start():
            return self
        try:
            self._start.run()
            if self._registry.types:
                _LOG.info("started: %s", self.explain().line)
        except Exception:  # said by the thread itself, whose turn ends now, however long it has taken
            self._workers.stop(drain=False, within_s=_END_S)
            raise
        except BaseException:  # Ctrl-C: a thread that is busy for longer than a second is not waited for
            self._workers.stop(drain=False, within_s=0.0 if self.heartbeat.busy_for_s > 1.0 else None)
            raise
        return self

    def stop(self, *, drain: bool = True, within_s: float | None = None) -> bool:
        """Take no more requests, finish the accepted ones, and end all threads. drain=False: cancel them instead.

        Returns whether the threads have ended. In the engine's own thread, such as in a callback of an answer, it
        returns at once. within_s: the most seconds to wait. Default: no limit, unless a function of the model hangs for
        a minute. A thread that has not ended by then is left behind, and every unanswered request fails with
        StoppedError. So every caller gets an answer, and the process can end. Code that hangs runs until the process
        ends.
        """
        check_number("within_s", within_s, least=0.0, optional=True)
        return self._workers.stop(drain=drain, within_s=within_s)

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

    def submit(
        self,
        request: Any,
        *,
        deadline_ms: float | None = None,
        priority: int = 0,
        model: str | None = None,
        stream: bool = False,
    ) -> Answer:
        """Submit a request, from any thread or event loop. Returns its answer at once, to await, wait for or cancel.

        deadline_ms: milliseconds from now by which the result is wanted. Default: the model's deadline; math.inf: none.
        `late` (see Engine) says what happens then. priority: larger is served first, -2**32 to 2**32. model: its name,
        if the engine has several. stream: the answer can be iterated (`for`, `async for`) to get values as they come:
        what the unfold function yields; or the elements in order, if it returns a sequence; otherwise the result alone.
        Raises OptionError for wrong options, QueueFullError (see `max_queue`) and StoppedError at once. The request's
        own error comes with the answer; its class says whether the request, a cell or the engine is the cause.
        Arrays, tensors, containers and dataclasses are copied; objects of other classes must not change meanwhile.
        """
        return self._submitter.submit(self._ticket(request, deadline_ms, priority, model), stream=stream)

    def submit_many(
        self,
        requests: Iterable[Any] | Ragged,
        *,
        deadline_ms: float | None = None,
        priority: int = 0,
        model: str | None = None,
    ) -> list[Answer]:
        """Submit requests together: as `submit` for each of them, in order, but cheaper. Returns their answers.

        requests: as those of `map`. If there is no room for all and this caller may not wait (see `when_full`), none is
        accepted.
        """
        served, copies = self._catalogue.find(model), [owned(request) for request in separate(requests)]
        return self._submitter.submit_many(self._tickets.many(served, copies, deadline_ms, checked_priority(priority)))

    def submit_chunks(self, chunks: Iterable[tuple[Sequence, Any]]) -> list[Answer]:
        """Submit chunks of sequences together: as `sequence.submit(chunk)` for each pair, in order, but cheaper.

        Raises SequenceError if a sequence has ended. Then none is accepted.
        """
        now_s = self._clock.now_s()
        return self._submitter.submit_many([sequence.ticket(chunk, None, now_s) for sequence, chunk in chunks])

    def send_chunks(
        self, chunks: Iterable[tuple[Sequence, Any, float | None, Any]], answers: AnswerTaker
    ) -> list[tuple[Any, BatchmakerError]]:
        """As `submit_chunks`, for a caller with chunks of many sequences, who gets the answers of a turn in one call.

        chunks: of each its sequence, itself, `deadline_ms`, and anything that its caller knows it by: `Ticket.place`.
        Returns those that are not accepted, by what they are known by, each with the error that `submit` would raise.
        """
        now_s = self._clock.now_s()
        tickets: list[Ticket] = []
        refused: list[tuple[Any, BatchmakerError]] = []
        for sequence, chunk, deadline_ms, place in chunks:
            try:
                ticket = sequence.ticket(chunk, deadline_ms, now_s)
            except BatchmakerError as error:
                refused.append((place, error))
                continue
            ticket.answers, ticket.place = answers, place
            tickets.append(ticket)
        try:
            if tickets:
                self._submitter.send(tickets)
        except BatchmakerError as error:
            refused += [(ticket.place, error) for ticket in tickets]
        return refused

    def open_sequence(
        self,
        *,
        deadline_ms: float | None = None,
        priority: int = 0,
        idle_timeout_s: float = DEFAULT_IDLE_TIMEOUT_S,
        model: str | None = None,
        state: bytes | None = None,
        on_ended: Callable[[SequenceEnded], None] | None = None,
    ) -> Sequence:
        """Open a sequence: requests (chunks) whose state stays on the device between them (see Model.unfold_chunk).

        It ends when it is closed, or when no chunk has come for `idle_timeout_s` seconds after the last answer
        (math.inf: never). The other options apply to each chunk; see `submit`. Raises SequenceLimitError while
        `max_sequences` are open, OptionError under a policy that batches whole requests, ModelError for a model without
        `unfold_chunk`.

        state: what `Sequence.state` of another sequence returned, here or elsewhere: this one goes on from there.
        SequenceStateError for damaged bytes, and for those of another model or of other weights. on_ended: called in
        the engine's thread when the sequence has ended, with who ended it and why; it must return at once.
        """
        served, priority = self._catalogue.find(model), checked_priority(priority)
        served.due_s(0.0, deadline_ms)  # raises OptionError for a wrong deadline
        self._workers.check()
        number, worker = self._workers.least_sequences()
        driver = worker.driver
        if not isinstance(driver, CellDriver):
            raise OptionError(
                f"policy {self.policy.name!r} batches whole requests and keeps nothing between them; sequences need "
                "one that batches cells, such as 'cellular' or 'lazy'"
            )
        if not served.model.takes_chunks:
            served.model.unfold_chunk(None, None)  # raises ModelError, with advice
        if not self._workers.is_running:
            self.start()
        identity = partial(self.identity, model)
        moved = None if state is None else read(state, identity(), self._max_nodes)
        entry = driver.sequences.make(idle_timeout_s, on_ended)
        try:
            worker.send(partial(driver.sequences.open, entry))
        except StoppedError:
            driver.sequences.uncount(entry)
            raise
        make_ticket = partial(self._tickets.one, served, priority=priority)
        sequence = Sequence(
            entry,
            worker,
            self._submitter,
            make_ticket,
            identity,
            deadline_ms,
            number,
            takes_last=takes_last(type(served.model)),
        )
        if moved is not None:
            try:
                sequence.go_on(moved)
            except BaseException:  # there is no room in the queue
                sequence.close()
                raise
        return sequence

    def identity(self, model: str | None = None) -> str:
        """Return a name that engines share only if they serve the same model with the same weights.

        The states of sequences go on where it is the same; see Sequence.state. Reads all weights, once.
        """
        served = self._catalogue.find(model)
        # Race: two callers may both compute it, and get the same
        if served.model_id not in self._identities:
            self._identities[served.model_id] = identity_of(served.model)
        return self._identities[served.model_id]

    def map(
        self,
        requests: Iterable[Any] | Ragged,
        *,
        progress: bool = True,
        ragged: bool = False,
        max_in_flight: int = 4096,
        deadline_ms: float | None = None,
        priority: int = 0,
        model: str | None = None,
    ) -> Any:
        """Return the results of many requests, as a list in their order. All are batched together.

        requests: the items of a list or iterator, the rows of an array or tensor, or the sequences of a `bm.Ragged`.
        ragged: return one `bm.Ragged` of all results in place of the list; see Ragged.join for results with several
        tensors. progress: show a progress bar on a terminal. The first error is raised after all requests are answered.
        max_in_flight: the most requests in flight at once. If `max_queue` is smaller, map waits for room. For the other
        options see `submit`.
        """
        check_whole("max_in_flight", max_in_flight, least=1)
        served, priority = self._catalogue.find(model), checked_priority(priority)
        due_s = served.due_s(self._clock.now_s(), deadline_ms)
        can_be_bulks = due_s is None and isinstance(self.driver, CellDriver)

        def tickets(together: SequenceOf[Any]) -> list[Ticket]:
            if can_be_bulks and len(together) >= FEWEST_IN_BULK:
                most = MOST_IN_BULK if len(self.drivers) == 1 else SHARED_IN_BULK
                return self._tickets.bulks(served, together, priority, most)
            return self._tickets.many(served, together, deadline_ms, priority)

        results = self._submitter.map(separate(requests), tickets, max_in_flight=max_in_flight, progress=progress)
        return Ragged.join(results) if ragged else results

    # --- what can be seen ------------------------------------------------------------------------------------------

    @property
    def clock(self) -> RealClock:
        """The clock of the times in tickets and steps."""
        return self._clock

    @property
    def stats(self) -> DriverStats:
        """Counts of what was computed since the start. For reading only."""
        return self._workers.stats

    @property
    def service(self) -> Mapping[str, ServiceStats]:
        """Counts of answers and failures by model name (of a single model: its class name). For reading only."""
        return {
            served.name: ServiceStats.total([service[served.model_id] for service in self._service])
            for served in self._catalogue
        }

    @property
    def driver(self) -> Driver:
        """The driver of the first worker; for observers and tests. After a failure of the engine it is another one."""
        return self._workers.members[0].driver

    @property
    def drivers(self) -> tuple[Driver, ...]:
        """The drivers of all workers; see `driver`."""
        return self._workers.drivers

    @property
    def policy(self) -> CellPolicy | GraphPolicy:
        """The policy, which decides what work runs next; with several workers, that of the first."""
        return self._drivers[0].policy

    @property
    def registry(self) -> CellRegistry:
        """The models' bound cells."""
        return self._registry

    def explain(self) -> Explanation:
        """Return how each cell runs that was used so far: in which form, and why in no faster one. Print it.

        Any thread may call it. It measures nothing; the counts of steps are those since the start.
        """
        return explained(self.policy.name, self._registry, self.drivers)

    @property
    def num_in_flight(self) -> int:
        """Number of requests that the drivers have taken and not answered. The workers' backlogs do not count."""
        return sum([driver.num_in_flight for driver in self.drivers])

    @property
    def num_sequences(self) -> int:
        """Number of open sequences."""
        return self._limit.num_open

    def observe(self, observer: Callable[[StepSeen], None] | None) -> None:
        """Call `observer` with every finished step, one worker at a time; None ends it. Its first error is logged."""
        if observer is None:
            self.observe_together(None)
            return
        shown = Onlooker(observer, "an observer of the engine")

        def show(steps: StepsSeen) -> None:
            for step in steps.each():
                shown(step)

        self.observe_together(show)

    def observe_together(self, observer: Callable[[StepsSeen], None] | None) -> None:
        """As `observe`, in place of it: call `observer` once for all steps that are reported together."""
        shown = None if observer is None else Onlooker(observer, "an observer of the engine")
        for number, driver in enumerate(self.drivers):
            driver.observer = shown
            if shown is not None and len(self.drivers) > 1:
                driver.observer = partial(self._show, shown, number)

    @property
    def on_settled(self) -> Callable[[Ticket, BaseException | None], None] | None:
        """Called by one worker at a time with each answered ticket and its error or None. Its first error is logged."""
        return self._on_settled

    @on_settled.setter
    def on_settled(self, on_settled: Callable[[Ticket, BaseException | None], None] | None) -> None:
        self._on_settled = None if on_settled is None else Onlooker(on_settled, "on_settled of the engine")

    def responds_within(self, seconds: float) -> bool:
        """Whether its threads run, and none has been in one turn for so long. Any thread may ask, at each request."""
        return self._workers.respond_within(seconds)

    @property
    def heartbeat(self) -> Heartbeat:
        """What the engine's thread does now, of several the one that hangs, if one does. Any thread may read it."""
        return self._workers.heartbeat()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _ticket(self, request: Any, deadline_ms: float | None, priority: int, model: str | None) -> Ticket:
        return self._tickets.one(self._catalogue.find(model), owned(request), deadline_ms, checked_priority(priority))

    def _show(self, observer: Callable[[StepsSeen], None], worker: int, steps: StepsSeen) -> None:
        with self._telling:
            observer(replace(steps, worker=worker))

    def _settled(self, service: list[ServiceStats], outcomes: Collection[Settled]) -> None:
        counted: dict[int, list[Settled]] = {}  # by model
        for outcome in outcomes:
            if outcome[0].counted:
                counted.setdefault(outcome[0].model_id, []).append(outcome)
        for model_id, mine in counted.items():
            service[model_id].settled(mine)
        if self._on_settled is not None:
            with self._telling:
                for ticket, _, error in outcomes:
                    if ticket.bulk is not None:
                        for member, of_member in ticket.bulk.each(error):
                            self._on_settled(member, of_member)
                    elif ticket.counted:
                        self._on_settled(ticket, error)
