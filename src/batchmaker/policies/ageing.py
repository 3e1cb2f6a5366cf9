"""Ageing: what is passed over too often in a row goes first, whatever the policy. So nothing starves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from batchmaker.graph.spec import TypeId

PATIENCE: Final = 1000
"""How often in a row a cell type with ready nodes may be passed over. Far above what the policies' own orders lead to
within one mini-batch (a few hundred: the longest chain), so that it changes no published schedule, and still about a
second of steps of 1 ms."""


@final
class Ageing:
    """Counts, for each cell type, the tasks in a row that others got while it had ready nodes.

    patience: tasks after which a type goes before what the policy prefers.
    """

    __slots__ = ("_passed", "patience")

    def __init__(self, patience: int = PATIENCE) -> None:
        self.patience = patience
        self._passed: dict[TypeId, int] = {}

    def order(self, ranked: Sequence[TypeId]) -> Sequence[TypeId]:
        """Return the policy's order with those first that have waited too long, the longest wait first."""
        overdue = [type_id for type_id in ranked if self._passed.get(type_id, 0) >= self.patience]
        if not overdue:
            return ranked
        overdue.sort(key=lambda type_id: -self._passed[type_id])
        return [*overdue, *(type_id for type_id in ranked if type_id not in overdue)]

    def ran(self, chosen: TypeId, ranked: Sequence[TypeId]) -> None:
        """A task of one type was submitted while all of these had ready nodes."""
        if len(ranked) > 1 or self._passed:
            self._passed = {t: self._passed.get(t, 0) + 1 for t in ranked if t != chosen}
