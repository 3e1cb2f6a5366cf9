"""The stop tests of loops, applied to all loops of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.engine.in_flight import InFlight
from batchmaker.errors import RAISED_BY_USERS, said_by

Nodes = NDArray[np.int64]
Failures = tuple[tuple[int, str], ...]

_UNKNOWN: Final = -2
_NO_LOOP: Final = -1


@final
class LoopTests:
    """The loops of one task: by what each is tested, and which have ended.

    cell: its name, for messages. nodes: of the task, [positions]. requests: whose each is, None where nobody waits.
    Tests that are equal are called once for all their loops.
    """

    __slots__ = ("_base", "_cell", "_last", "_over", "_test_of", "_tests")

    def __init__(self, cell: str, nodes: Nodes, requests: Sequence[InFlight | None]) -> None:
        self._cell = cell
        self._base = int(nodes.min())
        size = int(nodes.max()) - self._base + 1
        self._test_of = np.full(size, _UNKNOWN, np.int64)  # by node from `base`, as are the next two
        self._last = np.zeros(size, np.int64)
        self._over = np.zeros(size, np.bool_)
        self._tests: list[Any] = []
        places: dict[Any, int] = {}
        for node, request in zip(nodes.tolist(), requests, strict=True):
            at = node - self._base
            if self._test_of[at] == _UNKNOWN:
                self._learn(at, None if request is None else request.loop_at(node), places)

    def _learn(self, at: int, found: tuple[int, Any] | None, places: dict[Any, int]) -> None:
        """Note the loop of a node and of those after it. found: the request's own number of the node, and the loop."""
        if found is None:
            self._test_of[at] = _NO_LOOP
            return
        local, loop = found
        last = at + loop.last - local
        self._last[at : last + 1] = last
        try:
            place = places.setdefault(loop.until, len(self._tests))
        except RAISED_BY_USERS:  # its own __hash__ or __eq__: it meets no other
            place = len(self._tests)
        if place == len(self._tests):
            self._tests.append(loop.until)
        self._test_of[at : last + 1] = place

    def running(self, nodes: Nodes) -> NDArray[np.bool_]:
        """Return which nodes of the task run: not those of loops that have ended before them."""
        return ~self._over[nodes - self._base]

    def apply(self, nodes: Nodes, values: Tensor) -> tuple[NDArray[np.bool_], Failures]:
        """Test loops after their steps at these nodes; those that stop, or come to their last node, have ended.

        values: [nodes, *shape], what each loop looks at. Returns which have ended, [nodes], and the places at which the
        test raised, with the reason. Where a test raises, it is tried again value by value, so that only the loops at
        fault fail.
        """
        at = nodes - self._base
        tests = self._test_of[at]
        ended: NDArray[np.bool_] = (tests >= 0) & (self._last[at] == at)
        failed: list[tuple[int, str]] = []
        for number in np.unique(tests).tolist():
            if number == _NO_LOOP:
                continue
            until, mine = self._tests[number], np.flatnonzero(tests == number)
            try:
                ended[mine] |= _holds(until, values, mine)
            except RAISED_BY_USERS:  # the model's own test; find the values that make it raise
                for place in mine.tolist():
                    try:
                        ended[place : place + 1] |= _holds(until, values, np.array([place]))
                    except RAISED_BY_USERS as error:
                        failed.append((place, f"until of cell {self._cell!r} raised {said_by(error)}"))
        for place in [*np.flatnonzero(ended).tolist(), *(place for place, _ in failed)]:
            self._over[at[place] + 1 : self._last[at[place]] + 1] = True
        return ended, tuple(failed)


def _holds(until: Any, values: Tensor, places: Nodes) -> NDArray[np.bool_]:
    """Apply a test to a copy of the values at these places; raises unless it gives one answer for each.

    Scalars are as wide there as Python's numbers; bfloat16, which NumPy lacks, is float32.
    """
    values = values[torch.from_numpy(places)] if len(places) < len(values) else values.clone()
    if values.ndim == 1 and values.dtype != torch.bool:
        values = values.to(torch.float64 if values.is_floating_point() else torch.int64)
    array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    found = np.empty(len(places), np.bool_)
    found[:] = until(array) if callable(until) else array == until
    return found
