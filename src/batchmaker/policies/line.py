"""A line of waiting requests: by priority, then by arrival, and one of eight by arrival alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.policies.ageing import AGED_EVERY, AgeTurns

Item = TypeVar("Item")


@final
class WaitingLine(Generic[Item]):
    """Numbers with their items: the highest priority first, in order of arrival within a priority.

    aged_every: one of so many that begin is the one that has waited longest, whatever its priority; None: none is.
    Those that leave the line for another reason than to begin do not count.
    """

    __slots__ = ("_items", "_numbers", "_only", "_order", "_turns")

    def __init__(self, aged_every: int | None = AGED_EVERY) -> None:
        self._items: OrderedDict[int, tuple[int, Item]] = OrderedDict()  # number -> priority and item, by arrival
        # Priority -> numbers, by arrival. Empty for as long as all in the line have one priority, `_only`.
        self._numbers: dict[int, OrderedDict[int, None]] = {}
        self._only = 0
        self._order: list[int] = []  # minus the priorities in `_numbers`, ascending
        self._turns = AgeTurns(aged_every)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, number: int) -> bool:
        return number in self._items

    def __reversed__(self) -> Iterator[Item]:
        """Iterate over the items, from the one that came last. Nobody may join or leave meanwhile."""
        return (item for _, item in reversed(self._items.values()))

    def join(self, number: int, item: Item, priority: int) -> None:
        """Put a request at the end of its priority."""
        self.join_all(((number, item, priority),))

    def join_all(self, waiting: Sequence[tuple[int, Item, int]]) -> None:
        """Put requests at the end of their priorities, in order: (number, item, priority) of each."""
        for number, item, priority in waiting:
            if self._numbers or (self._items and priority != self._only):
                self._join_others(number, priority)
            else:
                self._only = priority
            self._items[number] = priority, item

    def _join_others(self, number: int, priority: int) -> None:
        if not self._numbers:
            self._numbers, self._order = {self._only: OrderedDict.fromkeys(self._items)}, [-self._only]
        numbers = self._numbers.get(priority)
        if numbers is None:
            numbers = self._numbers[priority] = OrderedDict()
            insort(self._order, -priority)
        numbers[number] = None

    def leave(self, number: int) -> Item:
        """Take a request out at any position, which does not begin; return its item."""
        priority, item = self._items.pop(number)
        if self._numbers:
            numbers = self._numbers[priority]
            del numbers[number]
            if not numbers:
                del self._numbers[priority], self._order[bisect_left(self._order, -priority)]
        return item

    def begin(self, numbers: Sequence[int]) -> list[Item]:
        """Take requests out at any positions, which begin; return their items, in the order of the numbers."""
        if not self._numbers:
            return [self._items.pop(number)[1] for number in numbers]
        begun: list[Item] = []
        for number in numbers:
            if number == next(iter(self._items)):
                self._turns.had_turn()
            else:
                self._turns.passed_over()
            begun.append(self.leave(number))
        return begun

    def take(self, limit: int) -> list[Item]:
        """Let the first `limit` requests begin; return their items, in order."""
        if not self._numbers:
            return [self._items.popitem(last=False)[1][1] for _ in range(min(limit, len(self._items)))]
        return self.begin(self.first(limit).tolist())

    def first(self, limit: int) -> NDArray[np.int64]:
        """Return the numbers of the first `limit` requests, in the order in which they are to begin."""
        if len(self._order) < 2:
            return np.fromiter(islice(self._items, limit), np.int64, min(limit, len(self._items)))
        return np.fromiter(islice(self._in_turn(), limit), np.int64)

    def oldest(self) -> Item:
        """Return the item of the request that has waited longest. The line must not be empty."""
        return next(iter(self._items.values()))[1]

    def _in_turn(self) -> Iterator[int]:
        """Yield the numbers in the order in which they begin if nobody joins or leaves meanwhile."""
        turns, gone = self._turns.copy(), set[int]()
        by_age = (number for number in self._items if number not in gone)
        by_rank = chain.from_iterable(self._numbers[-minus] for minus in self._order)
        by_priority = (number for number in by_rank if number not in gone)
        oldest = next(by_age, None)
        while oldest is not None:
            number = oldest if turns.is_due else next(by_priority)
            gone.add(number)
            yield number
            if number == oldest:
                turns.had_turn()
                oldest = next(by_age, None)
            else:
                turns.passed_over()
