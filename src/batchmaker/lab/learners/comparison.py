"""The number of batches of each policy on the same closed mini-batches, beside the lower bound."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import final

from batchmaker.graph.bound import lower_bound
from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import MiniBatch
from batchmaker.lab.learners.closed import check_schedule, schedule, schedule_from_sinks
from batchmaker.lab.learners.qlearning import Table
from batchmaker.lab.learners.rules import AgendaRule, DepthRule, Rule, SufficientRule, TableRule
from batchmaker.policies.learned.encodings import Encoding


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """Means over mini-batches.

    decision_us: microseconds of one choice, including the data that the rule alone keeps: the median of the
    mini-batches' means. The cost of frontiers is not included, because all rules share them.
    """

    policy: str
    mean_batches: float
    lower_bound: float
    decision_us: float


@final
class _TimedSchedule(Rule):
    """A rule whose choices are timed. one_depth is the rule's."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.one_depth = rule.one_depth
        self.seconds = 0.0

    def begin(self, mini_batch: MiniBatch) -> None:
        self._rule.begin(mini_batch)

    def choose(self, frontier: Frontier) -> int:
        began_s = time.perf_counter()
        chosen = self._rule.choose(frontier)
        self.seconds += time.perf_counter() - began_s
        return chosen

    def ran(self, type_id: int, nodes: Sequence[int]) -> None:
        began_s = time.perf_counter()
        self._rule.ran(type_id, nodes)
        self.seconds += time.perf_counter() - began_s


def compare(
    mini_batches: Sequence[MiniBatch], tables: Mapping[Encoding, Table], max_batch: int | None = None
) -> list[Standing]:
    """Return the standing of every baseline and learnt table.

    Every schedule is checked: InvariantError if one does not compute each node once, after its sources.
    """
    bound = fmean(lower_bound(mini_batch, max_batch) for mini_batch in mini_batches)
    rules: dict[str, Rule] = {
        "depth": DepthRule(),
        "agenda": AgendaRule(remaining=False),
        "agenda-remaining": AgendaRule(remaining=True),
        "heuristic-forward": SufficientRule(),
        "heuristic-backward": SufficientRule(),
    }
    rules |= {f"e_{encoding}": TableRule(encoding, table) for encoding, table in tables.items()}
    standings = []
    for name, rule in rules.items():
        counts, each_us = [], []
        for mini_batch in mini_batches:
            timed = _TimedSchedule(rule)
            if name == "heuristic-backward":
                batches = schedule_from_sinks(mini_batch, timed, max_batch)
            else:
                batches = schedule(Frontier(mini_batch), timed, max_batch)
            check_schedule(mini_batch, batches)
            counts.append(len(batches))
            each_us.append(1e6 * timed.seconds / len(batches))
        standings.append(Standing(name, fmean(counts), bound, median(each_us)))
    return standings
