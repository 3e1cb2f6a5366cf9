"""Cell policies in virtual time, in one compiled loop over the scheduler's own tables, on one worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import numpy as np

from batchmaker.arrays import Floats, Ints
from batchmaker.core.steps import HEADER
from batchmaker.cost.profile import Overhead
from batchmaker.errors import InvariantError, OptionError
from batchmaker.graph.spec import CellType
from batchmaker.graph.work import work_of
from batchmaker.lab.simulator.compiled_loop import play
from batchmaker.lab.simulator.core_tables import CoreTables, kinds_of
from batchmaker.lab.simulator.loop_tables import (
    AUTO,
    BUSY_S,
    CELLULAR,
    IS_LEARNING,
    LAZY,
    NO_ROOM,
    NUM_COMING,
    NUM_NUMBERS,
    NUM_SECONDS,
    OVER,
    REJECTED,
    ROWS,
    SINCE,
    STALE,
    STEPS,
    WHY,
    DeviceCosts,
    Lazy,
    LoopTables,
    OfferTables,
    Policy,
)
from batchmaker.lab.simulator.workload import Offered, Records, SimulatedModel, SimulatedRequest
from batchmaker.policies.auto import AutoPolicy
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.cellular import CellularPolicy
from batchmaker.policies.expectation import CORRECT_EVERY, NOBODY, ExpectedStepTimes, Predictions, StepsLeft
from batchmaker.policies.lazy import LazyPolicy
from batchmaker.policies.requests import RequestColumns, RequestTable
from batchmaker.policies.run_lengths import MOST_NOTED


def compiled_cells(
    model: SimulatedModel,
    policy: CellPolicy,
    offered: Offered,
    seconds: Floats,
    *,
    sla_s: float | None = None,
    overhead: Overhead,
) -> CompiledCells | str:
    """Return the simulation; or why the compiled loop cannot play it. seconds: as in StepCosts.

    It plays `cellular`, `lazy` and `auto` on one worker that does not run ahead.
    """
    policy.check_cells(model.cells)
    shapes, kinds = kinds_of(offered.requests)
    reason = _why_not(model, policy, shapes, seconds)
    if reason is not None:
        return reason
    return CompiledCells(model, policy, shapes, kinds, offered, seconds, sla_s, overhead)


def _why_not(model: SimulatedModel, policy: CellPolicy, shapes: list[SimulatedRequest], seconds: Floats) -> str | None:
    """Return why the loop cannot play this policy on these cells and requests, None if it can."""
    largest = max(cell.max_batch for cell in model.cells)
    if seconds.shape[0] != len(model.cells) or seconds.shape[1] <= largest or not (seconds[:, 1:] > 0).all():
        return "a step of some size takes no time, or its time is not known"
    if any(shape.graph.first or not shape.graph.num_nodes for shape in shapes):
        return "a request has no nodes, or begins with stored ones"
    if any(shape.decided is not None for shape in shapes):
        return "values decide what a request computes"
    if type(policy) is CellularPolicy:
        return None
    if not isinstance(policy, LazyPolicy | AutoPolicy):
        return f"the policy is {policy.name!r}, and the loop knows `cellular`, `lazy` and `auto`"
    if policy.drops:
        return "the policy refuses requests"
    if not (_times(policy, model.cells).base[:, 1:] > 0).all():
        return "the policy does not know the time of some cell beforehand"
    if isinstance(policy, AutoPolicy):
        return _why_not_auto(model, shapes)
    users: dict[int, int] = {}
    for shape in shapes:
        for type_id in work_of(shape.graph).types.tolist():
            if users.setdefault(type_id, shape.model) != shape.model:
                return "several models use one cell type"
    return None


def _why_not_auto(model: SimulatedModel, shapes: list[SimulatedRequest]) -> str | None:
    """Return why the loop cannot play `auto` on these cells and requests, None if it can."""
    if len(model.cells) == 1 or any(shape.model for shape in shapes):
        return "under `auto` the loop knows one model with several cells"
    if max(cell.max_batch for cell in model.cells) > MOST_NOTED:
        return f"under `auto` the loop knows batches of up to {MOST_NOTED}"
    for shape in shapes:
        used = [part.type_id for part in shape.graph.runs]
        if len(set(used)) < len(used) or len(used) < len(shape.graph.parts):
            return "under `auto` the loop knows requests in which each cell type is one run"
    stopping = [{run.type_id for run in shape.graph.runs if run.open_ended} for shape in shapes]
    if any(types != stopping[0] for types in stopping):
        return "requests differ in which of their runs a value may end"
    return None


def _times(policy: LazyPolicy | AutoPolicy, cells: Sequence[CellType]) -> ExpectedStepTimes:
    """Return what a policy expects of the steps of these cells."""
    if isinstance(policy, AutoPolicy):
        return policy.times(cells)
    policy.learn_types(cells)
    return policy.times


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
        kinds: Ints,
        offered: Offered,
        seconds: Floats,
        sla_s: float | None,
        overhead: Overhead,
    ) -> None:
        if sla_s is not None and not (math.isfinite(sla_s) and sla_s > 0):
            raise OptionError(f"an SLA must be a finite time above 0, got {sla_s} s")
        self._policy, num_types = policy, len(model.cells)
        self._tables = CoreTables(model.cells, policy, [shape.graph for shape in shapes], overhead)
        self._requests = RequestTable()
        self._note_kinds(model, shapes, sla_s)
        self._device = DeviceCosts(
            np.ascontiguousarray(seconds, np.float64),
            overhead.step_s,
            overhead.row_s,
            overhead.turn_s,
            overhead.request_s,
        )
        self._offer = _offer(shapes, kinds, np.ascontiguousarray(offered.arrived_s, np.float64), sla_s, num_types)
        self.records = Records.of(offered.arrived_s)
        self._loop = LoopTables(
            np.zeros(NUM_NUMBERS, np.int64),
            np.zeros(NUM_SECONDS),
            np.zeros_like(kinds),
            np.zeros_like(kinds),
            np.zeros(num_types, np.int64),
            np.zeros_like(kinds),
            np.zeros_like(kinds),
            self.records.started_s,
            self.records.finished_s,
            np.zeros(0, np.bool_),
        )
        self._loop.numbers[REJECTED] = -1
        self._cells = model.cells
        self._compiled_policy = self._policy_tables()
        self._loop.numbers[STALE] = self._compiled_policy.how == LAZY and bool(
            np.any(self._compiled_policy.lazy.predictions.fixed == 0)
        )

    def _note_kinds(self, model: SimulatedModel, shapes: list[SimulatedRequest], sla_s: float | None) -> None:
        """Note what requests are like, as they would be noted when they arrive."""
        for _ in model.cells:
            self._requests.add_type()
        for shape in shapes:
            self._requests.note_kind(math.inf if sla_s is None else 0.0, shape.model)
            for run in shape.graph.runs:
                self._requests.note_run(run.type_id, may_stop=run.open_ended)

    def run(self) -> Records:
        """Run to the end."""
        numbers, records, task = self._loop.numbers, self.records, np.zeros(HEADER, np.int64)
        while True:
            task = play(
                self._tables.addresses,
                self._tables.forms,
                self._loop,
                self._offer,
                self._device,
                self._watched(),
                self._compiled_policy,
                task,
            )
            if numbers[WHY] == OVER:
                break
            if numbers[WHY] == NO_ROOM:
                self._tables.make_room(self._loop.coming[: numbers[NUM_COMING]])
            else:
                self._learn()
        if np.isnan(records.finished_s).any():
            raise InvariantError(f"policy {self._policy.name!r} leaves requests unanswered and nothing runs")
        records.steps, records.rows = int(numbers[STEPS]), int(numbers[ROWS])
        records.busy_s = float(self._loop.seconds[BUSY_S])
        return records

    def _watched(self) -> RequestColumns:
        table = self._requests
        if self._compiled_policy.how != CELLULAR:
            table.fit(self._tables.num_slots - 1)
        return table.columns

    def _learn(self) -> None:
        """Let the policy learn from what has run so far, and let the loop know what it expects now."""
        policy, numbers = self._policy, self._loop.numbers
        assert isinstance(policy, LazyPolicy | AutoPolicy)
        if numbers[SINCE] >= CORRECT_EVERY:
            times = _times(policy, self._cells) if isinstance(policy, AutoPolicy) else policy.times
            times.rebuild()
            numbers[SINCE] = 0
            self._compiled_policy = self._compiled_policy._replace(times=times.tables)
        elif isinstance(policy, LazyPolicy):
            self._learn_lengths(policy, self._compiled_policy.lazy)
        if isinstance(policy, AutoPolicy) and numbers[STALE]:
            self._compiled_policy = self._compiled_policy._replace(auto=policy.tables(self._requests))
            numbers[STALE], numbers[IS_LEARNING] = 0, policy.is_learning

    def _learn_lengths(self, policy: LazyPolicy, lazy: Lazy) -> None:
        profiles = [profile for _, _, profile in policy.steps_left.predicted]
        for profile, given_lengths, steps, seen in zip(
            profiles, lazy.seen_given, lazy.seen_steps, lazy.num_seen.tolist(), strict=True
        ):
            profile.observe_all(given_lengths[:seen], steps[:seen])
        predictions = policy.steps_left.predictions()
        lazy.num_seen[:] = 0
        lazy.stale_at[:] = [profile.num_until_stale for profile in profiles]
        self._loop.numbers[STALE] = 0
        self._compiled_policy = self._compiled_policy._replace(lazy=lazy._replace(predictions=predictions))

    def _policy_tables(self) -> Policy:
        """Return what the policy knows, for the loop; of other policies, nothing that is ever read."""
        policy, offer, cells = self._policy, self._offer, self._cells
        lazy = _lazy(policy if isinstance(policy, LazyPolicy) else LazyPolicy(), offer)
        auto = policy if isinstance(policy, AutoPolicy) else AutoPolicy()
        if isinstance(policy, LazyPolicy):
            return Policy(LAZY, policy.times.tables, lazy, auto.tables(RequestTable()))
        times = auto.times(cells).tables
        if isinstance(policy, AutoPolicy):
            return Policy(AUTO, times, lazy, auto.tables(self._requests))
        return Policy(CELLULAR, times, lazy, auto.tables(RequestTable()))


def _offer(
    shapes: list[SimulatedRequest], kinds: Ints, arrived_s: Floats, sla_s: float | None, num_types: int
) -> OfferTables:
    nodes, width = np.zeros((len(shapes), num_types), np.int64), np.ones((len(shapes), num_types))
    for i, shape in enumerate(shapes):
        work = work_of(shape.graph)
        nodes[i, work.types], width[i, work.types] = work.nodes, np.maximum(work.nodes / work.steps, 1.0)
    deadline_s = arrived_s + (math.inf if sla_s is None else sla_s)
    return OfferTables(
        arrived_s, deadline_s, kinds, nodes, width, np.array([shape.model for shape in shapes], np.int64)
    )


def _lazy(policy: LazyPolicy, offer: OfferTables) -> Lazy:
    """Return what `lazy` knows."""
    num, count, num_types = len(policy.steps_left.predicted), len(offer.kinds), offer.nodes.shape[1]
    of_type = np.array([offer.model[offer.nodes[:, t] > 0].max(initial=0) for t in range(num_types)], np.int64)
    return Lazy(
        policy.rules,
        policy.cap,
        policy.recent,
        of_type,
        _predictions(policy.steps_left),
        np.zeros((num, count), np.int64),
        np.zeros((num, count), np.int64),
        np.zeros(num, np.int64),
        np.full(num, count + 1),
    )


def _predictions(steps_left: StepsLeft) -> Predictions:
    """Return what is predicted, without tables of lengths, which are made when they are first needed."""
    if steps_left.lengths != "conditional" or not steps_left.predicted:
        return steps_left.predictions()
    num = len(steps_left.predicted)
    cell, source = [cell for cell, _, _ in steps_left.predicted], [source for _, source, _ in steps_left.predicted]
    return Predictions(
        np.array(cell, np.int64),
        np.array([NOBODY if one is None else one for one in source], np.int64),
        np.zeros(num, np.int64),
        np.zeros((num, 0), np.int64),
        np.zeros((num, 0, 0), np.int64),
        np.zeros(num, np.int64),
    )
