"""Cell policies in virtual time, in one compiled loop: `cellular` and `lazy`, on one worker."""

from __future__ import annotations

import math
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.cost.profile import Overhead
from batchmaker.errors import InvariantError, OptionError
from batchmaker.graph.spec import CellType
from batchmaker.lab.simulator import line_loop
from batchmaker.lab.simulator.cell_loop import play
from batchmaker.lab.simulator.lazy_loop import Lazy
from batchmaker.lab.simulator.line_loop import NOBODY, DeviceCosts, Flight, Task
from batchmaker.lab.simulator.shapes import Ids, Shapes, Small, shapes_of
from batchmaker.lab.simulator.workload import Offered, Records, SimulatedModel
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.cellular import CellularPolicy
from batchmaker.policies.joining import NO_TEST, JoiningRules
from batchmaker.policies.lazy import LazyPolicy
from batchmaker.scheduler.arena import UNKNOWN_S
from batchmaker.scheduler.batching import BATCHES_AHEAD
from batchmaker.scheduler.extents import size_class

_NONE: Final = np.zeros((0, 0), np.int64)
_NO_RULES: Final = JoiningRules(NO_TEST, False, False, False)


def compiled_cells(
    model: SimulatedModel,
    policy: CellPolicy,
    offered: Offered,
    seconds: NDArray[np.float64],
    *,
    sla_s: float | None = None,
    overhead: Overhead,
) -> CompiledCells | str:
    """Return the simulation; or why the compiled loop cannot play it. seconds: as of CellSimulation.

    It plays `cellular` and `lazy` on one worker that does not run ahead, and graphs in which each cell type is one run
    or one node.
    """
    policy.check_cells(model.cells)
    reason = _why_not(model, policy, seconds)
    if reason is not None:
        return reason
    found = shapes_of(model, offered.requests)
    if isinstance(found, str):
        return found
    reason = _why_not_these(found[0], policy)
    if reason is not None:
        return reason
    return CompiledCells(policy, *found, offered, _device(model.cells, policy, seconds, overhead), sla_s)


def _why_not(model: SimulatedModel, policy: CellPolicy, seconds: NDArray[np.float64]) -> str | None:
    """Return why the loop cannot play this policy on these cells, None if it can."""
    largest = max(cell.max_batch for cell in model.cells)
    if seconds.shape[0] != len(model.cells) or seconds.shape[1] <= largest or not (seconds[:, 1:] > 0).all():
        return "a step of some size takes no time, or its time is not known"
    if type(policy) is CellularPolicy:
        return None
    if type(policy) is not LazyPolicy:
        return f"the policy is {policy.name!r}, and the loop knows `cellular` and `lazy`"
    policy.learn_types(model.cells)
    if policy.drops:
        return "the policy refuses requests"
    if policy.cap > min(cell.max_batch for cell in model.cells):
        return "more requests may be in flight than fit into a batch"
    if not (policy.times.base[:, 1:] > 0).all():
        return "the policy does not know the time of some cell beforehand"
    return None


@final
class CompiledCells:
    """One simulation of a cell policy, with the outcome of CellSimulation, many times as fast. See `compiled_cells`.

    The policy object is left as it was, but for its length profiles. sla_s: see Simulation.
    """

    def __init__(
        self, policy: CellPolicy, shapes: Shapes, kinds: Ids, offered: Offered, device: DeviceCosts, sla_s: float | None
    ) -> None:  # fmt: skip
        if sla_s is not None and not (math.isfinite(sla_s) and sla_s > 0):
            raise OptionError(f"an SLA must be a finite time above 0, got {sla_s} s")
        self._policy, self._shapes, self._kinds, self._device = policy, shapes, kinds, device
        self._arrived_s = np.ascontiguousarray(offered.arrived_s, np.float64)
        self.records = Records.of(offered.arrived_s)
        count, num_models = len(kinds), int(shapes.model.max()) + 1
        slots = min(count, policy.cap * num_models) if isinstance(policy, LazyPolicy) else count
        self._flight = _flight(slots, device, self.records)
        self._task = _task(device)
        if isinstance(policy, LazyPolicy) and policy.left.predicted and policy.left.lengths == "conditional":
            self._flight.numbers[line_loop.STALE] = 1
        self._lazy = _lazy(policy, shapes, self._arrived_s + (math.inf if sla_s is None else sla_s))

    def run(self) -> Records:
        """Run to the end."""
        given = (self._shapes, self._kinds, self._task, self._device)
        while play(self._flight, *given, self._lazy, self._arrived_s):
            self._lazy = self._with_new_tables(self._lazy)
        numbers, records = self._flight.numbers, self.records
        if np.isnan(records.finished_s).any():
            raise InvariantError(f"policy {self._policy.name!r} leaves requests unanswered and nothing runs")
        records.steps, records.rows = int(numbers[line_loop.STEPS]), int(numbers[line_loop.ROWS])
        records.busy_s = float(self._flight.seconds[line_loop.BUSY_S])
        return records

    def _with_new_tables(self, lazy: Lazy) -> Lazy:
        """Learn the lengths of the runs that have ended, and return the policy with present tables of lengths."""
        assert isinstance(self._policy, LazyPolicy)
        tables = []
        for i, (_, _, profile) in enumerate(self._policy.left.predicted):
            seen = int(lazy.num_seen[i])
            profile.observe_all(lazy.seen_given[i, :seen], lazy.seen_steps[i, :seen])
            tables.append(profile.table(self._policy.left.quantile))
            lazy.num_seen[i], lazy.stale_at[i] = 0, profile.num_until_stale
            lazy.widths[i] = tables[-1].shape[1]
        shape = [max(sizes) for sizes in zip(*(table.shape for table in tables), strict=True)]
        padded = np.zeros((len(tables), *shape), np.int64)
        for i, table in enumerate(tables):
            padded[i, : table.shape[0], : table.shape[1]] = table
        self._flight.numbers[line_loop.STALE] = 0
        return lazy._replace(tables=padded)


