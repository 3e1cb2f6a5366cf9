"""The policy that nobody has to choose: who begins by a forecast, what runs by frontiers, costs and who could end now.

Four rules, each of which decides only where it has something to say:

1. Who begins. Where the types of a network follow each other, newcomers make those in flight wait until they have
   caught up. So a prefix of the line begins, of all that are worth it the best, by a forecast of finish times (see
   `num_beginning`). Where requests use several types at once, or are runs of one type whose batches gain much, there
   is nothing to catch up with, and all begin. Who cannot be in time stands behind those who can.
2. Which of several models goes first: the one that can answer most requests for its time, by the same forecast. Who
   cannot be in time counts only where no request of the model can, and that model stands behind the others.
3. Which type of a model: a full batch, of several that of the type of whose frontier the smallest share is ready: it
   is further on in the network, and ends requests sooner. Then the type of whose frontier the largest share is ready.
4. What that order puts off. Requests that lack nothing but one call of a type run up a debt while they wait for it.
   When it has reached five times what the call costs all others, it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.cost.latency import HIGHEST, LOWEST, WEIGHT, corrected
from batchmaker.cost.profile import CostProfile
from batchmaker.errors import OptionError
from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.base import Admission, CellPolicy, ReadyView
from batchmaker.policies.cellular import BUDGET_MS, MOST_STEPS
from batchmaker.policies.expectation import ExpectedStepTimes
from batchmaker.policies.joining import most_answered_rps, num_beginning
from batchmaker.policies.requests import RequestTable, Slots
from batchmaker.policies.run_lengths import EndedRuns, ExpectedLengths, RunLengths, run_steps_left
from batchmaker.policies.type_order import count_chains, type_order

AT_ONCE: Final = 0.3
"""Share of requests with several types under way from which a model counts as one that uses them at once."""
LOOKED_AT: Final = 8  # requests in flight, the oldest, of which that is asked
_MANY: Final = 1 / 3  # of a request's types
_LEVELS: Final = 2.0  # nodes a step, in several steps, from which they are the levels of a tree
_WEIGHT: Final = 0.05  # of one of them in the share
_GAIN: Final = 2.0  # times as long as a full batch, at least, that its rows take one by one
_CAP: Final = 2
"""Full batches of each type that the requests in flight of a model may make where newcomers have to catch up.

