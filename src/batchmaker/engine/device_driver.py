"""Requests that a device which schedules itself computes. CellDriver gives them here instead of to the scheduler.

A request is taken if its graph is known when it comes and all its cells were recorded and proved at the start. All
others are the scheduler's, as without such a device. `why_not` says why.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.clock import Clock
from batchmaker.compile.export import row_bytes, torch_dtype
from batchmaker.compile.run_form import RunForm
from batchmaker.core.events import RequestId
from batchmaker.device.core import DeviceCore, Reported
from batchmaker.device.layout import NONE
from batchmaker.device.memory import Sizes
from batchmaker.device.plan import PlannedType, RequestPlan, plan_of
from batchmaker.device.proof import TriedCell, can_end, num_steps, prove
from batchmaker.engine.failures import blamed, stopped
from batchmaker.engine.request import InFlight, Settled, Ticket
from batchmaker.engine.stats import DriverStats
from batchmaker.errors import RAISED_BY_USERS, BatchmakerError, CancelledError, DeadlineError, DeviceError, said_by
from batchmaker.executor.base import Executor
from batchmaker.executor.cuda.device import CannotRecordError
from batchmaker.executor.cuda.executor import CudaExecutor
from batchmaker.executor.cuda.watcher import CHECK_EVERY_S
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.graph.values import Value
from batchmaker.model.registry import CellRegistry
from batchmaker.model.scope import OpenLoop
from batchmaker.model.structure import Handle
from batchmaker.model.unfolding import Unfolding
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.cellular import CellularPolicy

_LOG: Final = logging.getLogger("batchmaker.engine")

_AFTER_THE_START: Final = (
    "first used after the start; with an example_request in the model it is recorded and proved there"
)
SIZES: Final = Sizes()
MAX_PLANS: Final = 4096
"""Plans of templates that are kept."""


@final
@dataclass(slots=True)
class _Place:
    """A core and what runs there. planned: the types that it takes. requests: by slot; None if given up before its end.

    untold: slots that are to be cancelled. work: nodes in flight. heard_s: when it last reported something.
    """

    core: DeviceCore
    number: int
    planned: dict[TypeId, PlannedType] = field(default_factory=dict)
    requests: dict[int, InFlight | None] = field(default_factory=dict)
    plans: dict[int, RequestPlan] = field(default_factory=dict)
    untold: list[int] = field(default_factory=list)
    work: int = 0
    heard_s: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class _PlannedRequest:
    """A request that is taken and has no room yet. values: the bytes of its host inputs."""

    request: InFlight
    plan: RequestPlan
    values: Sequence[NDArray[np.uint8]]


@final
class DeviceDriver:
    """Gives requests to the cores of the executor's devices, and answers them.

    why: reason for which nothing is taken any more; "" while there is none. refused: type id -> why the requests of a
    cell are the scheduler's. stats: counts the steps. give_up_late: whether requests fail at their deadlines. settle:
    answers requests.

    Two threads use it: the engine's, and the one that starts the engine, in `materialise`. Race: both submit work, and
    the second records. So each does all of it under the executor's own lock.
    """

    def __init__(
        self,
        registry: CellRegistry,
        executor: CudaExecutor,
        clock: Clock,
        stats: DriverStats,
        *,
        give_up_late: bool,
        tf32: bool = False,
        why: str = "",
    ) -> None:
        self.why = why
        self.refused: dict[TypeId, str] = {}
        self.stats = stats
        self.settle: Callable[[Sequence[Settled]], None] = lambda _: None
        self._registry = registry
        self._executor = executor
        self._clock = clock
        self._give_up_late = give_up_late
        self._tf32 = tf32
        self._places: list[_Place] = []
        self._plans: dict[int, tuple[CellGraph, RequestPlan]] = {}
        self._requests: dict[RequestId, InFlight] = {}  # taken and not answered
        self._waiting: deque[_PlannedRequest] = deque()  # those that were answered meanwhile are passed over
        self._running: dict[RequestId, tuple[_Place, int]] = {}
        self._due: list[tuple[float, RequestId]] = []

    # --- what the driver asks ---------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Number of requests that were taken and are not answered."""
        return len(self._requests)

    @property
    def is_full(self) -> bool:
        """Whether requests wait for room."""
        return bool(self._waiting)

    @property
    def next_wakeup_s(self) -> float | None:
        """The next deadline; None if there is none."""
        while self._due and self._due[0][1] not in self._requests:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def tickets(self) -> list[Ticket]:
        """Return the tickets of requests that were taken and are not answered."""
        return [request.ticket for request in self._requests.values()]

    def form_of(self, type_id: TypeId) -> RunForm | None:
        """Return the form of a type in requests that are taken; None if the scheduler has them all."""
        if self.why or not self._takes(type_id):
            return None
        return RunForm(
            "scheduled by the GPU itself",
            "the host schedules requests that wait for values or decide by them, stream a sequence, are chunks, have a "
            "priority, or loop until anything but one integer",
        )

    def why_not(self, type_id: TypeId) -> str:
        """Return why requests with this cell are the scheduler's; "" if they are not."""
        if self.form_of(type_id) is not None:
            return ""
        said = self.why or self.refused.get(type_id, _AFTER_THE_START)
        return f"not scheduled by the GPU: {said}"

    def materialise(self) -> None:
        """Record all known types and prove them. Nothing has been taken yet."""
        if self.why:
            return
        with self._executor.exclusive:
            try:
                self._places = [
                    _Place(DeviceCore(device, SIZES), number) for number, device in enumerate(self._executor.devices)
                ]
                for cell in list(self._registry.types):
                    self._learn(cell)
                for place in self._places:
                    self._executor.watch(place.core)
            except RAISED_BY_USERS as error:  # no memory, a lost device, a kernel that does not compile
                self._stop_taking(error)

    def _learn(self, cell: CellType) -> None:
        """Let all cores learn a type, and prove it on each. If one cannot, none takes it."""
        type_id, begin_s = cell.type_id, time.perf_counter()
        for place in self._places:
            bound = self._executor.bound(place.number, type_id)
            try:
                planned = place.core.learn(cell, lambda *rows, bound=bound: bound.call(rows))
                tried = TriedCell(cell, bound, self._registry.num_step_inputs.get(type_id))
                said = prove(place.core, {type_id: planned}, [tried], tf32=self._tf32)
            except CannotRecordError as error:
                said = str(error)
            if said:
                self.refused[type_id] = said
                _LOG.info("cell %r is not scheduled by the GPU: %s", cell.name, said)
                for one in self._places:
                    one.planned.pop(type_id, None)
                return
            place.planned[type_id] = planned
        _LOG.debug("cell %r is scheduled by the GPU: proved in %.2f s", cell.name, time.perf_counter() - begin_s)

    def _takes(self, type_id: TypeId) -> bool:
        """Whether the cores take a type."""
        return bool(self._places) and type_id in self._places[0].planned

    # --- requests that come ----------------------------------------------------------------------------------------

    def take(self, requests: Iterable[InFlight]) -> set[RequestId]:
        """Take the requests that a core can compute. Returns which."""
        with self._executor.exclusive:
            return {request.ticket.request_id for request in requests if not self.why and self._take(request)}

    def _take(self, request: InFlight) -> bool:
        """Whether a request is taken. One whose data cannot be used is answered."""
        unfolding, ticket, graph = request.unfolding, request.ticket, request.graphs[0]
        if (
            request.awaits_values
            or (isinstance(unfolding, Unfolding) and unfolding.waits)
            or ticket.chunk is not None
            or ticket.priority != 0
            or unfolding.decided is not None
            or graph.region is not None
            or graph.memories
            or graph.first
            or graph.num_nodes == 0
        ):
            return False
        plan = self._plan(graph, unfolding.loops)
        if plan is None:
            return False
        try:
            values = self._values(request, graph)
        except RAISED_BY_USERS as error:  # the data of the request
            self.settle([(ticket, None, blamed(error, "its data"))])
            return True
        self._requests[ticket.request_id] = request
        self._waiting.append(_PlannedRequest(request, plan, values))
        if self._give_up_late and ticket.deadline_s is not None:
            heapq.heappush(self._due, (ticket.deadline_s, ticket.request_id))
        return True

    def _plan(self, graph: CellGraph, loops: Mapping[int, OpenLoop]) -> RequestPlan | None:
        """Return the plan of a graph; None if a core cannot run it. loops: those that end at a value."""
        entry = self._plans.get(id(graph))
        if entry is not None:
            return entry[1]
        types = {int(kind) for block in graph.blocks for kind in np.unique(block.types)}
        types.update(int(run.type_id) for run in graph.runs)
        if not all(self._takes(TypeId(kind)) for kind in types):
            return None
        stops = self._stops(graph, loops)
        if stops is None:
            return None
        plan = plan_of(graph, self._places[0].planned, stops)
        if said := self._places[0].core.too_large(plan):
            _LOG.info("a request is not scheduled by the GPU: %s", said)
            return None
        if graph.shared:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[id(graph)] = (graph, plan)
        return plan

    def _stops(self, graph: CellGraph, loops: Mapping[int, OpenLoop]) -> dict[int, tuple[int, int]] | None:
        """Return where the loops of a graph end; None if a device cannot see it."""
        stops: dict[int, tuple[int, int]] = {}
        for run in graph.runs:
            if run.open_ended:
                (output, until), *others = loops[run.first].conditions
                if others or type(until) is not int or not can_end(self._registry.types[run.type_id].outputs[output]):
                    return None
                stops[run.first] = (output, until)
        return stops

    def _values(self, request: InFlight, graph: CellGraph) -> list[NDArray[np.uint8]]:
        """Return the bytes of each host input of a request."""
        types, inputs = self._registry.types, []
        for feed, host in enumerate(graph.host_inputs):
            values = host.values
            if request.template_values is not None:
                _, gathered, place = request.template_values
                _, values = gathered.rows(feed, (place,), (0,))
            inputs.append(_bytes(values, host.count, types[host.type_id].inputs[host.port]))
        return inputs

    # --- a turn ------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Answer requests that have ended, and give the cores those that wait. Called in every turn of the engine."""
        if self.why or not (self._waiting or any(place.requests for place in self._places)):
            return
        with self._executor.exclusive:
            try:
                for place in self._places:
                    self._collect(place)
                self._give_up()
                self._fill()
                for place in self._places:
                    place.untold = [slot for slot in place.untold if not place.core.cancel(slot)]
                    place.core.submit()
            except RAISED_BY_USERS as error:  # the device is lost, or refuses
                self._stop_taking(error)
        self._executor.wake()

    def _collect(self, place: _Place) -> None:
        reported, now_s = place.core.poll(), self._clock.now_s()
        self._count(reported)
        if reported.tasks or not place.requests:
            place.heard_s = now_s
        elif now_s - place.heard_s > CHECK_EVERY_S:
            place.heard_s = now_s
            place.core.device.check()
        alike: dict[int, list[tuple[int, InFlight]]] = {}
        for slot in reported.ended:
            request = place.requests[slot]
            if request is not None:
                alike.setdefault(id(request.unfolding), []).append((slot, request))
        outcomes = [outcome for members in alike.values() for outcome in self._answered(place, members)]
        for slot in reported.ended:
            place.core.release(slot)
            request, plan = place.requests.pop(slot), place.plans.pop(slot)
            place.work -= plan.num_nodes
            if request is not None:
                del self._running[request.ticket.request_id], self._requests[request.ticket.request_id]
            elif slot in place.untold:
                place.untold.remove(slot)
        if outcomes:
            self.settle(outcomes)

    def _count(self, reported: Reported) -> None:
        self.stats.tasks += reported.tasks
        self.stats.steps += reported.steps
        self.stats.cells += reported.cells
        self.stats.padded_cells += reported.rows

    def _answered(self, place: _Place, members: Sequence[tuple[int, InFlight]]) -> list[Settled]:
        """Return the outcomes of ended requests with one unfolding."""
        try:
            unfolding = members[0][1].unfolding
            first_of = {loop.last: loop.first for loop in unfolding.loops.values()}
            results = unfolding.results(
                len(members),
                lambda handle: [
                    _value(handle, place.core.answer(slot), place.plans[slot], first_of) for slot, _ in members
                ],
            )
        except RAISED_BY_USERS as error:  # a class of the user in the result
            if len(members) == 1:
                return [(members[0][1].ticket, None, blamed(error, "its result"))]
            return [outcome for one in members for outcome in self._answered(place, [one])]
        outcomes: list[Settled] = []
        for (_, request), result in zip(members, results, strict=True):
            if request.ticket.on_value is not None and unfolding.streams_result:
                request.ticket.stream(result)
            outcomes.append((request.ticket, result, None))
        return outcomes

    def _fill(self) -> None:
        """Give waiting requests to the core with the least work, as far as there is room."""
        now_s = self._clock.now_s()
        while self._waiting:
            one, ticket = self._waiting[0], self._waiting[0].request.ticket
            if ticket.request_id in self._requests:
                place = min(self._places, key=lambda place: place.work)
                slot = place.core.add(one.plan, one.values)
                if slot is None:
                    return
                ticket.started_s = now_s
                place.requests[slot], place.plans[slot] = one.request, one.plan
                place.work += one.plan.num_nodes
                self._running[ticket.request_id] = (place, slot)
            self._waiting.popleft()

    # --- who ends early ---------------------------------------------------------------------------------------------

    def cancel(self, request_id: RequestId) -> bool:
        """Give a request up. False if it is not here."""
        return self._leave(request_id, CancelledError(f"request {request_id}: cancelled by the caller"))

    def stop_all(self) -> None:
        """Give every request up, because the engine is stopped."""
        for request_id in list(self._requests):
            self._leave(request_id, stopped(request_id))

    def _give_up(self) -> None:
        now_s = self._clock.now_s()
        while self._due and self._due[0][0] <= now_s:
            _, request_id = heapq.heappop(self._due)
            if request_id in self._requests:
                self._leave(request_id, DeadlineError(self._requests[request_id].ticket.said_late))

    def _leave(self, request_id: RequestId, error: BatchmakerError) -> bool:
        """Answer a request with an error. What the device has of it ends at its next step."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request_id in self._running:
            place, slot = self._running.pop(request_id)
            place.requests[slot] = None
            place.untold.append(slot)
        self.settle([(request.ticket, None, error)])
        return True

    def _stop_taking(self, error: BaseException) -> None:
        """Take nothing more. The requests that were taken fail, each with one error."""
        self.why = said_by(error)
        for place in self._places:
            place.core.abandon()
        _LOG.warning("requests are not scheduled by the GPU from now on: %s", self.why)
        outcomes: list[Settled] = []
        for request in self._requests.values():
            failure = DeviceError(f"request {request.ticket.request_id}: the device failed: {self.why}")
            failure.__cause__ = error
            outcomes.append((request.ticket, None, failure))
        self._requests.clear()
        self._waiting.clear()
        self._running.clear()
        if outcomes:
            self.settle(outcomes)


def on_devices(executor: Executor, policy: CellPolicy, **options: Any) -> DeviceDriver | None:
    """Return what gives requests to the devices of an executor; None if it has none that could schedule themselves.

    options: see DeviceDriver.
    """
    if not isinstance(executor, CudaExecutor):
        return None
    plain = CellularPolicy()
    follows = (policy.name, policy.max_steps, policy.budget_s) == (plain.name, plain.max_steps, plain.budget_s)
    actual = f"{policy.name!r} with options" if policy.name == plain.name else repr(policy.name)
    why = "" if follows else f"it follows policy {plain.name!r} without options, and the policy is {actual}"
    return DeviceDriver(executor=executor, why=why, **options)


def _bytes(values: Any, count: int, spec: ValueSpec) -> NDArray[np.uint8]:
    """Return the values of a host input, [count, *shape], as bytes of the input's dtype."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and spec.dtype == "int64" and not spec.shape:
        return np.ascontiguousarray(values).view(np.uint8)
    rows = torch.empty((count, *spec.shape), dtype=torch_dtype(spec.dtype))
    rows[:] = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return rows.view(-1).view(torch.uint8).numpy()


