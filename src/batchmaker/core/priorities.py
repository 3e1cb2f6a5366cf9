"""Ranks of requests, from their priorities and marks. `queues` orders ready nodes by rank; `Urgency` sets the marks."""

from __future__ import annotations

from typing import Final, final

from batchmaker.compiled import compiled_within
from batchmaker.core.arena import Arena
from batchmaker.core.layout import NUM_RANKED, RANK

# Marks of a request: it belongs to the cohort; it is short of time (see `Urgency`); it is a chunk of a sequence.
MEMBER: Final = 1
HURRIED: Final = 2
CHUNK: Final = 4


@compiled_within
def as_member(rank: int) -> int:
    """Return the rank that a request of this rank has with the mark MEMBER."""
    return ((rank + MEMBER) | MEMBER) - MEMBER


def usual_rank(precedence: int) -> int:
    """Return the rank of a request when it arrives; see RequestArrived."""
    return CHUNK * precedence


@compiled_within
def level_of(rank: int) -> int:
    """Return the precedence of requests of this rank, which decides before the marks of `Urgency`."""
    return (rank + MEMBER) // CHUNK


@compiled_within
def is_chunk(rank: int) -> bool:
    """Whether a request of this rank is a chunk of a sequence."""
    return level_of(rank) & 1 > 0


@final
class Priorities:
    """The rank of each request in flight, by slot. A larger rank is served first; the usual rank is 0.

    The rank is 8 * priority + marks - MEMBER, so marks order only requests of equal priority, and of these a chunk of a
    sequence goes before others: its next one is on the way. A request has the mark MEMBER until it is taken away. So if
    all requests have priority 0 and are members, and none is a chunk, all have the usual rank.
    """

    __slots__ = ("_arena",)

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def enter(self, slot: int, precedence: int) -> None:
        """Note that a request with this precedence has arrived."""
        self._set(slot, usual_rank(precedence))

    def mark(self, slot: int, mark: int, on: bool) -> bool:
        """Set a mark of a request, or clear it; return whether its rank has changed.

        If so, the queues must be brought into order again.
        """
        before = int(self._arena.requests[RANK, slot])
        marked = before + MEMBER  # of rank 0 MEMBER is the only mark
        after = (marked | mark if on else marked & ~mark) - MEMBER
        self._set(slot, after)
        return after != before

    def _set(self, slot: int, rank: int) -> None:
        requests, counts = self._arena.requests, self._arena.counts
        counts[NUM_RANKED] += (rank != 0) - bool(requests[RANK, slot])
        requests[RANK, slot] = rank

    @property
    def differ(self) -> bool:
        """Whether any request has a rank other than 0."""
        return bool(self._arena.counts[NUM_RANKED])
