"""Rules for the next cell type of a closed mini-batch: ED-Batch's baselines, its condition, and learnt tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import MiniBatch
from batchmaker.policies.learned.encodings import ENCODINGS, Encoding, State


class Rule(ABC):
    """Chooses among the types with ready nodes.

    one_depth: a batch holds only nodes of the lowest depth of its type. The live policies of the same names make the
    same choices while no batch is full (`policies.agenda`, `policies.depth`, `policies.sufficient`).
    """

    one_depth: bool = False

    def begin(self, mini_batch: MiniBatch) -> None:  # noqa: B027
        """Begin a mini-batch."""

    @abstractmethod
    def choose(self, frontier: Frontier) -> int:
        """Return a type with ready nodes; there is at least one."""

    def ran(self, type_id: int, nodes: Sequence[int]) -> None:  # noqa: B027
        """Note that these nodes have run."""


@final
class DepthRule(Rule):
    """The type with the least deep ready node (TensorFlow Fold); ties go to the lower type id."""

    one_depth: bool = True

    def begin(self, mini_batch: MiniBatch) -> None:
        self._depths: list[int] = mini_batch.depths.tolist()

    def choose(self, frontier: Frontier) -> int:
        depths = self._depths
        return min((min(depths[node] for node in nodes), kind) for kind, nodes in enumerate(frontier.ready) if nodes)[1]


@final
class AgendaRule(Rule):
    """The type of the lowest mean depth; ties go to the lower type id.

    remaining: over the nodes that have not run (ED-Batch's agenda), otherwise over all of them, once (DyNet).
    """

    def __init__(self, *, remaining: bool) -> None:
        self._remaining = remaining

    def begin(self, mini_batch: MiniBatch) -> None:
        self._depths: list[int] = mini_batch.depths.tolist()
        self._counts: list[int] = np.bincount(mini_batch.types, minlength=mini_batch.num_types).tolist()
        sums = np.bincount(mini_batch.types, weights=mini_batch.depths, minlength=mini_batch.num_types)
        self._sums: list[float] = sums.tolist()

    def choose(self, frontier: Frontier) -> int:
        sums, counts = self._sums, self._counts
        return min((sums[kind] / counts[kind], kind) for kind, nodes in enumerate(frontier.ready) if nodes)[1]

    def ran(self, type_id: int, nodes: Sequence[int]) -> None:
        if self._remaining:
            self._counts[type_id] -= len(nodes)
            self._sums[type_id] -= sum([self._depths[node] for node in nodes])


@final
class SufficientRule(Rule):
    """The type nearest to the sufficient condition for a best order (Lemma 1): the highest ready / independent.

    Ties go to the type with more ready nodes and then to the lower type id, as in `policies.sufficient`.
    """

    def choose(self, frontier: Frontier) -> int:
        return nearest_to_sufficient(frontier)


@final
class TableRule(Rule):
    """The table's choice for the state; in an unknown state, the choice of SufficientRule."""

    def __init__(self, encoding: Encoding, table: Mapping[State, int]) -> None:
        self._encode = ENCODINGS[encoding]
        self._table = table

    def choose(self, frontier: Frontier) -> int:
        chosen = self._table.get(self._encode([len(nodes) for nodes in frontier.ready]))
        return nearest_to_sufficient(frontier) if chosen is None else chosen


def nearest_to_sufficient(frontier: Frontier) -> int:
    """Return the choice of SufficientRule."""
    independent = frontier.independent
    return max(
        (len(nodes) / independent[kind], len(nodes), -kind, kind) for kind, nodes in enumerate(frontier.ready) if nodes
    )[3]
