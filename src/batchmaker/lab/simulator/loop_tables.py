"""What the compiled loop of `CompiledCells` keeps, and is given."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Floats, Ints
from batchmaker.policies.beginning import AutoTables
from batchmaker.policies.expectation import ExpectedTimes, Predictions
from batchmaker.policies.joining import JoiningRules

CELLULAR, LAZY, AUTO = range(3)
OVER, NO_ROOM, LEARN = range(3)
"""Why `play` comes back: all is done; a table may lack room for `coming`; the policy must learn from what has run,
lengths where they are STALE, times where they are not corrected any more since CORRECT_EVERY steps."""
(
    NEXT, STEP, STEPS, ROWS, NUM_NEW, CHANGES, REJECTED, FIRST, LAST, IN_FLIGHT, MODELS, SINCE, STALE, WHY,
    NUM_COMING, ADMITTED, IS_LEARNING, NUM_CHOSEN, NUM_RANKED, NUM_NUMBERS,
) = range(20)  # fmt: skip
"""Entries of `numbers`.

NEXT: the next request to arrive. STEP: the next to end of the task that runs. STEPS, ROWS: that were submitted.
NUM_NEW: arrived since a step was submitted. CHANGES, REJECTED: see LazyPolicy. FIRST, LAST: where those who wait are in
`line`. IN_FLIGHT: how many. MODELS: see RequestTable. SINCE: steps since the expected times were made. STALE: 1 if a
table of lengths must be made anew. WHY: as above. NUM_COMING: of `coming`.
ADMITTED: 1 where the policy has said who begins, but not yet which type goes first.
IS_LEARNING: see AutoPolicy. NUM_CHOSEN: of `chosen`. NUM_RANKED: of `order`, 0 if the policy is not asked.
"""
NOW_S, STEP_S, FREE_S, BUSY_S, NUM_SECONDS = range(5)
"""Entries of `seconds`: the present; the begin of the step that ends next; the end of the task; of all steps."""


class DeviceCosts(NamedTuple):
    """seconds: [types, most + 1] of a step. step_s, row_s, turn_s, request_s: see Overhead."""

    seconds: Floats
    step_s: float
    row_s: float
    turn_s: float
    request_s: float


class OfferTables(NamedTuple):
    """What comes. arrived_s, deadline_s, kinds: [requests]; kinds: the form of each. nodes, width: [kinds, types], see
    RequestTable. model: [kinds]."""

    arrived_s: Floats
    deadline_s: Floats
    kinds: Ints
    nodes: Ints
    width: Floats
    model: Ints


class Lazy(NamedTuple):
    """What `lazy` knows.

    - rules, cap, recent: see LazyPolicy. type_model: [types]. predictions: see StepsLeft.
    - seen_given, seen_steps, num_seen, stale_at: [predictions, requests] runs that have ended since the tables were
      made; [predictions] how many; and how many make the table stale.
    """

    rules: JoiningRules
    cap: int
    recent: bool
    type_model: Ints
    predictions: Predictions
    seen_given: Ints
    seen_steps: Ints
    num_seen: Ints
    stale_at: Ints


class LoopTables(NamedTuple):
    """What the loop itself keeps. line: [requests] slots of those who wait. members: [requests] slots of those in
    flight, in the order in which they began. order: [types] see `choose`. coming: [requests] forms that lack room.
    chosen: [requests] slots of those who are to begin.
    started_s, finished_s: [requests], see Records. never: no flags."""

    numbers: Ints
    seconds: Floats
    line: Ints
    members: Ints
    order: Ints
    coming: Ints
    chosen: Ints
    started_s: Floats
    finished_s: Floats
    never: NDArray[np.bool_]


class Policy(NamedTuple):
    """Who decides: `how` is CELLULAR, LAZY or AUTO. Only what this policy knows is ever read."""

    how: int
    times: ExpectedTimes
    lazy: Lazy
    auto: AutoTables
