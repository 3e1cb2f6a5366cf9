"""Cell policies in virtual time, in one compiled loop over the scheduler's own tables, on one worker."""

from __future__ import annotations

import math
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.cost.profile import Overhead
from batchmaker.errors import InvariantError, OptionError
from batchmaker.graph.work import work_of
from batchmaker.lab.simulator import cell_loop
from batchmaker.lab.simulator.cell_loop import Device, Lazy, Loop, Offer, Watched, play
from batchmaker.lab.simulator.core_tables import CoreTables, kinds_of
from batchmaker.lab.simulator.workload import Offered, Records, SimulatedModel, SimulatedRequest
from batchmaker.policies.ageing import PATIENCE
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.cellular import CellularPolicy
from batchmaker.policies.expectation import NO_PREDICTIONS, NOBODY, Predictions, StepsLeft
from batchmaker.policies.joining import NO_TEST, JoiningRules
from batchmaker.policies.lazy import LazyPolicy
from batchmaker.policies.requests import RequestTable
from batchmaker.scheduler.steps import HEADER

Ids = NDArray[np.int64]
Times = NDArray[np.float64]


def compiled_cells(
    model: SimulatedModel,
    policy: CellPolicy,
    offered: Offered,
    seconds: Times,
    *,
    sla_s: float | None = None,
    overhead: Overhead,
) -> CompiledCells | str:
    """Return the simulation; or why the compiled loop cannot play it. seconds: as of CellSimulation.

    It plays `cellular` and `lazy` on one worker that does not run ahead.
    """
    policy.check_cells(model.cells)
    shapes, kinds = kinds_of(offered.requests)
    reason = _why_not(model, policy, shapes, seconds)
    if reason is not None:
        return reason
    return CompiledCells(model, policy, shapes, kinds, offered, seconds, sla_s, overhead)


def _why_not(
    model: SimulatedModel, policy: CellPolicy, shapes: list[SimulatedRequest], seconds: Times
) -> str | None:  # fmt: skip
    """Return why the loop cannot play this policy on these cells and requests, None if it can."""
    largest = max(cell.max_batch for cell in model.cells)
    if seconds.shape[0] != len(model.cells) or seconds.shape[1] <= largest or not (seconds[:, 1:] > 0).all():
        return "a step of some size takes no time, or its time is not known"
    if any(shape.graph.first or not shape.graph.num_nodes for shape in shapes):
        return "a request has no nodes, or begins with stored ones"
    if type(policy) is CellularPolicy:
        return None
    if type(policy) is not LazyPolicy:
        return f"the policy is {policy.name!r}, and the loop knows `cellular` and `lazy`"
    policy.learn_types(model.cells)
    if policy.drops:
        return "the policy refuses requests"
    if not (policy.times.base[:, 1:] > 0).all():
        return "the policy does not know the time of some cell beforehand"
    users: dict[int, int] = {}
    for shape in shapes:
        for type_id in work_of(shape.graph).types.tolist():
            if users.setdefault(type_id, shape.model) != shape.model:
                return "several models use one cell type"
    return None


