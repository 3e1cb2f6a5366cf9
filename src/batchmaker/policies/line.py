"""A line of waiting requests: by priority, then by arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, islice
from typing import Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")


@final
class WaitingLine(Generic[Item]):
    """Numbers with their items: the highest priority first, in order of arrival within a priority."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: dict[int, OrderedDict[int, Item]] = {}  # priority -> number -> item

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __contains__(self, number: int) -> bool:
        return any(number in items for items in self._items.values())

    def join(self, number: int, item: Item, priority: int) -> None:
        """Put a request at the end of its priority."""
        items = self._items.get(priority)
        if items is None:
            items = self._items[priority] = OrderedDict()
            self._items = dict(sorted(self._items.items(), reverse=True))
        items[number] = item

    def leave(self, number: int) -> Item:
        """Take a request out at any position; return its item."""
        for priority, items in self._items.items():
            if number in items:
                item = items.pop(number)
                if not items:
                    del self._items[priority]
                return item
        raise KeyError(number)

    def leave_together(self, numbers: Sequence[int]) -> list[Item]:
        """Take requests out at any positions; return their items, in the order of the numbers."""
        if len(self._items) != 1:
            return [self.leave(number) for number in numbers]
        ((priority, items),) = self._items.items()
        taken = [items.pop(number) for number in numbers]
        if not items:
            del self._items[priority]
        return taken

    def take(self, limit: int) -> list[Item]:
        """Take the first `limit` requests out; return their items, in order."""
        taken: list[Item] = []
        for priority, items in list(self._items.items()):
            taken += [items.popitem(last=False)[1] for _ in range(min(limit - len(taken), len(items)))]
            if items:
                break
            del self._items[priority]
        return taken

    def first(self, limit: int) -> NDArray[np.int64]:
        """Return the numbers of the first `limit` requests."""
        if len(self._items) == 1:
            (only,) = self._items.values()
            return np.fromiter(islice(only, limit), np.int64, min(limit, len(only)))
        return np.fromiter(islice(chain.from_iterable(self._items.values()), limit), np.int64)

    def oldest(self) -> list[Item]:
        """Return the item of the first request of each priority."""
        return [next(iter(items.values())) for items in self._items.values()]