Fewer than one of each type cannot all be full: room that comes back request by request is taken by small groups, and
each of them goes through all types alone.
"""
_HOPELESS: Final = 1e-9  # of its worth is left to a model none of whose requests can be in time
_ANY: Final = 1 << 62  # requests: more than there are
_DEFERRED_FOR: Final = 10.0
"""After its deadline, a request waits behind others for at most so many times the time that it was given."""
Ids = NDArray[np.int64]
Seconds = NDArray[np.float64]


@compiled
def see_types_at_once(slots: Slots, left: Ids, done: Ids, width: Seconds, model: Ids, at_once: Seconds) -> None:
    """Learn whether requests of a model are in the middle of several types at once, and these are many of its types.

    Two directions of one layer of many are few. The levels of a tree do not count: they follow each other as layers do,
    also where nodes are of several types. slots: of requests, left, done, width and model as in RequestTable. at_once:
    [models] the share of such requests lately, written.
    """
    for i in range(len(slots)):
        slot, num_types, under_way = slots[i], 0, 0
        for type_id in range(left.shape[1]):
            nodes, rows = left[slot, type_id] + done[slot, type_id], width[slot, type_id]
            are_levels = rows >= _LEVELS and nodes > rows
            num_types += int(nodes > 0)
            under_way += int(left[slot, type_id] > 0 and done[slot, type_id] > 0 and not are_levels)
        several = under_way > 1 and under_way >= _MANY * num_types
        at_once[model[slot]] += _WEIGHT * ((1.0 if several else 0.0) - at_once[model[slot]])


@compiled
def _leave_out_ends(left: Ids, done: Ids) -> None:
    """Leave out a single call at the very end of a request that has several nodes of another type as well.

    It does not wait for requests that reach it later. left: [requests, types] steps, written. done: nodes.
    """
    for request in range(left.shape[0]):
        last, most = -1, 0
        for type_id in range(left.shape[1] - 1, -1, -1):
            if last < 0 and left[request, type_id] > 0:
                last = type_id
            else:
                most = max(most, left[request, type_id] + done[request, type_id])
        if last >= 0 and left[request, last] == 1 and most > 1:
            left[request, last] = 0


@compiled
def _num_worth(
    left: Ids, slots: Slots, done: Ids, width: Seconds, deadline_s: Seconds, now_s: float, seconds: Seconds,
    num_in_flight: int, num_waiting: int,
) -> int:  # fmt: skip
    """Return how many of those in line begin (see `num_beginning`), from the rows of the request table.

    left: [slots, types] steps, written. slots: of those in flight, then of the candidates. done, width, deadline_s: see
    RequestTable. seconds: [types, max_batch + 1] of a step.
    """
    num, num_types = left.shape
    so_far, due_s = np.empty((num, num_types), np.int64), np.empty(num)
    rows, is_alike = np.empty((num, num_types)), True
    for i in range(num):
        slot = slots[i]
        due_s[i] = deadline_s[slot] - now_s
        for type_id in range(num_types):
            so_far[i, type_id], rows[i, type_id] = done[slot, type_id], width[slot, type_id]
            is_alike = is_alike and rows[i, type_id] == 1.0
    _leave_out_ends(left, so_far)
    return num_beginning(left, np.empty((0, 0)) if is_alike else rows, num_in_flight, seconds, due_s, num_waiting)


@compiled
def num_of_line(
    line: Slots, in_flight: Slots, num_waiting: int, cap: int, left: Ids, done: Ids, width: Seconds,
    is_open: NDArray[np.bool_], deadline_s: Seconds, now_s: float, seconds: Seconds, lengths: ExpectedLengths,
) -> int:  # fmt: skip
    """Return how many of one model's line begin by the forecast; if nobody is in flight, at least the first.

    in_flight, num_waiting: of that model. line: the first of those who wait. cap: of its requests in flight. For the
    columns see RequestTable. seconds: [types, max_batch + 1] of a step.
    """
    first = 0 if len(in_flight) > 0 else min(len(line), 1)
    present = len(in_flight) + first
    num = min(len(line) - first, max(cap - present, 0))
    if num == 0:
        return first
    slots = np.concatenate((in_flight, line[: first + num]))
    steps = run_steps_left(slots, left, done, width, is_open, lengths)
    return first + _num_worth(
        steps, slots, done, width, deadline_s, now_s, seconds, present, num_waiting - first
    )  # fmt: skip


@compiled
def are_hopeless(
    slots: Slots, left: Ids, done: Ids, width: Seconds, is_open: NDArray[np.bool_], deadline_s: Seconds,
    arrived_s: Seconds, stops: NDArray[np.bool_], lengths: ExpectedLengths, single_s: Seconds, now_s: float,
    defers: bool,
) -> NDArray[np.bool_]:  # fmt: skip
    """Return which of these requests cannot be in time even alone: [slots].

    A run that a value may end at any time counts one step: those of the types in `stops`, [types]. defers: leave out
    those who have waited `_DEFERRED_FOR` times what they were given. single_s: [types] of a step of one row.
    """
    steps, hopeless = run_steps_left(slots, left, done, width, is_open, lengths), np.empty(len(slots), np.bool_)
    for i in range(len(slots)):
        due_s, alone_s = deadline_s[slots[i]], 0.0
        for type_id in range(len(single_s)):
            alone_s += single_s[type_id] * (min(steps[i, type_id], 1) if stops[type_id] else steps[i, type_id])
        hopeless[i] = now_s + alone_s > due_s
        if defers:
            hopeless[i] &= now_s - due_s < _DEFERRED_FOR * (due_s - arrived_s[slots[i]])
    return hopeless


def _behind_their_equals(line: Slots, hopeless: NDArray[np.bool_], priority: Slots) -> Slots:
    """Return the line with the hopeless behind the others of their priority. Each priority keeps its places."""
    ordered = np.empty_like(line)
    ordered[np.argsort(-priority, kind="stable")] = line[np.lexsort((hopeless, -priority))]
    return ordered


class AutoTables(NamedTuple):
    """What `auto` knows of one model with several types, for compiled loops.

    cap: of requests in flight. has_deadlines: of RequestTable. ignores: hopeless requests. has_learnt: lengths that
    runs have shown. at_once, worth: [1]. stops, max_batch, type_model, num_ready, independent, finishing, debt_s:
    [types], see `are_hopeless` and `type_order`. lengths, ended: see RunLengths.
    """

    cap: int
    has_deadlines: bool
    ignores: bool
    has_learnt: bool
    at_once: Seconds
    worth: Seconds
    stops: NDArray[np.bool_]
    max_batch: Ids
    type_model: Ids
    num_ready: Ids
    independent: Ids
    finishing: Ids
    debt_s: Seconds
    lengths: ExpectedLengths
    ended: EndedRuns


@final
class AutoPolicy(CellPolicy):
    """For any mix of models. How near it comes to the best other policy of each is measured in docs/policies.md.

    - profile: step times and length profiles; without any, they are learnt from the steps that run.
    - max_steps, budget_ms: the most steps and milliseconds of a task. It has as many as its own cost is worth
      (`weighs_tasks` of CellPolicy).
    - hopeless: what becomes of a waiting request that cannot be in time even alone: it stands behind those who can
      ("defer"), is computed as any other ("ignore") or refused ("drop"). A deferred one gets its place in the line back
      ten times what it was given after its deadline.
    """

    name = "auto"
    watches_requests: ClassVar[bool] = True
    wants_costs: ClassVar[bool] = True
    needs_frontiers: ClassVar[bool] = True
    node_by_node: ClassVar[bool] = True
    weighs_tasks: ClassVar[bool] = True
    fills_workers: ClassVar[bool] = True

    def __init__(
        self,
        profile: CostProfile | None = None,
        *,
        hopeless: Literal["defer", "ignore", "drop"] = "defer",
        max_steps: int = MOST_STEPS,
        budget_ms: float = BUDGET_MS,
    ) -> None:
        if hopeless not in ("defer", "ignore", "drop"):
            raise OptionError(f"policy 'auto': hopeless must be defer, ignore or drop, got {hopeless!r}")
        super().__init__(max_steps, budget_ms)
        self._hopeless = hopeless
        self._lengths = RunLengths()
        self._times = ExpectedStepTimes(correct=True, by_size=True)
        self._num_types = 0
        self._smallest = self._largest = 1
        self._at_once: Seconds = np.zeros(1)  # by model
        self._rejected_at = self._valued_at = -1
        self._worth: Seconds = np.zeros(1)  # by model
        self._make_room(())
        self._ranked_s, self._has_ranked = 0.0, False
        self._gains_with, self._gaining = self._times.replay, list[bool]()
        if profile is not None:
            self.use_profile(profile)

    @classmethod
    def prepare(cls) -> None:
        AutoPolicy()._compile()

    def use_profile(self, profile: CostProfile) -> None:
        """Take step times and length profiles from here."""
        self._lengths.use(profile)
        self._times.use(profile)
        self._num_types = 0

    @property
    def drops(self) -> bool:
        """Whether hopeless requests are refused."""
        return self._hopeless == "drop"

    def times(self, cells: Sequence[CellType]) -> ExpectedStepTimes:
        """Return what it expects of the steps of these cells, for a simulation that decides by itself."""
        self._learn_cells(cells)
        return self._times

    def tables(self, table: RequestTable) -> AutoTables:
        """Return what it knows after runs that were noted have been learnt from. table: of requests of one model."""
        if table.stopping_types or self._lengths.told:
            self._lengths.requests_finished(table, ())
            self._lengths.learn()
        return AutoTables(
            self._cap(self._all), table.has_deadlines, self._hopeless == "ignore", bool(self._lengths.learnt),
            self._at_once, self._worth, self._stops(table), self._max_batch, table.type_model, self._num_ready,
            self._independent, self._finishing, self._debt_s, self._lengths.expected, self._lengths.ended,
        )  # fmt: skip

    def step_finished(self, type_id: TypeId, batch: int, seconds: float) -> None:
        self._times.step_finished(type_id, batch, seconds)

    def requests_finished(self, view: ReadyView, slots: Sequence[int]) -> None:
        if not (self._lengths.told or view.kinds.stopping_types):
            return
        self._learn_types(view)
        if self._num_types > 1 or not self.begins_on_arrival(view):
            self._lengths.requests_finished(view.requests, slots)

    def _compile(self) -> None:
        """Call every loop once."""
        none = RequestTable()
        slots = none.in_flight
        count_chains(slots, none.left, none.width, self._independent)
        self._ordered(slots, none, 0.0)
        see_types_at_once(slots, none.left, none.done, none.width, none.model, self._at_once)
        num_of_line(
            slots, slots, 0, 0, none.left, none.done, none.width, none.open, none.deadline_s, 0.0,
            self._times.replay.seconds, self._lengths.expected,
        )  # fmt: skip
        are_hopeless(
            slots, none.left, none.done, none.width, none.open, none.deadline_s, none.arrived_s, self._stops(none),
            self._lengths.expected, self._times.single_s, 0.0, True,
        )  # fmt: skip
        most_answered_rps(none.left[slots], none.width[slots], self._times.replay.seconds)
        self._lengths.requests_finished(none, ())
        corrected(1.0, 1.0, 1.0, WEIGHT, LOWEST, HIGHEST)

    def _make_room(self, cells: Sequence[CellType]) -> None:
        """Make room for these cell types."""
        self._num_types = num = len(cells)
        self._num_ready, self._independent = np.ones(num, np.int64), np.ones(num, np.int64)
        self._max_batch = np.array([cell.max_batch for cell in cells], np.int64)
        self._finishing, self._debt_s = np.zeros(num, np.int64), np.zeros(num)
        self._all = np.arange(num)  # types

    def _learn_types(self, view: ReadyView) -> None:
        """Make room for cell types and models that are new."""
        self._learn_cells(view.cells)
        num_models = view.kinds.num_models
        if len(self._at_once) < num_models:
            more = np.zeros(num_models - len(self._at_once))
            self._at_once, self._worth = np.concatenate((self._at_once, more)), np.zeros(num_models)

    def _learn_cells(self, cells: Sequence[CellType]) -> None:
        """Make room for cell types that are new."""
        if len(cells) != self._num_types:
            self._make_room(cells)
            self._lengths.learn_types(cells)
            self._times.learn_types(cells)
            sizes = [cell.max_batch for cell in cells]
            self._smallest, self._largest = min(sizes), max(sizes)

    # --- what runs -----------------------------------------------------------------------------------------------

    def is_asked(self, num_types: int) -> bool:
        return num_types > 1

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        """Rank the types of the model that is worth most first, and among them those that are owed a call."""
        ready = view.ready
        if len(ready) < 2:  # nobody waits for another type
            self._ranked_s = view.now_s
            if self._has_ranked:
                self._finishing[:], self._debt_s[:], self._has_ranked = 0, 0.0, False
            return ready
        self._learn_types(view)
        table = view.requests
        if table.num_models > 1:
            self._value_models(table, view.now_s)
        for type_id in ready:
            self._num_ready[type_id] = view.num_ready(type_id)
        in_chains = table.run_types.issuperset(ready) and count_chains(
            table.in_flight, table.left, table.width, self._independent
        )
        if not in_chains:
            for type_id in ready:
                self._independent[type_id] = view.frontiers.independent(type_id)
        order: list[TypeId] = self._ordered(np.array(ready, np.int64), table, view.now_s).tolist()
        return order

    def _ordered(self, ready: Ids, table: RequestTable, now_s: float) -> Ids:
        passed_s, self._ranked_s, self._has_ranked = now_s - self._ranked_s, now_s, True
        return type_order(
            ready, self._num_ready, self._independent, self._max_batch, table.type_model, self._worth, table.in_flight,
            table.left, table.width, table.open, table.deadline_s, now_s, passed_s, self._times.single_s,
            self._finishing, self._debt_s,
        )  # fmt: skip

    def _value_models(self, table: RequestTable, now_s: float) -> None:
        """Find what each model is worth: most requests answered per second if it alone went on (Smith's rule).

        Who cannot be in time counts only where no request of the model can. Found anew when a request comes or goes.
        """
        if table.changes == self._valued_at:
            return
        self._valued_at = table.changes
        self._worth = np.zeros(table.num_models)
        slots = table.in_flight
        left, models = self._lengths.left(table, slots), table.model[slots]
        hopeless = self._are_hopeless(table, slots, now_s)
        for model in set(models.tolist()):
            mine = models == model
            timely = mine & ~hopeless
            counted, share = (timely, 1.0) if timely.any() else (mine, _HOPELESS)
            rps = most_answered_rps(left[counted], table.width[slots[counted]], self._times.replay.seconds)
            self._worth[model] = share * rps

    # --- who begins ----------------------------------------------------------------------------------------------

    def begins_on_arrival(self, view: ReadyView) -> bool:
        """Whether all begin, by rule 1, and there is nothing to learn from that."""
        self._learn_types(view)
        kinds = view.kinds
        if self._num_types != 1 or kinds.has_deadlines or self._lengths.told:
            return False
        return 0 in kinds.run_types and self._gains(TypeId(0))

    def admit(self, view: ReadyView) -> Admission:
        """Begin, of each model, the best prefix of its line (see `num_beginning`), or all of it (rule 1 above)."""
        table = view.requests
        self._learn_types(view)
        in_flight = table.in_flight
        for model in range(table.num_models if len(in_flight) and self._num_types > 1 else 0):
            mine = in_flight if table.num_models < 2 else in_flight[table.model[in_flight] == model]
            see_types_at_once(mine[:LOOKED_AT], table.left, table.done, table.width, table.model, self._at_once)
        if table.changes == self._rejected_at and self._hopeless != "drop":
            return Admission(())
        num_waiting = view.num_waiting
        if table.num_models < 2 and not table.has_deadlines:
            num_waiting = min(num_waiting, self._room(table, 0, len(in_flight)))
        line, refused = self._in_time_first(view, view.waiting(num_waiting))
        if table.changes == self._rejected_at or not len(line):
            return Admission((), refused)
        begin: list[int] = []
        if table.num_models < 2:
            begin = self._of_model(view, 0, in_flight, line, view.num_waiting)
        else:
            models, coming = table.model[in_flight], table.model[line]
            for model in dict.fromkeys(coming.tolist()):
                theirs = line[coming == model]
                begin += self._of_model(view, model, in_flight[models == model], theirs, len(theirs))
        self._rejected_at = -1 if begin or self._lengths.learnt else table.changes
        return Admission(begin, refused)

    def _in_time_first(self, view: ReadyView, line: Slots) -> tuple[Slots, list[int]]:
        """Return the line, with those who cannot be in time even alone behind the others of their priority; and who is
        refused."""
        table = view.requests
        hopeless = self._are_hopeless(table, line, view.now_s)
        if not hopeless.any():
            return line, []
        if self._hopeless == "drop":
            return line[~hopeless], line[hopeless].tolist()
        return _behind_their_equals(line, hopeless, table.priority[line]), []

    def _are_hopeless(self, table: RequestTable, slots: Slots, now_s: float) -> NDArray[np.bool_]:
        """Return which of these requests cannot be in time even alone: [slots].

        Under `ignore` none of them; under `defer` not those who have waited `_DEFERRED_FOR` times what they were given.
        """
        if self._hopeless == "ignore" or not table.has_deadlines:
            return np.zeros(len(slots), np.bool_)
        return are_hopeless(
            slots, table.left, table.done, table.width, table.open, table.deadline_s, table.arrived_s,
            self._stops(table), self._lengths.expected, self._times.single_s, now_s, self._hopeless == "defer",
        )  # fmt: skip

    def _stops(self, table: RequestTable) -> NDArray[np.bool_]:
        """Return the types whose runs a value may end at any time: [types]. Where a profile told lengths it knows."""
        stops = np.zeros(self._num_types, np.bool_)
        stops[list(table.stopping_types - self._lengths.told)] = True
        return stops

    def _gains(self, type_id: TypeId) -> bool:
        """Whether full batches of this type gain so much that nobody needs a forecast to join."""
        if self._gains_with is not self._times.replay:
            self._gains_with, most = self._times.replay, self._max_batch
            seconds = self._gains_with.seconds
            self._gaining = (_GAIN * seconds[self._all, most] <= most * seconds[:, 1]).tolist()
        return self._gaining[type_id]

    def _types(self, table: RequestTable, model: int) -> Ids:
        """Return the types of a model."""
        return self._all if table.num_models < 2 or self._num_types == 1 else np.flatnonzero(table.type_model == model)

    def _room(self, table: RequestTable, model: int, num_in_flight: int) -> int:
        """Return how many requests of a model may begin at most where none has a deadline."""
        if not self._num_types or self._at_once[model] > AT_ONCE:
            return _ANY
        types = self._types(table, model)
        if len(types) == 1 and types[0] in table.run_types and self._gains(types[0]):
            return _ANY
        return max(self._cap(types) - num_in_flight, 0)

    def _cap(self, types: Ids) -> int:
        """Return how many requests that use these types are in flight at most where newcomers have to catch up."""
        smallest = self._smallest if types is self._all else int(self._max_batch[types].min(initial=self._largest))
        return _CAP * smallest * max(len(types), 1)

    def _of_model(self, view: ReadyView, model: int, in_flight: Slots, line: Slots, num_waiting: int) -> list[int]:
        """Return who of one model's line begins; if nobody is in flight, at least the first.

        in_flight, num_waiting: of that model. line: the first of those who wait.
        """
        if not self._num_types or self._at_once[model] > AT_ONCE:
            return list(line.tolist())
        first: list[int] = []
        if not len(in_flight):
            first, in_flight, line = line[:1].tolist(), line[:1], line[1:]
        table = view.requests
        types = self._types(table, model)
        candidates = line[: max(self._cap(types) - len(in_flight), 0)]
        if len(types) == 1 and self._gains(types[0]):
            begin = line if types[0] in table.run_types else candidates
            if not (table.has_deadlines and (table.deadline_s[np.concatenate((in_flight, begin))] < np.inf).any()):
                return [*first, *begin.tolist()]
        return [*first, *line[: self._num_of_line(view, in_flight, line, num_waiting - len(first), types)].tolist()]

    def _num_of_line(self, view: ReadyView, in_flight: Slots, line: Slots, num_waiting: int, types: Ids) -> int:
        table = view.requests
        return num_of_line(
            line, in_flight, num_waiting, self._cap(types), table.left, table.done, table.width, table.open,
            table.deadline_s, view.now_s, self._times.replay.seconds, self._lengths.expected,
        )  # fmt: skip