def _why_not_these(shapes: Shapes, policy: CellPolicy) -> str | None:
    """Return why the loop cannot play requests of these shapes, None if it can."""
    if isinstance(policy, LazyPolicy):
        users = [{*shapes.model[used].tolist()} for used in (shapes.steps > 0).T]
        return "several models use one cell type" if any(len(models) > 1 for models in users) else None
    classes = {size_class(count)[0] for count in shapes.parts.tolist()}  # of one class, slots and subgraphs go together
    return None if len(classes) == 1 else "requests have different numbers of runs and nodes"


def _device(
    cells: tuple[CellType, ...], policy: CellPolicy, seconds: NDArray[np.float64], overhead: Overhead
) -> DeviceCosts:
    return DeviceCosts(
        seconds=np.ascontiguousarray(seconds, np.float64), step_s=overhead.step_s, row_s=overhead.row_s,
        turn_s=overhead.turn_s, request_s=overhead.request_s, max_batch=_ids([cell.max_batch for cell in cells]),
        min_batch=_ids([cell.min_batch for cell in cells]), priority=_ids([cell.priority for cell in cells]),
        max_steps=policy.max_steps, budget_s=policy.budget_s,
        num_ahead=BATCHES_AHEAD if policy.budget_s < math.inf else policy.max_steps, watched=policy.watches_requests,
    )  # fmt: skip


def _flight(slots: int, device: DeviceCosts, records: Records) -> Flight:
    types, most = len(device.max_batch), int(device.max_batch.max())
    numbers = np.zeros(line_loop.NUM_NUMBERS, np.int64)
    numbers[[line_loop.REJECTED, line_loop.LINE, line_loop.LAST_IN_LINE]] = NOBODY

    def small() -> Small:
        return np.empty((slots, types), np.int32)

    def ids(count: int) -> Ids:
        return np.zeros(count, np.int64)

    return Flight(
        left=small(), done=small(), waits=small(), following=small(), place=np.empty((slots, types), np.int64),
        parts_left=ids(slots), owner=ids(slots), free=ids(slots), members=ids(slots), first=ids(types),
        last=ids(types), ready=ids(types), passed=ids(types), known=np.full((types, most.bit_length()), np.nan),
        step_s=np.full((types, most + 1), UNKNOWN_S), next_in_line=ids(len(records.arrived_s)), numbers=numbers,
        seconds=np.zeros(line_loop.NUM_SECONDS), started_s=records.started_s, finished_s=records.finished_s,
    )  # fmt: skip


def _task(device: DeviceCosts) -> Task:
    most, types = int(device.max_batch.max()), len(device.max_batch)
    rows = device.max_steps * most
    return Task(
        np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(device.max_steps, np.int64),
        np.empty(device.max_steps), np.empty(most, np.int64), np.empty(most * types, np.int64),
        np.empty(most * types, np.int64),
    )  # fmt: skip


def _lazy(policy: CellPolicy, shapes: Shapes, deadline_s: NDArray[np.float64]) -> Lazy:
    """Return the options of `lazy`; with another policy, nothing that is ever read."""
    types, count = shapes.steps.shape[1], len(deadline_s)
    of_type = np.zeros(types, np.int64)
    for type_id in range(types):
        of_type[type_id] = shapes.model[shapes.steps[:, type_id] > 0].max(initial=0)
    if not isinstance(policy, LazyPolicy):
        none = np.zeros(0, np.int64)
        times = np.zeros((types, 2))
        return Lazy(
            _NO_RULES, 1, False, False, times, times, np.ones(types), of_type, none, none, none, _NONE, none,
            np.zeros((0, 0, 0), np.int64), none, _NONE, _NONE, none, none, deadline_s, np.zeros(0), none,
        )  # fmt: skip
    left, times = policy.left, policy.times.base
    num = len(left.predicted)
    fixed = [profile.fixed(left.share) if left.lengths == "fixed" else 0 for _, _, profile in left.predicted]
    edges = np.zeros((num, max((len(p.edges) for _, _, p in left.predicted), default=0)), np.int64)
    for i, (_, _, profile) in enumerate(left.predicted):
        edges[i, : len(profile.edges)] = profile.edges
    num_models = int(shapes.model.max()) + 1
    return Lazy(
        policy.rules, policy.cap, policy.recent, policy.times.corrects, np.ascontiguousarray(times), times.copy(),
        np.ones(types), of_type, _ids([cell for cell, _, _ in left.predicted]),
        _ids([NOBODY if given is None else given for _, given, _ in left.predicted]), _ids(fixed), edges,
        _ids([len(profile.edges) for _, _, profile in left.predicted]), np.zeros((num, 0, 0), np.int64),
        np.zeros(num, np.int64), np.zeros((num, count), np.int64), np.zeros((num, count), np.int64),
        np.zeros(num, np.int64), np.full(num, count + 1), deadline_s, np.full(count, math.inf),
        np.empty(policy.cap * num_models, np.int64),
    )  # fmt: skip


def _ids(values: list[int]) -> Ids:
    return np.array(values, np.int64)
