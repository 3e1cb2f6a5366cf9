"""The policy that nobody has to choose.

Who begins: where requests repeat one part of their network, a newcomer is in the next batch at once, and all begin.
So it is in a chain, a tree, a lattice and a tagger: types that a request was in the middle of at once are one part, a
single call is none, and a full batch has to take at most half as long as its rows one by one. Elsewhere newcomers
make those in flight wait until they have caught up. So as many of the first in line begin as step times forecast to
be best: with the fewest late, then the smallest sum of finish times, of the groups with which all are done as soon as
with the longest that is worth it. At most two full batches of each type are in flight then, and who cannot be in time
even alone stands behind those of its priority who can. What runs: of several models the one that can answer most
requests for its time; of its types a full batch, of several the one furthest on (with the smallest ready share of its
frontier), or else the type with the largest ready share. Before these goes a call that is all that some requests
lack, once they have waited for it, in sum, as long as it makes all others wait, or if one of them would be late after
another task. Where all requests of the only model decide by values, nothing is known beyond what is ready: a full batch
runs, or else the type of which a node has been ready longest; and all begin if they have loops, otherwise when those in
flight are done, but for chunks of sequences, which come for as long as these are open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, Literal, final

import numpy as np

from batchmaker.cost.latency import HIGHEST, LOWEST, WEIGHT, corrected
from batchmaker.cost.profile import CostProfile
from batchmaker.errors import OptionError
from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.base import Admission, CellPolicy, Coming, ReadyView
from batchmaker.policies.beginning import (
    DEFER,
    DROP,
    IGNORE,
    AutoTables,
    all_meet,
    are_hopeless,
    num_candidates,
    who_begins,
)
from batchmaker.policies.cellular import BUDGET_MS, MOST_STEPS
from batchmaker.policies.expectation import ExpectedStepTimes
from batchmaker.policies.order import LONGEST_READY
from batchmaker.policies.requests import RequestTable
from batchmaker.policies.run_lengths import RunLengths
from batchmaker.policies.type_order import count_chains, type_order, value_models

_FULL_BATCHES: Final = 2
"""So many begin at once of requests of which only what is ready is known."""
_HOPELESS: Final = {"defer": DEFER, "ignore": IGNORE, "drop": DROP}


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
    order: ClassVar[int] = LONGEST_READY
    watches_requests: ClassVar[bool] = True
    wants_costs: ClassVar[bool] = True
    needs_frontiers: ClassVar[bool] = True
    node_by_node: ClassVar[bool] = True
    weighs_tasks: ClassVar[bool] = True
    ranks_one: ClassVar[bool] = False
    fills_workers: ClassVar[bool] = True
    leaves_lone: ClassVar[bool] = True

    def __init__(
        self,
        profile: CostProfile | None = None,
        *,
        hopeless: Literal["defer", "ignore", "drop"] = "defer",
        max_steps: int = MOST_STEPS,
        budget_ms: float = BUDGET_MS,
    ) -> None:
        if hopeless not in _HOPELESS:
            raise OptionError(f"policy 'auto': hopeless must be defer, ignore or drop, got {hopeless!r}")
        super().__init__(max_steps, budget_ms)
        self._hopeless = _HOPELESS[hopeless]
        self._lengths = RunLengths()
        self._times = ExpectedStepTimes(correct=True, by_size=True)
        self._rejected_at = self._valued_at = -1
        self._num_types = 0
        self._repeats, self._part, self._worth = np.zeros(0, np.bool_), np.zeros(0, np.int64), np.zeros(1)
        self._make_room(())
        self._met_with, self._meet = self._times.replay, False
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
        return self._hopeless == DROP

    def times(self, cells: Sequence[CellType]) -> ExpectedStepTimes:
        """Return what it expects of the steps of these cells, for a simulation that decides by itself."""
        self._learn_cells(cells)
        return self._times

    def tables(self, table: RequestTable) -> AutoTables:
        """Return what it knows after runs that were noted have been learnt from. table: of requests of one model."""
        if table.stopping_types or self._lengths.predicted_types:
            self._lengths.requests_finished(table, ())
            self._lengths.learn()
        return self._tables(table)

    @property
    def is_learning(self) -> bool:
        """Whether some lengths are expected that no profile told: so who begins is not known for long."""
        return bool(self._lengths.learnt)

    def _tables(self, table: RequestTable) -> AutoTables:
        if table.has_deadlines:
            self._stops[:] = False
            self._stops[list(table.stopping_types - self._lengths.predicted_types)] = True
        return AutoTables(
            table.has_deadlines,
            self._hopeless,
            self._repeats,
            self._part,
            self._stops,
            self._max_batch,
            table.type_model,
            self._num_ready,
            self._independent,
            self._since,
            self._finishing,
            self._debt_s,
            self._ranked_s,
            self._worth,
            self._lengths.expected,
            self._lengths.ended,
        )

    def step_finished(self, type_id: TypeId, batch: int, seconds: float) -> None:
        self._times.step_finished(type_id, batch, seconds)

    def requests_finished(self, view: ReadyView, slots: Sequence[int]) -> None:
        if not (self._lengths.predicted_types or view.kinds.stopping_types):
            return
        self._learn_types(view)
        if self._num_types > 1 or not self.begins_on_arrival(view):
            self._lengths.requests_finished(view.requests, slots)

    def _compile(self) -> None:
        """Call every loop once."""
        none = RequestTable()
        slots, columns, seconds, tables = none.in_flight, none.columns, self._times.replay.seconds, self._tables(none)
        count_chains(slots, slots, none.left, none.width, self._independent)
        num_candidates(slots, 0, slots, columns, tables, seconds)
        who_begins(slots, 0, slots, columns, tables, seconds, 0.0)
        are_hopeless(slots, columns, tables, seconds, 0.0)
        all_meet(0, tables, seconds)
        value_models(slots, columns, tables, seconds, 0.0)
        type_order(slots, 0, slots, columns, tables, seconds, 0.0)
        self._lengths.requests_finished(none, ())
        corrected(1.0, 1.0, 1.0, WEIGHT, LOWEST, HIGHEST)

    def _make_room(self, cells: Sequence[CellType]) -> None:
        """Make room for these cell types. What is known of parts stays."""
        self._num_types, before = (num := len(cells)), len(self._part)
        self._num_ready, self._independent = np.ones(num, np.int64), np.ones(num, np.int64)
        self._max_batch = np.array([cell.max_batch for cell in cells], np.int64)
        self._since = np.zeros(num, np.int64)
        self._finishing, self._debt_s, self._ranked_s = np.zeros(num, np.int64), np.zeros(num), np.zeros(1)
        self._stops = np.zeros(num, np.bool_)
        self._repeats = np.append(self._repeats, np.zeros(num - before, np.bool_))
        self._part = np.append(self._part, np.arange(before, num))

    def _learn_types(self, view: ReadyView) -> None:
        """Make room for cell types and models that are new."""
        self._learn_cells(view.cells)
        if len(self._worth) < view.kinds.num_models:
            self._worth, self._valued_at = np.zeros(view.kinds.num_models), -1

    def _learn_cells(self, cells: Sequence[CellType]) -> None:
        """Make room for cell types that are new."""
        if len(cells) != self._num_types:
            self._make_room(cells)
            self._lengths.learn_types(cells)
            self._times.learn_types(cells)

    def is_asked(self, view: ReadyView) -> bool:
        return len(view.cells) > 1 and not self._forecasts_nothing(view)

    def _forecasts_nothing(self, view: ReadyView) -> bool:
        """Whether nothing is known beyond what is ready, because all requests of the only model decide by values.

        Then the type goes first of which a node has been ready longest: requests that are at the same place stay
        together if nobody overtakes. All begin if they meet others again and again, in loops. Otherwise newcomers
        would follow at every place in batches of their own; so they begin when those in flight are done.
        """
        kinds = view.kinds
        return kinds.decide == {True} and kinds.num_models == 1 and not kinds.has_deadlines

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        """Rank the types of the model that is worth most first, and among them those that are owed a call."""
        ready = view.ready
        if len(ready) < 2:
            self.not_asked(view)
            return ready
        self._learn_types(view)
        requests, tables, seconds = view.requests, self._tables(view.requests), self._times.replay.seconds
        in_flight, columns = requests.in_flight, requests.columns
        if requests.num_models > 1 and requests.changes != self._valued_at:
            self._valued_at = requests.changes
            value_models(in_flight, columns, tables, seconds, view.now_s)
        some_decide = True in requests.decide
        for type_id in ready:
            self._num_ready[type_id] = view.num_ready(type_id)
            self._since[type_id] = view.ready_since(type_id) if some_decide else 0
        types = np.array(ready, np.int64)
        in_chains = requests.run_types.issuperset(ready) and count_chains(
            types, in_flight, requests.left, requests.width, self._independent
        )
        if not in_chains:
            for type_id in ready:
                self._independent[type_id] = view.frontiers.independent(type_id)
        order: list[TypeId] = type_order(
            types, view.num_waiting, in_flight, columns, tables, seconds, view.now_s
        ).tolist()
        return order

    def lets_go_on(self, request: Coming) -> bool:
        return request.sequence is not None and request.deadline_s is None

    def not_asked(self, view: ReadyView) -> None:
        self._ranked_s[0], self._finishing[:] = view.now_s, 0  # nobody waits for another type

    def begins_together(self, view: ReadyView) -> int | None:
        if not self._forecasts_nothing(view) or view.kinds.repeat:
            return None
        self._learn_types(view)
        return _FULL_BATCHES * int(self._max_batch.max())

    def begins_on_arrival(self, view: ReadyView) -> bool:
        """Whether all begin, and there is nothing to learn from that: of runs of one type, without deadlines."""
        if self._forecasts_nothing(view):
            return view.kinds.repeat or not view.num_in_cohort
        self._learn_types(view)
        kinds = view.kinds
        if self._num_types != 1 or kinds.has_deadlines or self._lengths.predicted_types or 0 not in kinds.run_types:
            return False
        if self._met_with is not self._times.replay or not self._repeats[0]:
            self._met_with, self._repeats[0] = self._times.replay, True
            self._meet = all_meet(0, self._tables(RequestTable()), self._met_with.seconds)
        return self._meet

    def admit(self, view: ReadyView) -> Admission:
        """Let those begin who may. Nobody is asked again before somebody comes or goes, unless lengths are learnt."""
        self._learn_types(view)
        if self._forecasts_nothing(view):
            begins = view.kinds.repeat or not view.num_in_cohort
            return Admission(view.waiting(_FULL_BATCHES * int(self._max_batch.max())).tolist() if begins else ())
        requests, refused = view.requests, list[int]()
        is_known = requests.changes == self._rejected_at
        if is_known and not self.drops:
            return Admission(())
        in_flight, columns, tables = requests.in_flight, requests.columns, self._tables(requests)
        seconds, num_waiting = self._times.replay.seconds, view.num_waiting
        looked_at = num_candidates(view.waiting(1), num_waiting, in_flight, columns, tables, seconds)
        line = view.waiting(looked_at)
        if self.drops and len(line):
            hopeless = are_hopeless(line, columns, tables, seconds, view.now_s)
            line, refused = line[~hopeless], line[hopeless].tolist()
        if is_known:
            return Admission((), refused)
        begin: list[int] = who_begins(line, num_waiting, in_flight, columns, tables, seconds, view.now_s).tolist()
        self._rejected_at = -1 if begin or self.is_learning else requests.changes
        return Admission(begin, refused)
