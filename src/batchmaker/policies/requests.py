"""Facts about the requests for policies: one row per slot, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.graph.cell_graph import Work


@compiled
def submit(left: NDArray[np.int64], done: NDArray[np.int64], slots: Ints, type_id: int) -> None:
    """See RequestTable.submitted."""
    for i in range(len(slots)):
        left[slots[i], type_id] -= 1
        done[slots[i], type_id] += 1


@compiled
def _clear(left: NDArray[np.int64], done: NDArray[np.int64], slots: Ints) -> None:
    for i in range(len(slots)):
        left[slots[i]] = 0
        done[slots[i]] = 0


class RequestColumns(NamedTuple):
    """The columns of a RequestTable, for compiled loops."""

    left: NDArray[np.int64]
    done: NDArray[np.int64]
    width: NDArray[np.float64]
    is_open: NDArray[np.bool_]
    arrived_s: NDArray[np.float64]
    deadline_s: NDArray[np.float64]
    began_s: NDArray[np.float64]
    model: NDArray[np.int64]
    priority: NDArray[np.int64]


class RequestKinds(Protocol):
    """What the requests so far were like; see RequestTable."""

    num_models: int
    has_deadlines: bool
    decide: set[bool]
    repeat: bool
    run_types: set[int]
    stopping_types: set[int]


@final
class RequestTable:
    """Facts about the requests that wait or are in flight, by slot.

    - arrived_s, began_s, deadline_s: [slots] engine seconds; infinity if the request has not begun or has no deadline.
    - model, priority: [slots].
    - open: [slots] the request may still get nodes.
    - left, done: [slots, types] nodes not submitted yet, and submitted nodes.
    - width: [slots, types] nodes per step: how many nodes of a type the request can run together, at least 1.
    - num_models: number of models so far.
    - has_deadlines: some request had one.
    - decide: whether requests decided by values; both, if some did and some did not. repeat: whether some came to the
      same place several times, by a run or a loop.
    - run_types, stopping_types: the types that some request has used in runs, and in runs that a value may end.
    - type_model: [types] the model that last used each type.
    - changes: how often requests have come, begun, grown or ended.

    The scheduler writes, policies read.
    """

    __slots__ = (
        "_in_flight",
        "_listed",
        "arrived_s",
        "began_s",
        "changes",
        "deadline_s",
        "decide",
        "done",
        "has_deadlines",
        "left",
        "model",
        "num_models",
        "open",
        "priority",
        "repeat",
        "run_types",
        "stopping_types",
        "type_model",
        "width",
    )

    def __init__(self) -> None:
        self.arrived_s = np.zeros(64)
        self.began_s = np.full(64, np.inf)
        self.deadline_s = np.full(64, np.inf)
        self.model = np.zeros(64, np.int64)
        self.priority = np.zeros(64, np.int64)
        self.open = np.zeros(64, np.bool_)
        self.left = np.zeros((64, 0), np.int64)
        self.done = np.zeros((64, 0), np.int64)
        self.width = np.ones((64, 0))
        self.changes = 0
        self.num_models = 0
        self.has_deadlines = False
        self.decide: set[bool] = set()
        self.repeat = False
        self.run_types: set[int] = set()
        self.stopping_types: set[int] = set()
        self.type_model = np.zeros(0, np.int64)
        self._in_flight: dict[int, None] = {}
        self._listed: Ints | None = None

    @property
    def in_flight(self) -> Ints:
        """Slots of the requests that have begun and not ended, in the order in which they began."""
        if self._listed is None:
            self._listed = np.fromiter(self._in_flight, np.int64, len(self._in_flight))
        return self._listed

    @property
    def columns(self) -> RequestColumns:
        return RequestColumns(
            self.left,
            self.done,
            self.width,
            self.open,
            self.arrived_s,
            self.deadline_s,
            self.began_s,
            self.model,
            self.priority,
        )

    def add_type(self) -> None:
        """Add a column for one more cell type."""
        column = np.zeros((len(self.left), 1), np.int64)
        self.left = np.concatenate((self.left, column), axis=1)
        self.done = np.concatenate((self.done, column), axis=1)
        self.width = np.concatenate((self.width, column + 1.0), axis=1)
        self.type_model = np.append(self.type_model, 0)

    def enter(
        self, slot: int, arrived_s: float, deadline_s: float, model: int, priority: int, *, is_open: bool
    ) -> None:
        """Note that a request has arrived. deadline_s: infinity if it has none."""
        self.changes += 1
        self.fit(slot)
        self.note_kind(deadline_s, model)
        self.arrived_s[slot], self.began_s[slot], self.deadline_s[slot] = arrived_s, np.inf, deadline_s
        self.model[slot], self.priority[slot], self.open[slot] = model, priority, is_open
        self.width[slot] = 1.0

    def add_work(self, slot: int, work: Work) -> None:
        """Note that a request has more to compute."""
        self.changes += 1
        left, width, model = self.left[slot], self.width[slot], self.model[slot]
        for type_id, nodes, steps in zip(work.types.tolist(), work.nodes.tolist(), work.steps.tolist(), strict=True):
            left[type_id] += nodes
            width[type_id] = max(width[type_id], nodes / steps)
            self.type_model[type_id] = model

    def note_kind(self, deadline_s: float, model: int) -> None:
        """Note that there was a request like this. deadline_s: infinity if it has none."""
        self.num_models = max(self.num_models, model + 1)
        self.has_deadlines = self.has_deadlines or deadline_s < np.inf

    def note_run(self, type_id: int, *, may_stop: bool) -> None:
        """Note that a type is used in a run. may_stop: a value may end the run."""
        self.run_types.add(type_id)
        if may_stop:
            self.stopping_types.add(type_id)

    def begin(self, slots: Sequence[int], now_s: float) -> None:
        """Note that requests have left the waiting line, in this order."""
        self.changes += 1
        for slot in slots:
            self.began_s[slot] = now_s
            self._in_flight[slot] = None
        self._listed = None

    def submitted(self, slots: Ints, type_id: int) -> None:
        """Note that one node of this type of each of these requests was submitted; slots may repeat."""
        submit(self.left, self.done, slots, type_id)

    def add_submitted(self, slots: Sequence[int], counts: NDArray[np.int64]) -> None:
        """Note that so many nodes of these requests were submitted: [requests, types]. slots: each once."""
        self.left[slots] -= counts
        self.done[slots] += counts

    def stopped(self, slots: Ints, type_id: int, counts: NDArray[np.int64], ahead: NDArray[np.int64]) -> None:
        """Note that runs of these requests ended early: `counts` nodes of the type are not computed.

        ahead: how many of these were submitted, and did not run.
        """
        np.subtract.at(self.left[:, type_id], slots, counts - ahead)
        np.subtract.at(self.done[:, type_id], slots, ahead)

    def leave(self, slots: Sequence[int]) -> None:
        """Note that requests have ended."""
        self.changes += 1
        for slot in slots:
            self._in_flight.pop(slot, None)
        self._listed = None

    def forget(self, slots: Sequence[int]) -> None:
        """Note that these slots are free: no node of their requests is on a worker any more."""
        _clear(self.left, self.done, np.array(slots, np.int64))

    def clear(self) -> None:
        """Note that all slots are free, as in `forget`."""
        self.left[:] = 0
        self.done[:] = 0

    def fit(self, slot: int) -> None:
        """Make room for a slot."""
        while slot >= len(self.arrived_s):
            self._grow()

    def _grow(self) -> None:
        self.arrived_s = np.concatenate((self.arrived_s, np.zeros_like(self.arrived_s)))
        self.began_s = np.concatenate((self.began_s, np.full_like(self.began_s, np.inf)))
        self.deadline_s = np.concatenate((self.deadline_s, np.full_like(self.deadline_s, np.inf)))
        self.model = np.concatenate((self.model, np.zeros_like(self.model)))
        self.priority = np.concatenate((self.priority, np.zeros_like(self.priority)))
        self.open = np.concatenate((self.open, np.zeros_like(self.open)))
        self.left = np.concatenate((self.left, np.zeros_like(self.left)))
        self.done = np.concatenate((self.done, np.zeros_like(self.done)))
        self.width = np.concatenate((self.width, np.ones_like(self.width)))
