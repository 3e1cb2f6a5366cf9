"""Graph batching in virtual time: whole requests, padded to the longest of their batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.core.commands import Fail, Reply
from batchmaker.core.events import RequestId, TimePassed
from batchmaker.lab.baselines.scheduler import (
    BatchFinished,
    GraphEvent,
    GraphScheduler,
    RunBatch,
    WholeRequestArrived,
)
from batchmaker.lab.simulator.costs import StepCosts
from batchmaker.lab.simulator.simulation import Observe, Simulation
from batchmaker.lab.simulator.workload import Offered, SimulatedModel, SimulatedRequest
from batchmaker.policies.base import GraphPolicy


@final
class PaddedCost:
    """Seconds of whole requests computed together.

    For each cell type, a batch of b requests takes as many steps as its longest member. A step has b rows times the
    rows in one step of the widest member (1 for chains; nodes per step for nodes that run at once). A batch of one
    costs its own steps at batch 1: SingleInputExecTime of LazyBatching's Algorithm 1.
    """

    def __init__(self, model: SimulatedModel, requests: Sequence[SimulatedRequest], costs: StepCosts) -> None:
        self._costs = costs
        self._types = np.arange(len(model.cells))
        shapes: dict[int, int] = {}  # requests of one shape are one object
        self._shape = np.array([shapes.setdefault(id(request), len(shapes)) for request in requests])
        self._steps = np.zeros((len(shapes), len(model.cells)), np.int64)
        self._width = np.ones((len(shapes), len(model.cells)), np.int64)
        self._alone_s: dict[int, float] = {}  # by shape
        first = np.unique(self._shape, return_index=True)[1]
        for number, request in enumerate(first.tolist()):
            work = requests[request].work
            self._steps[number, work.types] = work.steps
            self._width[number, work.types] = -(-work.nodes // np.maximum(work.steps, 1))

    def seconds(self, requests: NDArray[np.int64]) -> float:
        """Return seconds of one batch. requests: [batch] positions among the requests."""
        shapes = self._shape[requests]
        if len(shapes) > 1:
            return self._of_shapes(shapes)
        shape = int(shapes[0])
        if shape not in self._alone_s:
            self._alone_s[shape] = self._of_shapes(shapes)
        return self._alone_s[shape]

    def _of_shapes(self, shapes: NDArray[np.int64]) -> float:
        """Return seconds of one batch of requests of these shapes: [batch]."""
        steps = self._steps[shapes].max(axis=0)
        rows = len(shapes) * self._width[shapes].max(axis=0)
        return float(self._costs.of(self._types, rows) @ steps)


@final
class GraphSimulation(Simulation[RunBatch]):
    """One simulation of a graph policy. give_up_late: see GraphScheduler."""

    def __init__(
        self,
        model: SimulatedModel,
        policy: GraphPolicy,
        offered: Offered,
        costs: StepCosts,
        *,
        sla_s: float | None = None,
        num_workers: int = 1,
        give_up_late: bool = False,
        observe: Observe | None = None,
    ) -> None:
        super().__init__(offered, sla_s, num_workers, policy.name, observe, give_up_late=give_up_late)
        self.scheduler = GraphScheduler(policy, num_workers=num_workers, give_up_late=give_up_late)
        self._requests = offered.requests
        self._cost = PaddedCost(model, offered.requests, costs)

    def begin(self) -> None:
        """Graph policies know nothing of cells."""

    def _may_submit(self) -> bool:
        return min(self._unfinished) == 0

    def _wakeup_s(self) -> float | None:
        return self.scheduler.next_wakeup_s

    def _num_left(self) -> int:
        return self.scheduler.num_requests

    def _handle(self, arrivals: Sequence[int], ended: Sequence[RunBatch], now_s: float) -> int:
        events: list[GraphEvent] = [
            WholeRequestArrived(
                RequestId(i),
                self._requests[i].length,
                self._arrived_s[i],
                self._deadline_s(i),
                model=self._requests[i].model,
            )
            for i in arrivals
        ]
        for batch in ended:
            self._unfinished[batch.worker] -= 1
            events.append(BatchFinished(batch.batch, now_s))
        commands = self.scheduler.handle(*(events or (TimePassed(now_s),)))
        for command in commands:
            match command:
                case RunBatch():
                    members = np.array(command.requests, np.int64)
                    self._submit(command, command.worker, "graph", now_s, self._cost.seconds(members), members)
                case Reply() | Fail():
                    self._end(command, now_s)
        return len(commands)
