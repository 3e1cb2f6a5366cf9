"""Ageing: what was passed over too often goes first, whatever the policy and priorities say. So nothing starves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from batchmaker.graph.spec import TypeId

PATIENCE: Final = 1000
"""How often in a row a cell type with ready nodes may be passed over.

The policies' own orders pass a type over at most a few hundred times within one mini-batch (the longest chain), so this
limit changes no published schedule. It is about a second of steps of 1 ms.
"""


AGED_EVERY: Final = 8
"""One turn of so many goes to whoever has waited longest, whatever its priority.

So nobody waits longer than AGED_EVERY times as long as with equal priorities, and where a higher priority fills every
turn it loses an eighth of them. In a batch with room for all, and with equal priorities, nobody loses anything.
"""


@final
class AgeTurns:
    """Says when it is the turn of whoever has waited longest, at one place where priorities decide who goes first.

    every: one turn of so many, of those in which somebody is passed over; None: never, so priorities are strict.
    """

    __slots__ = ("_every", "_passed")

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._passed = 0

    @property
    def is_due(self) -> bool:
        """Whether the next turn is the oldest's."""
        return self._every is not None and self._passed >= self._every - 1

    def passed_over(self) -> None:
        """Note a turn in which a higher priority went first while a lower one waited."""
        self._passed += 1

    def had_turn(self) -> None:
        """Note that the oldest had its turn."""
        self._passed = 0

    def copy(self) -> AgeTurns:
        """Return one that goes on by itself from here."""
        copied = AgeTurns(self._every)
        copied._passed = self._passed
        return copied


@final
class Ageing:
    """Counts, for each cell type, the tasks of other types in a row while it had ready nodes.

    patience: after so many tasks the type goes before the policy's choice.
    """

    __slots__ = ("_passed", "patience")

    def __init__(self, patience: int = PATIENCE) -> None:
        self.patience = patience
        self._passed: dict[TypeId, int] = {}

    def order(self, ranked: Sequence[TypeId]) -> Sequence[TypeId]:
        """Return the policy's order with the types first that have waited too long, the longest wait first."""
        overdue = [type_id for type_id in ranked if self._passed.get(type_id, 0) >= self.patience]
        if not overdue:
            return ranked
        overdue.sort(key=lambda type_id: -self._passed[type_id])
        return [*overdue, *(type_id for type_id in ranked if type_id not in overdue)]

    def ran(self, chosen: TypeId, ranked: Sequence[TypeId]) -> None:
        """Note that a task of one type was submitted while all these types had ready nodes."""
        if len(ranked) > 1 or self._passed:
            self._passed = {t: self._passed.get(t, 0) + 1 for t in ranked if t != chosen}