def _value(handle: Handle, memory: NDArray[np.uint8], plan: RequestPlan, first_of: Mapping[int, int]) -> Any:
    """Return what a handle stands for, in memory of its own: a tensor, or a Python number where it is a single one.

    first_of: the last possible node of a loop that ends at a value -> its first node.
    """
    spec = handle.spec
    size, dtype = row_bytes(spec), torch_dtype(spec.dtype)
    if isinstance(handle, Value):
        node = handle.node
        if handle.ends_open_loop and plan.answers[first := first_of[node], handle.output] != NONE:
            node = first + num_steps(memory, plan, first) - 1
        at = int(plan.answers[node, handle.output])
        value = _tensor(memory[at : at + size], dtype).view(spec.shape)
        return value if spec.shape else value.item()
    nodes = handle.nodes
    if handle.open_ended:
        nodes = nodes[: num_steps(memory, plan, int(nodes[0]))]
    places = plan.answers[nodes, handle.output]
    if len(places) == 0:
        return torch.empty((0, *spec.shape), dtype=dtype)
    if bool((np.diff(places) == size).all()):
        rows = memory[int(places[0]) : int(places[0]) + size * len(places)]
    else:
        rows = memory[places[:, None] + np.arange(size)].reshape(-1)
    return _tensor(rows, dtype).view(len(places), *spec.shape)


def _tensor(memory: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(memory.copy()).view(dtype)
