"""The choice of demands to keep if not all of them can be met together."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Demands = tuple[int, ...]
"""Numbers of demands, ascending. Demand 0 has the largest weight."""


@dataclass(slots=True)
class Trials:
    """Tests whether demands can be met together. num_left: remaining trials, below 0 if more were needed."""

    can_be_met: Callable[[Demands], bool]
    num_left: int

    def __call__(self, demands: Demands) -> bool:
        self.num_left -= 1
        return self.can_be_met(demands)


def heaviest(
    weights: Sequence[float], can_be_met: Callable[[Demands], bool], feasible: Demands, most_trials: int
) -> Demands:
    """Return demands that can be met together, with the largest total weight.

    weights: not negative, descending. can_be_met: True without demands; if it is True for some demands, it is True for
    each subset. feasible: demands that can be met together. After about `most_trials` calls of `can_be_met` the search
    stops. Then the answer is the heavier of two greedy ones, which add demands in order of weight: one starts from
    nothing, the other from `feasible`.
    """
    trials = Trials(can_be_met, most_trials)
    best = _exact(weights, trials)
    if best is not None:
        return best
    everything = tuple(range(len(weights)))
    answers = [
        _filled(start, tuple(demand for demand in everything if demand not in start), can_be_met)
        for start in dict.fromkeys([(), feasible])
    ]
    return max(answers, key=lambda demands: sum(weights[demand] for demand in demands))


def _exact(weights: Sequence[float], trials: Trials) -> Demands | None:
    """Return the heaviest demands, None if no trial is left: Reiter's tree of hitting sets, the lightest first.

    Of every conflict one demand must be dropped. The set with the smallest loss that meets no further conflict is best.
    """
    conflicts: list[Demands] = []
    waiting: list[tuple[float, Demands]] = [(0.0, ())]
    seen: set[Demands] = {()}
    steps = 100 * trials.num_left
    while trials.num_left > 0 and steps > 0:
        steps -= 1
        lost_weight, lost = heapq.heappop(waiting)
        conflict = next((conflict for conflict in conflicts if not set(conflict) & set(lost)), None)
        if conflict is None:
            rest = tuple(demand for demand in range(len(weights)) if demand not in lost)
            if trials(rest):
                return rest
            conflict = _conflict(rest, trials)
            conflicts.append(conflict)
        for demand in conflict:
            more = tuple(sorted((*lost, demand)))
            if more not in seen:
                seen.add(more)
                heapq.heappush(waiting, (lost_weight + weights[demand], more))
    return None


def _conflict(demands: Demands, trials: Trials) -> Demands:
    """Return some of the demands that cannot be met together, but can without any one of them."""
    conflict: Demands = ()
    while not conflict or trials(conflict):
        low, high = 0, len(demands)  # `conflict` and the first `high` cannot be met together; the first `low` can
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if trials((*conflict, *demands[:middle])) else (low, middle)
        conflict, demands = (*conflict, demands[high - 1]), demands[: high - 1]
    return tuple(sorted(conflict))


def _filled(base: Demands, offered: Demands, can_be_met: Callable[[Demands], bool]) -> Demands:
    """Add demands to `base` one after the other and return the result. A group that cannot be met is halved."""
    waiting = [offered]
    while waiting:
        group = waiting.pop()
        if not group:
            continue
        if can_be_met((*base, *group)):
            base = (*base, *group)
        elif len(group) > 1:
            middle = len(group) // 2
            waiting += [group[middle:], group[:middle]]
    return tuple(sorted(base))
