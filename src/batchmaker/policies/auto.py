"""The policy that nobody has to choose: who begins by a forecast, what runs by frontiers, costs and who could end now.

Four rules, each of which decides only where it has something to say:

1. Who begins. Where the types of a network follow each other, newcomers make those in flight wait until they have
   caught up. So the longest prefix of the line begins that makes the sum of finish times smaller: of those in flight,
   of itself, and of those who wait behind it. Where requests use several types at once there is nothing to catch up
   with, and all begin.
2. Which of several models goes first: the one that can answer most requests for its time, by the same forecast.
3. Which type of a model: a full batch, then the type of whose frontier the largest share is ready.
4. What that order puts off. Requests that lack nothing but one call of a type run up a debt while they wait for it.
   When it has reached what the call costs all others, it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.cost.profile import CostProfile
from batchmaker.graph.spec import TypeId
from batchmaker.policies.base import Admission, CellPolicy, ReadyView
from batchmaker.policies.cellular import MOST_STEPS
from batchmaker.policies.expectation import ExpectedStepTimes, StepsLeft
from batchmaker.policies.requests import RequestTable, Slots
from batchmaker.policies.slack import Allowed, Situation
from batchmaker.policies.sufficient import full_first, sufficient_order

AT_ONCE: Final = 0.3
"""Share of requests with several types under way from which a model counts as one that uses them at once."""
_LOOKED_AT: Final = 8  # requests in flight, the oldest, of which that is asked
_WEIGHT: Final = 0.05  # of one of them in the share
_CAP: Final = 2
"""Full batches that the requests in flight of a model may make where newcomers have to catch up."""


@compiled
def _count_finishing(
    slots: Slots,
    left: NDArray[np.int64],
    width: NDArray[np.float64],
    is_open: NDArray[np.bool_],
    deadline_s: NDArray[np.float64],
    now_s: float,
    until_s: float,
    counts: NDArray[np.int64],
) -> None:
    """Count, for each type, the requests that one call of it would finish: in row 0 all, in row 1 those whose deadline
    is before `until_s` and not over.

    slots: [requests] in flight. left, width, is_open, deadline_s: see RequestTable. counts: [2, types], written.
    """
    counts[:] = 0
    for i in range(len(slots)):
        slot = slots[i]
        if is_open[slot]:
            continue
        only, num_types = 0, 0
        for type_id in range(left.shape[1]):
            if left[slot, type_id] > 0:
                only = type_id
                num_types += 1
        if num_types == 1 and left[slot, only] <= width[slot, only] + 1e-6:
            counts[0, only] += 1
            if now_s < deadline_s[slot] < until_s:
                counts[1, only] += 1


@final
class AutoPolicy(CellPolicy):
    """As good as the best of the others for any mix of models, as far as that was measured (see docs/policies.md).

    profile: step times and length profiles; without any, they are learnt from the steps that run. max_steps, budget_ms:
    steps and milliseconds of a task while no other type has ready nodes; otherwise a task is one step, so that every
    step is chosen.
    """

    name = "auto"
    watches_requests: ClassVar[bool] = True
    wants_costs: ClassVar[bool] = True
    needs_frontiers: ClassVar[bool] = True
    node_by_node: ClassVar[bool] = True
    ahead_alone: ClassVar[bool] = True

    def __init__(
        self, profile: CostProfile | None = None, *, max_steps: int = MOST_STEPS, budget_ms: float = 0.5
    ) -> None:
        super().__init__(max_steps, budget_ms)
        self._left = StepsLeft("conditional", 0.75, 90.0)
        self._times = ExpectedStepTimes(correct=True, by_size=True)
        self._num_types = 0
        self._cap = 1
        self._at_once: NDArray[np.float64] = np.zeros(1)  # by model
        self._rejected_at = self._valued_at = -1
        self._worth: list[float] = [0.0]  # by model
        self._counts = np.zeros((2, 0), np.int64)
        self._debt_s: NDArray[np.float64] = np.zeros(0)
        self._ranked_s = 0.0
        none = RequestTable()
        _count_finishing(  # compiled now, and not while a request waits
            none.in_flight, none.left, none.width, none.open, none.deadline_s, 0.0, 0.0, self._counts
        )
        if profile is not None:
            self.use_profile(profile)

    def use_profile(self, profile: CostProfile) -> None:
        """Take step times and length profiles from here."""
        self._left.use(profile)
        self._times.use(profile)
        self._num_types = 0

    def step_finished(self, type_id: TypeId, batch: int, seconds: float) -> None:
        self._times.step_finished(type_id, batch, seconds)

    def request_finished(self, view: ReadyView, slot: int) -> None:
        self._left.request_finished(view.requests, slot)

    def _learn_types(self, view: ReadyView) -> None:
        """Make room for cell types and models that are new."""
        cells, num_models = view.cells, view.requests.num_models
        if len(cells) != self._num_types:
            self._num_types = len(cells)
            self._left.learn_types(cells)
            self._times.learn_types(cells)
            self._cap = _CAP * min(cell.max_batch for cell in cells)
            self._counts, self._debt_s = np.zeros((2, len(cells)), np.int64), np.zeros(len(cells))
        if len(self._at_once) < num_models:
            self._at_once = np.concatenate((self._at_once, np.zeros(num_models - len(self._at_once))))

    # --- what runs -----------------------------------------------------------------------------------------------

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        """Rank the types of the model that is worth most first, and among them those that are owed a call."""
        ready = view.ready
        if len(ready) < 2:
            return ready
        self._learn_types(view)
        order, table = sufficient_order(view), view.requests
        if table.num_models > 1:
            self._value_models(table)
            order.sort(key=lambda type_id: -self._worth[table.type_model[type_id]])  # stable: the order within a model
            model = table.type_model[order[0]]
            count = sum(table.type_model[type_id] == model for type_id in order)
            return [*self._owed_first(view, full_first(view, order[:count])), *order[count:]]
        return self._owed_first(view, full_first(view, order))

    def _owed_first(self, view: ReadyView, order: Sequence[TypeId]) -> Sequence[TypeId]:
        """Return the order with that type first whose call is owed to requests that it would finish, if any is.

        It is owed at once to those that would be in time now, and perhaps not after another task like the last.
        """
        table, single_s = view.requests, self._times.single_s
        passed_s, self._ranked_s = view.now_s - self._ranked_s, view.now_s
        self._debt_s += self._counts[0] * passed_s
        self._debt_s[self._counts[0] == 0] = 0.0
        slots = table.in_flight
        until_s = view.now_s + passed_s + float(single_s.max(initial=0.0))
        _count_finishing(
            slots, table.left, table.width, table.open, table.deadline_s, view.now_s, until_s, self._counts
        )
        first, most = None, 0.0
        for type_id in order:
            finishing, hurried = self._counts[:, type_id].tolist()
            if finishing:
                costs_s = (len(slots) - finishing) * single_s[type_id]
                if hurried or self._debt_s[type_id] >= costs_s:
                    gain = (finishing + hurried) / max(costs_s, 1e-9)
                    first, most = (type_id, gain) if gain > most else (first, most)
        if first is None:
            return order
        self._debt_s[first] = 0.0
        return [first, *(type_id for type_id in order if type_id != first)]

    def _value_models(self, table: RequestTable) -> None:
        """Find what each model is worth: most requests answered per second if it alone went on (Smith's rule)."""
        if table.changes == self._valued_at:
            return
        self._valued_at = table.changes
        self._worth = [0.0] * table.num_models
        slots = table.in_flight
        left, models = self._left.left(table, slots), table.model[slots]
        for model in set(models.tolist()):
            mine = models == model
            width = table.width[slots[mine]]
            together = self._times.replay.forecasts(left[mine], int(mine.sum()), None if (width == 1).all() else width)
            finish_s = np.sort(together.finish_s[0])
            self._worth[model] = float((np.arange(1, len(finish_s) + 1) / np.maximum(finish_s, 1e-9)).max())

    # --- who begins ----------------------------------------------------------------------------------------------

    def admit(self, view: ReadyView) -> Admission:
        """Begin, of each model, the longest prefix of its line that makes the sum of finish times smaller; all of the
        line where requests use several types at once."""
        table = view.requests
        self._learn_types(view)
        in_flight = table.in_flight
        if len(in_flight):
            self._see_types_at_once(table, in_flight[:_LOOKED_AT])
        if table.changes == self._rejected_at:
            return Admission(())
        line = view.waiting(view.num_waiting)
        begin: list[int] = []
        if table.num_models < 2:
            begin = self._of_model(view, 0, in_flight, line)
        else:
            models, coming = table.model[in_flight], table.model[line]
            for model in dict.fromkeys(coming.tolist()):
                begin += self._of_model(view, model, in_flight[models == model], line[coming == model])
        self._rejected_at = -1 if begin else table.changes
        return Admission(begin)

    def _see_types_at_once(self, table: RequestTable, slots: Slots) -> None:
        """Learn whether requests of a model are in the middle of several types at once."""
        under_way = ((table.done[slots] > 0) & (table.left[slots] > 0)).sum(axis=1) > 1
        for model, several in zip(table.model[slots].tolist(), under_way.tolist(), strict=True):
            self._at_once[model] += _WEIGHT * (several - self._at_once[model])

    def _of_model(self, view: ReadyView, model: int, in_flight: Slots, line: Slots) -> list[int]:
        """Return who of one model's line begins. in_flight: of that model; if nobody is, the first in line begins."""
        if self._at_once[model] > AT_ONCE:
            return list(line.tolist())
        first: list[int] = []
        if not len(in_flight):
            first, in_flight, line = line[:1].tolist(), line[:1], line[1:]
        candidates = line[: max(self._cap - len(in_flight), 0)]
        if not len(candidates):
            return first
        slots = np.concatenate((in_flight, candidates))
        boundary = Situation(
            view.requests, self._left, self._times.replay, view.now_s, slots, len(in_flight), ends_apart=True
        )
        allowed = _worthwhile(boundary, len(line))
        if np.isfinite(boundary.deadline_s).any():
            allowed = _in_time(boundary, allowed)
        allowed[0] = True
        return [*first, *candidates[: int(np.flatnonzero(allowed)[-1])].tolist()]


def _worthwhile(situation: Situation, num_waiting: int) -> Allowed:
    """Return which prefixes of the candidates make the sum of finish times smaller by joining now.

    All who wait behind a prefix gain as well, where computing it together with those in flight takes less time in all.
    """
    s = situation
    later_s = ((s.together.finish_s - s.apart_s) * s.counts).sum(axis=1)
    num_behind = num_waiting - np.arange(s.num_candidates + 1)
    saved_s = np.maximum(s.apart_drain_s - s.together.drain_s, 0.0)
    worthwhile: Allowed = later_s <= num_behind * saved_s + 1e-12
    return worthwhile


def _in_time(situation: Situation, worthwhile: Allowed) -> Allowed:
    """Return which prefixes leave fewer late by joining now, or as many and are worthwhile."""
    s = situation
    together = ((s.together.finish_s > s.deadline_s) & s.counts).sum(axis=1)
    apart = ((s.apart_s > s.deadline_s) & s.counts).sum(axis=1)
    fewer: Allowed = (together < apart) | ((together == apart) & worthwhile)
    return fewer
