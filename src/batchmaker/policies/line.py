"""A line of requests that wait: by priority, then by arrival."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, islice
from typing import Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")


@final
class WaitingLine(Generic[Item]):
    """Numbers with what belongs to each, the highest priority first, in order of arrival within a priority."""

    __slots__ = ("_items", "_priority")

    def __init__(self) -> None:
        self._items: dict[int, OrderedDict[int, Item]] = {}  # priority -> number -> item
        self._priority: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, number: int) -> bool:
        return number in self._priority

    def join(self, number: int, item: Item, priority: int) -> None:
        """Put a request at the end of its priority."""
        if priority not in self._items:
            self._items[priority] = OrderedDict()
            self._items = dict(sorted(self._items.items(), reverse=True))
        self._items[priority][number] = item
        self._priority[number] = priority

    def leave(self, number: int) -> Item:
        """Take a request out, wherever it stands; return what belongs to it."""
        priority = self._priority.pop(number)
        items = self._items[priority]
        item = items.pop(number)
        if not items:
            del self._items[priority]
        return item

    def first(self, limit: int) -> NDArray[np.int64]:
        """Return the numbers of the first `limit` requests."""
        if len(self._items) == 1:
            (only,) = self._items.values()
            return np.fromiter(islice(only, limit), np.int64, min(limit, len(only)))
        return np.fromiter(islice(chain.from_iterable(self._items.values()), limit), np.int64)

    def oldest(self) -> list[Item]:
        """Return what belongs to the first request of each priority."""
        return [next(iter(items.values())) for items in self._items.values()]
