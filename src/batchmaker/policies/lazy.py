"""LazyBatching: node-level batching with a test before newcomers may preempt (Choi et al., HPCA 2021, section IV).

The paper's BatchTable is a stack of sub-batches at different nodes. The sub-batch that is furthest behind is on top,
and entries merge when their next nodes are equal. Progress never decreases from top to bottom, so the top is always the
sub-batch that is furthest behind, and all requests at a node belong to one entry. So the stack needs no data of its
own: the requests in flight are its members, and the first cell type with ready nodes is its top. The policy only
decides which requests may join, and when. A request that was refused entry is not tested again before another request
comes, begins or ends: catching up only becomes more expensive while the requests in flight continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, final

import numpy as np

from batchmaker.arrays import Floats, Ints
from batchmaker.compiled import compiled
from batchmaker.cost.profile import CostProfile
from batchmaker.errors import OptionError
from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.base import Admission, CellPolicy, ReadyView
from batchmaker.policies.expectation import (
    NO_PREDICTIONS,
    ExpectedStepTimes,
    Lengths,
    Predictions,
    StepsLeft,
    steps_left,
)
from batchmaker.policies.joining import LITERAL, NO_TEST, OLDEST, REPLAY, JoiningRules, num_joining
from batchmaker.policies.requests import RequestColumns, RequestTable

_SLACK = {"replay": REPLAY, "oldest": OLDEST, "literal": LITERAL, "none": NO_TEST}


@final
class LazyPolicy(CellPolicy):
    """Requests wait in line; at every step the longest prefix of the line joins that is feasible and beneficial.

    - profile: step times and length profiles. Without any, newcomers are judged by the steps so far.
    - slack: `replay` forecasts when each request finishes; `oldest` and `literal` are Equation 2, tested for the oldest
      request in flight or for all; `none` is no test.
    - benefit: also require that the sum of finish times shrinks.
    - estimate: for Equation 2, `sum` adds the times of each request alone (the paper), `table` looks up the common
      batch.
    - lengths: steps of a decoder by the `conditional` quantile `quantile` of the remaining steps; by the `fixed` length
      that `percent` % do not exceed (the paper's dec_timesteps); or `true`, the graph's own. `true` makes it the
      Oracle: it knows the present requests, not later ones.
    - hopeless: a request that would be late in any case is ignored (`ignore`), forbids joining (`veto`), or is refused
      while it waits (`drop`).
    - max_in_flight: most requests of a model in flight, by default the smallest max_batch of the cells, so that merged
      batches fit.
    - stack: which of several models goes first: `slack`, the one with the least slack; or `recent`, that of the newest
      member (the paper's single stack).
    - max_steps: steps per task; newcomers can only join between tasks.

    Attributes for a simulation that decides by itself. rules: who may join. recent, drops: of `stack` and `hopeless`.
    left, times: what is predicted. cap: most requests of a model in flight, once `learn_types` has been called.
    """

    name = "lazy"
    watches_requests: ClassVar[bool] = True
    wants_costs: ClassVar[bool] = True

    __slots__ = (
        "_max_in_flight",
        "_num_types",
        "_rejected_at",
        "cap",
        "drops",
        "recent",
        "rules",
        "steps_left",
        "times",
    )

    def __init__(
        self,
        profile: CostProfile | None = None,
        *,
        slack: Literal["replay", "oldest", "literal", "none"] = "replay",
        benefit: bool = True,
        estimate: Literal["sum", "table"] = "sum",
        lengths: Lengths = "conditional",
        quantile: float = 0.75,
        percent: float = 90.0,
        hopeless: Literal["ignore", "veto", "drop"] = "ignore",
        max_in_flight: int | None = None,
        stack: Literal["slack", "recent"] = "slack",
        max_steps: int = 1,
    ) -> None:
        for option, value, choices in (
            ("slack", slack, ("replay", "oldest", "literal", "none")),
            ("estimate", estimate, ("sum", "table")),
            ("lengths", lengths, ("conditional", "fixed", "true")),
            ("hopeless", hopeless, ("ignore", "veto", "drop")),
            ("stack", stack, ("slack", "recent")),
        ):
            if value not in choices:
                raise OptionError(f"policy 'lazy': {option} must be one of {', '.join(choices)}, got {value!r}")
        if not 0 < quantile < 1 or not 0 < percent <= 100:
            raise OptionError(
                f"policy 'lazy': got quantile {quantile} and percent {percent}; they are 0 to 1 and 0 to 100"
            )
        if max_in_flight is not None and max_in_flight < 1:
            raise OptionError(f"policy 'lazy': max_in_flight must be at least 1, got {max_in_flight}")
        super().__init__(max_steps)
        self._max_in_flight = max_in_flight
        self.rules = JoiningRules(_SLACK[slack], hopeless == "veto", estimate == "table", benefit)
        self.drops = hopeless == "drop"
        self.recent = stack == "recent"
        self.steps_left = StepsLeft(lengths, quantile, percent)
        self.times = ExpectedStepTimes(correct=lengths != "true")
        self._rejected_at: int | None = None
        self._num_types = 0
        self.cap = 1
        if profile is not None:
            self.use_profile(profile)

    def use_profile(self, profile: CostProfile) -> None:
        """Use the step times and length profiles of this profile."""
        self.steps_left.use(profile)
        self.times.use(profile)
        self._num_types = 0

    def is_asked(self, view: ReadyView) -> bool:
        return len(view.cells) > 1

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        """Rank the types with the most urgent model first; within one model all are equal."""
        ready = view.ready
        table = view.requests
        if len(ready) < 2 or table.num_models < 2:
            return ready
        self._learn_new_types(view)
        urgency = self._urgency(table, table.in_flight)
        return sorted(ready, key=lambda type_id: (urgency[int(table.type_model[type_id])], type_id))

    def admit(self, view: ReadyView) -> Admission:
        """Begin the longest prefix of the line that may join; with `hopeless="drop"`, refuse late requests.

        The slack test must allow the prefix. With `benefit` it must also lower the sum of finish times. A request is
        refused if it cannot be in time.
        """
        self._learn_new_types(view)
        table, cap = view.requests, self.cap
        in_flight = table.in_flight
        one_model = table.num_models < 2
        room = cap - len(in_flight) if one_model else cap * table.num_models
        line = view.waiting(cap if self.drops else room)
        refused: Ints = line[:0]
        if self.drops and len(line):
            hopeless = self._hopeless(view, line)
            refused, line = line[hopeless], line[~hopeless]
        candidates = line[: max(room, 0)] if one_model else fitting(table.model, in_flight, line, cap, table.num_models)
        if len(candidates) and table.changes == self._rejected_at:
            candidates = candidates[:0]
        elif len(candidates) and len(in_flight) and (self.rules.benefit or self.rules.slack != NO_TEST):
            candidates = candidates[: self._num_joining(view, table, in_flight, candidates)]
            self._rejected_at = None if len(candidates) else table.changes
        return Admission(candidates.tolist(), refused.tolist())

    def _num_joining(self, view: ReadyView, table: RequestTable, in_flight: Ints, candidates: Ints) -> int:
        return num_joining_of(
            np.concatenate((in_flight, candidates)),
            len(in_flight),
            table.columns,
            self.steps_left.predictions(),
            self.times.replay.seconds,
            view.now_s,
            self.rules,
        )

    def _learn_new_types(self, view: ReadyView) -> None:
        if len(view.cells) != self._num_types:
            self.learn_types(view.cells)

    def learn_types(self, cells: Sequence[CellType]) -> None:
        """Note the cell types that there are."""
        self._num_types = len(cells)
        self.steps_left.learn_types(cells)
        self.times.learn_types(cells)
        self.cap = self._max_in_flight or min(cell.max_batch for cell in cells)

    def step_finished(self, type_id: TypeId, batch: int, seconds: float) -> None:
        self.times.step_finished(type_id, batch, seconds)

    def requests_finished(self, view: ReadyView, slots: Sequence[int]) -> None:
        self.steps_left.requests_finished(view.requests, slots)

    def _hopeless(self, view: ReadyView, slots: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        table = view.requests
        alone_s = self.times.replay.alone(self.steps_left.remaining(table, slots))
        late: np.ndarray[tuple[int], np.dtype[np.bool_]] = view.now_s + alone_s > table.deadline_s[slots]
        return late

    def _urgency(self, table: RequestTable, slots: Ints) -> Floats:
        """Return a number per model. The smallest runs first."""
        return urgencies(
            slots,
            table.columns,
            table.num_models,
            NO_PREDICTIONS if self.recent else self.steps_left.predictions(),
            self.times.replay.seconds,
            self.recent,
        )


@compiled
def num_joining_of(
    slots: Ints,
    num_in_flight: int,
    of: RequestColumns,
    predictions: Predictions,
    seconds: Floats,
    now_s: float,
    rules: JoiningRules,
) -> int:
    """Return how many of those in line join (see `num_joining`), from the columns of the request table, `of`.

    slots: of those in flight, then of the candidates. seconds: [types, max_batch + 1] of a step.
    """
    steps = steps_left(slots, of.left, of.done, of.width, of.is_open, predictions)
    num, num_types = steps.shape
    rows, whole, is_alike = np.empty((num, num_types)), np.empty((num, num_types), np.int64), True
    due_s, slack_s = np.empty(num), np.empty(num)
    for i in range(num):
        slot = slots[i]
        due_s[i] = of.deadline_s[slot] - now_s
        slack_s[i] = of.deadline_s[slot] - min(of.began_s[slot], now_s)
        for type_id in range(num_types):
            rows[i, type_id] = of.width[slot, type_id]
            is_alike = is_alike and rows[i, type_id] == 1.0
            whole[i, type_id] = steps[i, type_id] + int(np.ceil(of.done[slot, type_id] / rows[i, type_id] - 1e-9))
    alike = np.empty((0, 0)) if is_alike else rows
    return num_joining(steps, alike, whole, num_in_flight, seconds, due_s, slack_s, rules)


@compiled
def urgencies(
    slots: Ints,
    of: RequestColumns,
    num_models: int,
    predictions: Predictions,
    seconds: Floats,
    recent: bool,
) -> Floats:
    """Return a number for each model, of its requests in flight: [models]. The smallest goes first.

    of: the columns of the request table. seconds: [types, max_batch + 1] of a step. recent: see LazyPolicy (`stack`).
    """
    keys = np.full(num_models, np.inf)
    steps = steps_left(slots[: 0 if recent else len(slots)], of.left, of.done, of.width, of.is_open, predictions)
    for i in range(len(slots)):
        slot = slots[i]
        key = -of.began_s[slot]
        if not recent:
            alone_s = 0.0
            for type_id in range(steps.shape[1]):
                alone_s += steps[i, type_id] * seconds[type_id, 1]
            key = of.deadline_s[slot] - alone_s
        keys[of.model[slot]] = min(keys[of.model[slot]], key)
    return keys


@compiled
def fitting(model: Ints, in_flight: Ints, line: Ints, cap: int, num_models: int) -> Ints:
    """Return the requests in line whose model has fewer than `cap` requests in flight, in order. model: [slots]."""
    counts, chosen = np.zeros(num_models, np.int64), np.empty(len(line), np.int64)
    for slot in in_flight:
        counts[model[slot]] += 1
    num = 0
    for slot in line:
        if counts[model[slot]] < cap:
            counts[model[slot]] += 1
            chosen[num] = slot
            num += 1
    return chosen[:num]
