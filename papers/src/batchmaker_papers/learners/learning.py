"""From requests to a table: mini-batches, learners, roll-outs on held-out mini-batches, and the best table."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from batchmaker.errors import DataError
from batchmaker.graph.bound import lower_bound
from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import MiniBatch, merged
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.learned.policy import TablePolicy
from batchmaker_papers.learners.mini_batch import num_batches
from batchmaker_papers.learners.qlearning import Learner, Settings, Table
from batchmaker_papers.learners.refiner import Refiner

TO_LEARN: Final = 32
"""Mini-batches to learn from."""
SHARES: Final = (1, 1, 1, 2)
"""Their sizes: the batch size divided by these numbers, in turn."""
HELD_OUT: Final = 12
"""Mini-batches of the batch size for the comparison of tables."""

Progress = Callable[[int, float], None]
"""(episodes played, the best table's batches / lower bound so far)."""


@final
@dataclass(frozen=True, slots=True)
class RollOut:
    """A table played without random choices: batches / lower bound on the held-out mini-batches."""

    learner: int
    episode: int
    ratio: float


@final
@dataclass(frozen=True, slots=True)
class Learnt:
    """The best table found.

    ratio: its batches / lower bound on the held-out mini-batches. curve: all roll-outs. seconds: processor time of
    learning, without making the graphs.
    """

    settings: Settings
    table: Table
    ratio: float
    curve: tuple[RollOut, ...]
    seconds: float


@final
class Samples:
    """Mini-batches drawn from requests: some to learn from, others, of the batch size, held out for comparison.

    Raises DataError if there are fewer requests than one batch takes.
    """

    def __init__(self, requests: Sequence[MiniBatch], batch: int, seed: int) -> None:
        if len(requests) < batch:
            raise DataError(
                f"got {len(requests)} requests to learn from, expected at least one batch of {batch}; give more of "
                "them or a smaller batch"
            )
        chance = random.Random(seed)
        sizes = [max(1, batch // SHARES[i % len(SHARES)]) for i in range(TO_LEARN)]
        self.to_learn = [Frontier(merged(chance.sample(requests, size))) for size in sizes]
        self.held_out = [Frontier(merged(chance.sample(requests, batch))) for _ in range(HELD_OUT)]
        self.bound = sum(lower_bound(frontier.mini_batch) for frontier in self.held_out)

    def ratio(self, policy: CellPolicy) -> float:
        """Return batches / lower bound of a policy on the mini-batches held out."""
        return sum(num_batches(frontier, policy) for frontier in self.held_out) / self.bound


def learn(samples: Samples, settings: Settings, progress: Progress | None = None) -> Learnt:
    """Return the best table, by roll-outs on held-out mini-batches.

    Ends when all learners have played their episodes, or a roll-out reaches the lower bound. The same samples and
    settings give the same table.
    """
    began_s = time.process_time()
    chance = random.Random(settings.seed)
    best: Table = {}
    best_ratio = float("inf")
    curve: list[RollOut] = []
    for number in range(settings.learners):
        learner = Learner(settings, random.Random(chance.getrandbits(32)))
        for episode in range(1, settings.episodes + 1):
            learner.play(chance.choice(samples.to_learn))
            if episode % settings.every and episode < settings.episodes:
                continue
            table = learner.table()
            ratio = samples.ratio(TablePolicy(settings.encoding, table))
            curve.append(RollOut(number, episode, ratio))
            if ratio < best_ratio:
                best, best_ratio = table, ratio
            if progress is not None:
                progress(number * settings.episodes + episode, best_ratio)
            if best_ratio <= 1.0:
                break
        if best_ratio <= 1.0:
            break
    if best_ratio > 1.0 and settings.roll_outs:
        refiner = Refiner(samples.to_learn, settings.encoding, best, chance)
        refiner.refine(settings.roll_outs)
        for table in (refiner.table, refiner.met()):
            ratio = samples.ratio(TablePolicy(settings.encoding, table))
            curve.append(RollOut(settings.learners, 0, ratio))
            if ratio <= best_ratio:
                best, best_ratio = table, ratio
    return Learnt(settings, best, best_ratio, tuple(curve), time.process_time() - began_s)
