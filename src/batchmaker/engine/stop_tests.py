"""The stop tests of loops, applied to all loops of a step at once. CellDriver and InlineExecutor share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.compile.run_form import A_NUMBER
from batchmaker.errors import RAISED_BY_USERS, said_by
from batchmaker.executor.base import NO_LOOP
from batchmaker.model.scope import Conditions, OpenLoop

Failures = tuple[tuple[int, str], ...]
Loops = Iterable[tuple[int, OpenLoop]]
"""Loops of a request, each with its shift: local number + shift = node number (see InFlight)."""

_FEWEST: Final = 1024


@final
class StopTests:
    """The loops in flight that end at a value, as arrays by node number. `fit` makes room for more node numbers.

    test_of: [nodes] the number of the node's test; NO_LOOP if the node is in no such loop. last: [nodes] the last
    possible node of the loop. ended: [nodes] whether the loop has ended before the node. is_constant, output_of,
    constants: [tests] whether a test compares one output with an integer, and which. Equal tests have one number while
    some loop needs it. A test is called once for all its loops. outputs: those that some test looks at, each with the
    number of these tests.
    """

    __slots__ = (
        "_entry",
        "_free",
        "_in_task",
        "_left",
        "_num_entered",
        "_numbers",
        "_tests",
        "_users",
        "constants",
        "ended",
        "is_constant",
        "last",
        "output_of",
        "outputs",
        "test_of",
    )  # fmt: skip

    def __init__(self) -> None:
        self.test_of = np.full(_FEWEST, NO_LOOP, np.int64)
        self.last = np.zeros(_FEWEST, np.int64)
        self.ended = np.zeros(_FEWEST, np.bool_)
        self.constants = np.zeros(0, np.int64)
        self.is_constant = np.zeros(0, np.bool_)
        self.output_of = np.zeros(0, np.int64)
        self.outputs: Counter[int] = Counter()
        self._tests: list[Conditions] = []
        self._users: list[int] = []  # loops in flight, by test
        self._free: list[int] = []
        self._numbers: dict[Any, int] = {}
        self._in_task = False
        self._left: list[tuple[int, int, int]] = []  # while a task runs: first node, end, entry
        self._entry = np.zeros(_FEWEST, np.int64)  # by node: which loop entered there last
        self._num_entered = 0

    def fit(self, num_nodes: int) -> None:
        """Make room for node numbers below `num_nodes`: of all nodes, since a task may hold nodes outside of loops."""
        if num_nodes <= len(self.ended):
            return
        more = max(num_nodes, 2 * len(self.ended)) - len(self.ended)
        self.test_of = np.concatenate((self.test_of, np.full(more, NO_LOOP, np.int64)))
        self.last = np.concatenate((self.last, np.zeros(more, np.int64)))
        self.ended = np.concatenate((self.ended, np.zeros(more, np.bool_)))
        self._entry = np.concatenate((self._entry, np.zeros(more, np.int64)))

    def enter(self, loops: Loops) -> None:
        """Add loops. They have their node numbers, for which there is room, and none of their steps has run."""
        for shift, loop in loops:
            first, end = shift + loop.first, shift + loop.last + 1
            self._num_entered += 1
            self._entry[first:end] = self._num_entered
            self.test_of[first:end] = self._number_of(loop.conditions)
            self.last[first:end] = end - 1
            self.ended[first:end] = False

    def leave(self, loops: Loops) -> None:
        """Remove loops, because their request has ended.

        A request is answered as soon as the step that ends its loop is reported. The task may contain later steps of
        this loop. These must still be skipped: they would overwrite the state that the request's sequence keeps. So
        `ended` is kept for these nodes until the task ends, or until another loop enters at the same nodes.
        """
        for shift, loop in loops:
            first, end = shift + loop.first, shift + loop.last + 1
            number = int(self.test_of[first])
            self.test_of[first:end] = NO_LOOP
            self._users[number] -= 1
            if self._users[number] == 0:
                self._give_back(number)
            if self._in_task:
                self._left.append((first, end, int(self._entry[first])))
            else:
                self.ended[first:end] = False

    def begin_task(self) -> None:
        """Note that a task begins to run, step by step. Requests may leave between two steps."""
        self._in_task = True

    def end_task(self) -> None:
        """Note that no further step of the task will run."""
        self._in_task = False
        for first, end, entry in self._left:
            self.ended[first:end] &= self._entry[first:end] != entry
        self._left.clear()

    def _number_of(self, conditions: Conditions) -> int:
        """Return the number of a test, and count one more loop that needs it."""
        try:
            number = self._numbers.get(conditions)
            if number is None:
                number = self._numbers[conditions] = self._added(conditions)
        except RAISED_BY_USERS:  # its own __hash__ or __eq__ raised: it shares its number with no other
            number = self._added(conditions)
        self._users[number] += 1
        return number

    def _added(self, conditions: Conditions) -> int:
        output, until = conditions[0]
        is_constant = _is_constant(until) and len(conditions) == 1
        if self._free:
            number = self._free.pop()
            self._tests[number], self._users[number] = conditions, 0
        else:
            number = len(self._tests)
            self._tests.append(conditions)
            self._users.append(0)
            self.constants = np.append(self.constants, np.int64(0))
            self.is_constant = np.append(self.is_constant, False)
            self.output_of = np.append(self.output_of, np.int64(0))
        self.constants[number], self.is_constant[number] = until if is_constant else 0, is_constant
        self.output_of[number] = output
        self.outputs.update(output for output, _ in conditions)
        return number

    def _give_back(self, number: int) -> None:
        conditions, self._tests[number] = self._tests[number], ()
        self._free.append(number)
        self.outputs -= Counter(output for output, _ in conditions)
        try:
            if self._numbers.get(conditions) == number:
                del self._numbers[conditions]
        except RAISED_BY_USERS:  # its own __hash__ or __eq__ raised, so it was never in the dict
            pass

    def running(self, nodes: Ints) -> NDArray[np.bool_]:
        """Return which of these nodes of a task run, [nodes]. A node does not run if its loop has ended before it."""
        return ~self.ended[nodes]

    def apply(self, cell: str, nodes: Ints, values: Tensor, output: int = 0) -> tuple[NDArray[np.bool_], Failures]:
        """Test loops after their steps at these nodes. A loop ends if its test holds, and at its last node.

        cell: its name, for messages. values: [nodes, *shape] of an output; tests of other outputs are left to another
        call. Returns which loops have ended, [nodes], and the indices in `nodes` at which the test raised, with the
        reason. If a test raises, it is called again with each value alone, so that only the loops at fault fail.
        """
        tests = self.test_of[nodes]
        ended: NDArray[np.bool_] = (tests >= 0) & (self.last[nodes] == nodes)
        failed: list[tuple[int, str]] = []
        for number in np.unique(tests).tolist():
            if number == NO_LOOP:
                continue
            mine = np.flatnonzero(tests == number)
            looked_at = [until for its, until in self._tests[number] if its == output]
            if not looked_at:
                continue
            (until,) = looked_at
            try:
                ended[mine] |= _holds(until, values, mine)
            except RAISED_BY_USERS:  # the model's own test; find the values at fault
                for place in mine.tolist():
                    try:
                        ended[place : place + 1] |= _holds(until, values, np.array([place]))
                    except RAISED_BY_USERS as error:
                        failed.append((place, f"until of cell {cell!r} raised {said_by(error)}"))
        for place in [*np.flatnonzero(ended).tolist(), *(place for place, _ in failed)]:
            node = nodes[place]
            self.ended[node + 1 : self.last[node] + 1] = True
        return ended, tuple(failed)


def said_end(until: Any) -> str:
    """Return what a test is, in words: A_NUMBER for one that compiled loops make themselves."""
    if _is_constant(until):
        return A_NUMBER
    name = getattr(until, "__name__", None) or type(until).__name__
    return f"the function {name!r}" if callable(until) else f"a {type(until).__name__}"


def _is_constant(until: Any) -> bool:
    return isinstance(until, int | np.integer) and bool(-(2**63) <= until < 2**63)


def _holds(until: Any, values: Tensor, places: Ints) -> NDArray[np.bool_]:
    """Apply a test to a copy of the values at these places. Returns one answer for each; raises if it gives others.

    Scalars are given as int64 or float64, like Python's numbers, or as bool. bfloat16, which NumPy lacks, is given as
    float32.
    """
    values = values[torch.from_numpy(places)] if len(places) < len(values) else values.clone()
    if values.ndim == 1 and values.dtype != torch.bool:
        values = values.to(torch.float64 if values.is_floating_point() else torch.int64)
    array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    holds = np.empty(len(places), np.bool_)
    holds[:] = until(array) if callable(until) else array == until
    return holds
