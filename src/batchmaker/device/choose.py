"""Which task comes next: a function of how many entries of each type are ready."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

MANY_STEPS: Final = 8
"""Steps of a task of a type of which one step or node follows another. Others have as many as their nodes fill, or one.
"""


@final
@dataclass(frozen=True, slots=True)
class Ready:
    """A type and what is ready of it. runs: begun ones. nodes: runs that have not begun, and single nodes.

    again: whether one step or node of it follows another. sizes: ascending. priority: see CellType.
    """

    runs: int
    nodes: int
    again: bool
    sizes: tuple[int, ...]
    priority: int

    @property
    def count(self) -> int:
        """Entries that a step can take."""
        return self.runs + self.nodes


@final
@dataclass(frozen=True, slots=True)
class Task:
    """Steps of one type and size. type: its number in the core."""

    type: int
    size: int
    steps: int

    def leaves(self, ready: Ready) -> Ready:
        """Return about what is ready once this has run. Begun runs may have more steps."""
        nodes = max(0, ready.nodes - self.size * self.steps)
        return Ready(ready.runs, nodes, ready.again, ready.sizes, ready.priority)


Choice = Callable[[Sequence[Ready]], Task | None]
"""What is ready of each type -> the task that runs next; None if nothing is ready."""


def fullest(ready: Sequence[Ready]) -> Task | None:
    """Return a task by the rules of Algorithm 1 of BatchMaker: of a type that fills its largest batch, else of any.

    Among several the one with the highest priority, then the one with the most ready entries.
    """
    numbers = [number for number, one in enumerate(ready) if one.count]
    if not numbers:
        return None
    full = [number for number in numbers if ready[number].count >= ready[number].sizes[-1]]
    number = max(full or numbers, key=lambda number: (ready[number].priority, ready[number].count))
    one = ready[number]
    size = one.sizes[min(bisect_left(one.sizes, one.count), len(one.sizes) - 1)]
    return Task(number, size, MANY_STEPS if one.again or one.count > size else 1)
