"""Ageing: what was passed over too often goes first, whatever the policy and priorities say. So nothing starves."""

from __future__ import annotations

from typing import Final, final

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled

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


@compiled
def overdue_first(ranked: Ints, passed: Ints, patience: int) -> Ints:
    """Return types in the policy's order, but first those that were passed over too often, the longest wait first.

    passed: [types] for each cell type, the tasks of other types in a row while it had ready nodes. patience: after so
    many it goes before the policy's choice.
    """
    order = ranked.copy()
    for i in range(1, len(order)):
        one = order[i]
        waited = passed[one] if passed[one] >= patience else 0
        k = i
        while k > 0 and waited > (passed[order[k - 1]] if passed[order[k - 1]] >= patience else 0):
            order[k] = order[k - 1]
            k -= 1
        order[k] = one
    return order


@compiled
def note_ran(passed: Ints, ready: Ints, chosen: int) -> None:
    """Count once more all ready types but the chosen one, and the others anew from 0. passed: [types], written."""
    for type_id in range(len(passed)):
        is_passed = False
        for i in range(len(ready)):
            is_passed |= ready[i] == type_id and type_id != chosen
        passed[type_id] = passed[type_id] + 1 if is_passed else 0
