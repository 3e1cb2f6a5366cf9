"""Tabular Q-learning of the order of batches, on closed mini-batches (ED-Batch, ICML 2023, 2.3)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from batchmaker.errors import OptionError, unknown_name
from batchmaker.graph.frontier import Frontier
from batchmaker.policies.learned.encodings import ENCODINGS, Encoding, State

Table = Mapping[State, int]


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of learning.

    - encoding: of states.
    - episodes: mini-batches played by each learner.
    - steps: number of rewards in a return (N).
    - alpha: weight of ready / independent in the reward (Equation 1).
    - rate: step of the updates; None for the mean of a pair's returns, which is 1 / its number of updates, but never
      less than `least_rate`.
    - bootstrap: add the best value of the state after the last of the N rewards.
    - epsilon, decay, least_epsilon: a choice is random with probability epsilon * decay^episode, at least
      least_epsilon.
    - every: episodes between two roll-outs.
    - learners: number of independent learners; the best of all their tables is kept.
    - roll_outs: mini-batches played for refining (see `Refiner`), 0 for none.
    - seed: of samples and choices.
    """

    encoding: Encoding = "sort"
    episodes: int = 1000
    steps: int = 10
    alpha: float = 1.0
    rate: float | None = None
    least_rate: float = 0.02
    bootstrap: bool = False
    epsilon: float = 0.5
    decay: float = 0.9
    least_epsilon: float = 0.05
    every: int = 25
    learners: int = 2
    roll_outs: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise unknown_name("encoding", self.encoding, ENCODINGS)
        for name in ("episodes", "steps", "every", "learners"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("epsilon", "decay", "least_epsilon", "least_rate", "rate"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise OptionError(f"{name} must be from 0 to 1, got {value}")


@final
class Learner:
    """One table of values, filled episode by episode.

    The value of a type in a state estimates the next `steps` rewards after choosing it. The reward of a batch is -1 +
    alpha * ready / independent, with the sizes before it runs. Values begin at 0, above every possible return, so
    untried choices look best. Ties go to the lower type id. values: by state, and by type that is ready in it.
    """

    def __init__(self, settings: Settings, chance: random.Random) -> None:
        self._settings = settings
        self._encode = ENCODINGS[settings.encoding]
        self._chance = chance
        self.values: dict[State, dict[int, float]] = {}
        self._updates: dict[State, dict[int, int]] = {}
        self._episode = 0

    def play(self, frontier: Frontier) -> None:
        """Run a mini-batch once from its beginning and learn from it."""
        settings, chance, encode = self._settings, self._chance, self._encode
        epsilon = max(settings.least_epsilon, settings.epsilon * settings.decay**self._episode)
        self._episode += 1
        states: list[State] = []
        choices: list[int] = []
        rewards: list[float] = []
        frontier.reset()
        while frontier.num_left:
            counts = [len(nodes) for nodes in frontier.ready]
            state = encode(counts)
            values = self.values.get(state)
            if values is None:
                values = self.values[state] = {kind: 0.0 for kind, count in enumerate(counts) if count}
                self._updates[state] = dict.fromkeys(values, 0)
            choice = chance.choice(list(values)) if chance.random() < epsilon else _best(values)
            states.append(state)
            choices.append(choice)
            rewards.append(settings.alpha * counts[choice] / frontier.independent[choice] - 1.0)
            frontier.run(choice)
        self._update(states, choices, rewards)

    def table(self) -> dict[State, int]:
        """Return the best type of each state among the types tried in it."""
        table = {}
        for state, values in self.values.items():
            updates = self._updates[state]
            tried = {kind: value for kind, value in values.items() if updates[kind]}
            if tried:
                table[state] = _best(tried)
        return table

    def _update(self, states: Sequence[State], choices: Sequence[int], rewards: Sequence[float]) -> None:
        """Move the values of the choices towards their returns, the last choice first."""
        steps, settings, values = self._settings.steps, self._settings, self.values
        total = 0.0
        for i in range(len(rewards) - 1, -1, -1):
            total += rewards[i]
            if i + steps < len(rewards):
                total -= rewards[i + steps]
            after = max(values[states[i + steps]].values()) if settings.bootstrap and i + steps < len(states) else 0.0
            state, choice = states[i], choices[i]
            self._updates[state][choice] += 1
            rate = settings.rate
            if rate is None:
                rate = max(settings.least_rate, 1.0 / self._updates[state][choice])
            values[state][choice] += rate * (total + after - values[state][choice])


def _best(values: Mapping[int, float]) -> int:
    """Return the type of the highest value. Types are in ascending order; ties go to the first."""
    return max(values, key=values.__getitem__)
