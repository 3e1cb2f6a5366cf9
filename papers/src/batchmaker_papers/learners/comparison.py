"""The number of batches of each policy on the same closed mini-batches, beside the lower bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import final

from batchmaker.graph.bound import lower_bound
from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import MiniBatch
from batchmaker.policies.agenda import AgendaPolicy, AgendaRemainingPolicy
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.depth import DepthPolicy
from batchmaker.policies.learned.encodings import Encoding
from batchmaker.policies.learned.policy import TablePolicy
from batchmaker.policies.sufficient import SufficientPolicy
from batchmaker_papers.learners.mini_batch import check_schedule, play, turned_back
from batchmaker_papers.learners.qlearning import Table
from batchmaker_papers.learners.view import ClosedView


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """Means over mini-batches. decision_us: microseconds that one choice takes, with what is kept for the policy alone:
    the median of the mini-batches' means. What frontiers cost to keep is not in it; all policies share them."""

    policy: str
    mean_batches: float
    lower_bound: float
    decision_us: float


def compare(
    mini_batches: Sequence[MiniBatch], tables: Mapping[Encoding, Table], max_batch: int | None = None
) -> list[Standing]:
    """Return the standing of every baseline and learnt table.

    Every schedule is checked: InvariantError if one does not compute each node once, after its sources.
    """
    bound = fmean(lower_bound(mini_batch, max_batch) for mini_batch in mini_batches)
    policies: dict[str, CellPolicy] = {
        "depth": DepthPolicy(),
        "agenda": AgendaPolicy(),
        "agenda-remaining": AgendaRemainingPolicy(),
        "heuristic-forward": SufficientPolicy(),
        "heuristic-backward": SufficientPolicy(),
    }
    policies |= {f"e_{encoding}": TablePolicy(encoding, table) for encoding, table in tables.items()}
    standings = []
    for name, policy in policies.items():
        counts, each_us = [], []
        for mini_batch in mini_batches:
            backward = name == "heuristic-backward"
            view = ClosedView(policy, Frontier(mini_batch.turned if backward else mini_batch))
            batches = play(view, max_batch)
            if backward:
                batches = turned_back(batches, len(mini_batch))
            check_schedule(mini_batch, batches)
            counts.append(len(batches))
            each_us.append(1e6 * view.seconds / len(batches))
        standings.append(Standing(name, fmean(counts), bound, median(each_us)))
    return standings