@final
class CompiledCells:
    """One simulation of a cell policy, with the outcome of CellSimulation, many times as fast. See `compiled_cells`.

    sla_s: see Simulation.
    """

    def __init__(
        self,
        model: SimulatedModel,
        policy: CellPolicy,
        shapes: list[SimulatedRequest],
        kinds: Ids,
        offered: Offered,
        seconds: Times,
        sla_s: float | None,
        overhead: Overhead,
    ) -> None:
        if sla_s is not None and not (math.isfinite(sla_s) and sla_s > 0):
            raise OptionError(f"an SLA must be a finite time above 0, got {sla_s} s")
        self._policy, num_types = policy, len(model.cells)
        self._tables = CoreTables(model.cells, policy, [shape.graph for shape in shapes], overhead)
        self._requests = RequestTable()
        for _ in model.cells:
            self._requests.add_type()
        self._device = Device(
            np.ascontiguousarray(seconds, np.float64), overhead.step_s, overhead.row_s, overhead.turn_s,
            overhead.request_s, np.array([cell.priority for cell in model.cells], np.int64), PATIENCE,
        )  # fmt: skip
        self._offer = _offer(shapes, kinds, np.ascontiguousarray(offered.arrived_s, np.float64), sla_s, num_types)
        self.records = Records.of(offered.arrived_s)
        self._loop = Loop(
            np.zeros(cell_loop.NUM_NUMBERS, np.int64), np.zeros(cell_loop.NUM_SECONDS), np.zeros_like(kinds),
            np.zeros_like(kinds), np.zeros(num_types, np.int64), np.zeros_like(kinds), self.records.started_s,
            self.records.finished_s, np.zeros(0, np.bool_),
        )  # fmt: skip
        self._loop.numbers[cell_loop.REJECTED] = -1
        self._lazy = _lazy(policy, self._offer)
        self._loop.numbers[cell_loop.STALE] = bool(np.any(self._lazy.predictions.fixed == 0))

    def run(self) -> Records:
        """Run to the end."""
        numbers, records, task = self._loop.numbers, self.records, np.zeros(HEADER, np.int64)
        while True:
            task = play(
                self._tables.addresses, self._tables.forms, self._loop, self._offer, self._device, self._watched(),
                self._lazy, task,
            )  # fmt: skip
            if numbers[cell_loop.WHY] == cell_loop.OVER:
                break
            if numbers[cell_loop.WHY] == cell_loop.NO_ROOM:
                self._tables.make_room(self._loop.coming[: numbers[cell_loop.NUM_COMING]])
            else:
                self._follow()
        if np.isnan(records.finished_s).any():
            raise InvariantError(f"policy {self._policy.name!r} leaves requests unanswered and nothing runs")
        records.steps, records.rows = int(numbers[cell_loop.STEPS]), int(numbers[cell_loop.ROWS])
        records.busy_s = float(self._loop.seconds[cell_loop.BUSY_S])
        return records

    def _watched(self) -> Watched:
        table = self._requests
        if self._lazy.watches:
            table.fit(self._tables.num_slots - 1)
        return Watched(
            table.left, table.done, table.width, table.open, table.deadline_s, table.began_s, table.model
        )  # fmt: skip

    def _follow(self) -> None:
        """Let the policy learn from what has run so far, and let the loop know what it expects now."""
        policy, lazy, numbers = self._policy, self._lazy, self._loop.numbers
        if not isinstance(policy, LazyPolicy):
            return
        if numbers[cell_loop.WHY] == cell_loop.CORRECT:
            policy.times.rebuild()
            numbers[cell_loop.SINCE] = 0
            self._lazy = lazy._replace(expected_s=policy.times.replay.seconds)
            return
        for i, (_, _, profile) in enumerate(policy.left.predicted):
            seen = int(lazy.num_seen[i])
            profile.observe_all(lazy.seen_given[i, :seen], lazy.seen_steps[i, :seen])
            lazy.num_seen[i] = 0
        predictions = policy.left.predictions()
        for i, (_, _, profile) in enumerate(policy.left.predicted):
            lazy.stale_at[i] = profile.num_until_stale
        numbers[cell_loop.STALE] = 0
        self._lazy = lazy._replace(predictions=predictions)


def _offer(shapes: list[SimulatedRequest], kinds: Ids, arrived_s: Times, sla_s: float | None, num_types: int) -> Offer:
    nodes, width = np.zeros((len(shapes), num_types), np.int64), np.ones((len(shapes), num_types))
    for i, shape in enumerate(shapes):
        work = work_of(shape.graph)
        nodes[i, work.types], width[i, work.types] = work.nodes, np.maximum(work.nodes / work.steps, 1.0)
    deadline_s = arrived_s + (math.inf if sla_s is None else sla_s)
    return Offer(arrived_s, deadline_s, kinds, nodes, width, np.array([shape.model for shape in shapes], np.int64))


def _lazy(policy: CellPolicy, offer: Offer) -> Lazy:
    """Return what `lazy` knows; with another policy, nothing that is ever read."""
    count, num_types = len(offer.kinds), offer.nodes.shape[1]
    if not isinstance(policy, LazyPolicy):
        none, no_times = np.zeros((0, 0), np.int64), np.zeros((0, 0))
        return Lazy(
            False, JoiningRules(NO_TEST, False, False, False), 0, False, False, no_times, np.zeros(0), no_times,
            none.ravel(), NO_PREDICTIONS, none, none, none.ravel(), none.ravel(),
        )  # fmt: skip
    num = len(policy.left.predicted)
    of_type = np.array([offer.model[offer.nodes[:, t] > 0].max(initial=0) for t in range(num_types)], np.int64)
    return Lazy(
        True, policy.rules, policy.cap, policy.recent, policy.times.corrects, np.ascontiguousarray(policy.times.base),
        policy.times.factors, policy.times.replay.seconds, of_type, _predictions(policy.left),
        np.zeros((num, count), np.int64), np.zeros((num, count), np.int64), np.zeros(num, np.int64),
        np.full(num, count + 1),
    )  # fmt: skip


def _predictions(left: StepsLeft) -> Predictions:
    """Return what is predicted, without tables of lengths, which are made when they are first needed."""
    if left.lengths != "conditional" or not left.predicted:
        return left.predictions()
    num = len(left.predicted)
    cell, given = [cell for cell, _, _ in left.predicted], [given for _, given, _ in left.predicted]
    return Predictions(
        np.array(cell, np.int64), np.array([NOBODY if one is None else one for one in given], np.int64),
        np.zeros(num, np.int64), np.zeros((num, 0), np.int64), np.zeros((num, 0, 0), np.int64), np.zeros(num, np.int64),
    )  # fmt: skip
