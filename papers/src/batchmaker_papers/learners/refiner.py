"""Improves a learnt table directly by the number of batches, one state at a time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from math import sqrt
from typing import Final, final

from batchmaker.graph.frontier import Frontier
from batchmaker.policies.learned.encodings import ENCODINGS, Encoding, State
from batchmaker_papers.learners.qlearning import Table

FEWEST: Final = 3
"""The choice in a state is changed only if at least so many mini-batches meet it."""
MOST: Final = 16
"""Mini-batches on which a change is tried."""


@final
class Refiner:
    """A table and the mini-batches for trials of its changes.

    A change is another choice in one state. It is played on up to MOST of the mini-batches that meet the state. It is
    dropped as soon as FEWEST or more of them together need no fewer batches. It is kept if they finally need fewer
    batches by more than chance would explain: the sum of the differences exceeds the root of the sum of their squares.
    """

    def __init__(self, samples: Sequence[Frontier], encoding: Encoding, table: Table, chance: random.Random) -> None:
        self._samples = samples
        self._encode = ENCODINGS[encoding]
        self._chance = chance
        self.table = dict(table)
        self.num_roll_outs = 0
        self._counts = [0] * len(samples)
        self._met: list[Counter[State]] = [Counter() for _ in samples]
        self._stale = set(range(len(samples)))  # not played since the last change of the table

    def refine(self, most_roll_outs: int) -> None:
        """Change the table until no change helps or `most_roll_outs` have been played; frequent states first."""
        improved = True
        while improved:
            improved = False
            for number in sorted(self._stale):
                self._replay(number)
            met: Counter[State] = sum(self._met, Counter())
            for state, _ in met.most_common():
                for choice in sorted(set(state)):
                    if self.num_roll_outs >= most_roll_outs:
                        return
                    improved |= self._try(state, choice)

    def met(self, least: int = 2) -> dict[State, int]:
        """Return the table without states that fewer than `least` mini-batches lead to."""
        for number in sorted(self._stale):
            self._replay(number)
        meet = Counter(state for met in self._met for state in met)
        return {state: choice for state, choice in self.table.items() if meet[state] >= least}

    def _try(self, state: State, choice: int) -> bool:
        before = self.table.get(state)
        meet = [number for number, met in enumerate(self._met) if state in met]
        if before is None or before == choice or len(meet) < FEWEST:
            return False
        tried = self._chance.sample(meet, min(MOST, len(meet)))
        for number in tried:
            if number in self._stale:
                self._replay(number)
        self.table[state] = choice
        gains: list[int] = []
        for number in tried:
            gains.append(self._counts[number] - self._play(number)[0])
            if len(gains) >= FEWEST and sum(gains) <= 0:
                break
        if sum(gains) <= sqrt(sum(gain * gain for gain in gains)):
            self.table[state] = before
            return False
        self._stale.update(meet)
        return True

    def _replay(self, number: int) -> None:
        self._counts[number], self._met[number] = self._play(number)
        self._stale.discard(number)

    def _play(self, number: int) -> tuple[int, Counter[State]]:
        """Return the number of batches with the table, and the states on the way."""
        frontier, encode, table = self._samples[number], self._encode, self.table
        self.num_roll_outs += 1
        met: list[State] = []
        frontier.reset()
        while frontier.num_left:
            state = encode([len(nodes) for nodes in frontier.ready])
            choice = table.get(state)
            met.append(state)
            frontier.run(frontier.nearest_to_sufficient() if choice is None else choice)
        return len(met), Counter(met)
