"""The cellular scheduler in virtual time: a table gives the seconds of every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.core.commands import Admit, Fail, NodesBegun, Reply, RunTask
from batchmaker.core.events import CellTypeAdded, Event, RequestArrived, RequestId, StepsFinished, TimePassed
from batchmaker.core.scheduler import Scheduler
from batchmaker.errors import OptionError
from batchmaker.lab.simulator.core_tables import task_s
from batchmaker.lab.simulator.costs import SimulatedDevice
from batchmaker.lab.simulator.decisions import Deciding
from batchmaker.lab.simulator.simulation import Observe, OfFleet, Simulation
from batchmaker.lab.simulator.workload import Offered, SimulatedModel
from batchmaker.policies.base import CellPolicy


@dataclass(frozen=True, slots=True)
class _Step:
    """A submitted step. seconds: its time, as reported to policies."""

    task: RunTask
    number: int
    seconds: float


@final
class CellSimulation(Simulation[_Step]):
    """One simulation of a cell policy. The device's costs are [cells, max_batch + 1].

    give_up_late, plan_rows: see Scheduler. A run that may end has as many steps as its graph says, and the scheduler
    learns so only when the last of them is done. With the device's overhead each step ends so much later, and the first
    step that is submitted after a request arrived begins later by `request_s`. With any overhead, tasks that are
    weighed against their own cost are as long as the engine's. fleet: see Simulation. Values that decide are those of
    RecordedDecisions.
    """

    def __init__(
        self,
        model: SimulatedModel,
        policy: CellPolicy,
        offered: Offered,
        device: SimulatedDevice,
        *,
        sla_s: float | None = None,
        give_up_late: bool = False,
        plan_rows: bool = False,
        observe: Observe | None = None,
        fleet: OfFleet | None = None,
    ) -> None:
        super().__init__(offered, sla_s, device.workers, policy.name, observe, give_up_late=give_up_late, fleet=fleet)
        seconds = device.costs.seconds
        largest = max(cell.max_batch for cell in model.cells)
        if seconds.shape[0] != len(model.cells) or seconds.shape[1] <= largest:
            raise OptionError(
                f"model {model.name!r} has {len(model.cells)} cells and batches of up to {largest}; got seconds of "
                f"shape {list(seconds.shape)}, expected [{len(model.cells)}, {largest + 1}]"
            )
        policy.check_cells(model.cells)
        self.scheduler = Scheduler(
            policy,
            num_workers=device.workers,
            run_ahead=device.run_ahead,
            take_turns=device.take_turns,
            give_up_late=give_up_late,
            plan_rows=plan_rows,
            task_s=task_s(device.overhead),
        )
        self._model = model
        self._requests = offered.requests
        self._seconds: list[list[float]] = seconds.tolist()
        self._run_ahead = device.run_ahead
        self._overhead = device.overhead
        self._num_new = 0  # requests that arrived since a step was submitted
        self._free_s = [0.0] * device.workers
        self._by_slot: NDArray[np.int64] = np.zeros(256, np.int64)
        self._deciding = Deciding()

    def begin(self) -> None:
        self.scheduler.handle(*(CellTypeAdded(cell, 0.0) for cell in self._model.cells))

    def _may_submit(self) -> bool:
        return min(self._unfinished) <= self._run_ahead

    def _wakeup_s(self) -> float | None:
        return self.scheduler.next_deadline_s

    def _num_left(self) -> int:
        return self.scheduler.num_requests

    def _handle(self, arrivals: Sequence[int], ended: Sequence[_Step], now_s: float) -> int:
        events: list[Event] = [
            RequestArrived(
                RequestId(i),
                self._requests[i].graph,
                self._arrived_s[i],
                self._deadline_s(i),
                model=self._requests[i].model,
            )
            for i in arrivals
        ]
        self._num_new += len(arrivals)
        for step in ended:
            self._unfinished[step.task.worker] -= 1
            values, at = self._deciding.take(), step.number
            events.append(StepsFinished(step.task.task, at, at + 1, now_s, busy_s=step.seconds, values=values))
        commands = self.scheduler.handle(*(events or (TimePassed(now_s),)))
        for command in commands:
            match command:
                case RunTask():
                    self._start(command, now_s)
                case Admit():
                    self._admitted(command)
                case NodesBegun():
                    self._begun(command.segments)
                case Reply() | Fail():
                    self._deciding.ended(command.request)
                    self._end(command, now_s)
        return len(commands)

    def _admitted(self, command: Admit) -> None:
        if command.slot >= len(self._by_slot):
            self._by_slot = np.concatenate((self._by_slot, np.zeros(command.slot + 1, np.int64)))
        self._by_slot[command.slot] = command.request
        decided = self._requests[command.request].decided
        if decided is not None:
            self._deciding.admitted(decided, command.base - command.first_local)

    def _begun(self, segments: Ints) -> None:
        """Note the segments that values have let begin; see NodesBegun."""
        for slot, form, base in segments.T.tolist():
            number = int(self._by_slot[slot])
            request = self._requests[number]
            assert request.decided is not None
            segment = self.scheduler.frames.segments[form]
            self._deciding.begun(number, request.graph.region, request.decided, segment, base)

    def _start(self, task: RunTask, now_s: float) -> None:
        worker, seconds, what = task.worker, self._seconds[task.type_id], self._model.cells[task.type_id].name
        overhead = self._overhead
        begin_s = max(self._free_s[worker], now_s) + self._num_new * overhead.request_s
        self._num_new = 0
        requests_of_all, begin = self._by_slot[self.scheduler.slots(task.nodes)], 0
        for number, end in enumerate(task.ends.tolist()):
            taken_s = seconds[end - begin] + overhead.step_s + (end - begin) * overhead.row_s
            requests = requests_of_all[begin:end]
            begin = end
            until_next_s = taken_s + overhead.turn_s
            self._submit(_Step(task, number, taken_s), worker, what, begin_s, until_next_s, requests)
            begin_s += until_next_s
        self._free_s[worker] = begin_s
