"""The interface of policies. A policy chooses; the scheduler forms the batch, keeps its state and submits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import OptionError
from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.order import (
    ALGORITHM_1,
    LONGEST_READY,
    LOWEST_DEPTH,
    MEAN_DEPTH,
    MEAN_DEPTH_LEFT,
    READY_SHARE,
    ranked,
)
from batchmaker.policies.requests import RequestKinds, RequestTable


class DepthView(Protocol):
    """Depths of nodes: how many nodes must run one after another before each, 0 for a node without sources."""

    def mean(self, type_id: TypeId) -> float:
        """Mean depth of all nodes of a type in the mini-batch (the requests in flight together), run or not."""

    def mean_left(self, type_id: TypeId) -> float:
        """Mean depth of the nodes of a type that are in flight and not submitted."""

    def lowest_ready(self, type_id: TypeId) -> int:
        """Depth of the least deep ready node of a type that has ready nodes."""


class FrontierView(Protocol):
    """The nodes that wait for no other node of their own type."""

    def independent(self, type_id: TypeId) -> int:
        """Number of unsubmitted nodes of a type in flight that have no unsubmitted ancestor of the same type.

        This is ED-Batch's |Frontier(G^a)|: the ready nodes, and those that wait only for other types. A run counts as
        one node, because only its next step can come first.
        """


class ReadyView(Protocol):
    """The policy's view of the scheduler."""

    @property
    def now_s(self) -> float:
        """Time of the last event, in engine seconds."""

    @property
    def cells(self) -> Sequence[CellType]:
        """All cell types; position is the type id."""

    @property
    def ready(self) -> Sequence[TypeId]:
        """Cell types with ready nodes, ascending."""

    def num_ready(self, type_id: TypeId) -> int:
        """Nodes of this type whose inputs are computed or will be by submitted steps."""

    def ready_since(self, type_id: TypeId) -> int:
        """A number that is lower the longer the first of the ready nodes of this type has waited. There must be one."""

    def num_running(self, type_id: TypeId) -> int:
        """Steps of this type submitted and not finished."""

    @property
    def kinds(self) -> RequestKinds:
        """What the requests so far were like. Kept only for policies that watch requests."""

    @property
    def requests(self) -> RequestTable:
        """Facts about each request. Kept only for policies that watch requests, from the time on that they ask until no
        request is left: it costs small requests some microseconds each, so ask only where the kinds do not tell."""

    @property
    def depths(self) -> DepthView:
        """Depths of nodes. Kept only for policies that need them."""

    @property
    def frontiers(self) -> FrontierView:
        """Frontiers of types. Kept only for policies that need them."""

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""

    @property
    def num_requests(self) -> int:
        """Requests that wait or are in flight, and those that have ended while a worker still runs steps of them."""

    @property
    def num_in_cohort(self) -> int:
        """Requests that have begun, without chunks: those of a sequence follow each other for as long as it is open."""

    def waiting(self, limit: int) -> NDArray[np.int64]:
        """Slots of the first `limit` requests that have not begun, first in line first."""


class Coming(Protocol):
    """A request that arrives. sequence: of which it is a chunk; None for none. deadline_s: None for none."""

    @property
    def sequence(self) -> int | None: ...

    @property
    def deadline_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Admission:
    """Slots of waiting requests that begin now, and of those that are refused."""

    begin: Sequence[int]
    refuse: Sequence[int] = ()


class CellPolicy(ABC):
    """Decides which requests begin and which cell type an idle worker runs next.

    - order: how it ranks cell types; see `policies/order.py`. The scheduler does so in compiled code. A policy that
      ranks by more than that defines `rank`, and is asked.
    - watches_requests: the policy holds requests back or looks at single ones. The scheduler keeps `view.requests` and
      calls `admit`, unless `begins_on_arrival`. Otherwise every request begins when it arrives.
    - needs_depth: the scheduler keeps `view.depths`.
    - one_depth: a batch holds only nodes of one depth, the lowest that is ready.
    - needs_frontiers: the policy may ask `view.frontiers`, which is kept from the first time on.
    - node_by_node: a single node is ready when its own inputs are. Otherwise connected nodes of one type wait together
      for all inputs from outside, and then follow each other within a task.
    - urgent_first: types with a ready node of a more urgent request go before others, whatever the rank (see
      `Urgency`).
    - weighs_tasks: a task has only as many steps as its own cost is worth (`task_s` of the scheduler): a single one
      where tasks cost nothing, so that no step goes before what the rank would say. Where tasks cost something, single
      nodes follow those of their type within a task, too (see SchedulerState, `own_type_follows`).
    - ranks_one: it is asked for the rank, too, where at most one type is ready. If not, it is told; see `not_asked`.
    - fills_workers: its forecasts know one worker. Where there are several, the first in line begins for each that
      would be idle.
    - knows_steps_only: the types of cells that it ranks are those of runs step by step, none of whole runs.
    - leaves_lone: it has nothing to say about a short request that comes while nothing is in flight; see `lone_runs`.
    - max_steps: the most steps of a task (MaxTasksToSubmit); 1 looks at the rank before every batch. OptionError below
      1.
    - budget_ms: milliseconds that a task of several steps may take, by known step times; None for any.
    """

    name: str
    order: ClassVar[int] = ALGORITHM_1
    watches_requests: ClassVar[bool] = False
    needs_depth: ClassVar[bool] = False
    one_depth: ClassVar[bool] = False
    needs_frontiers: ClassVar[bool] = False
    node_by_node: ClassVar[bool] = False
    urgent_first: ClassVar[bool] = False
    weighs_tasks: ClassVar[bool] = False
    knows_steps_only: ClassVar[bool] = False
    ranks_one: ClassVar[bool] = True
    fills_workers: ClassVar[bool] = False
    leaves_lone: ClassVar[bool] = False

    _max_steps = 1
    _budget_s = math.inf

    def __init__(self, max_steps: int = 1, budget_ms: float | None = None) -> None:
        if max_steps < 1:
            raise OptionError(f"policy {self.name!r}: max_steps must be at least 1, got {max_steps}")
        if budget_ms is not None and not budget_ms > 0:
            raise OptionError(f"policy {self.name!r}: budget_ms must be above 0, got {budget_ms}")
        self._max_steps = max_steps
        self._budget_s = math.inf if budget_ms is None else budget_ms / 1e3

    @classmethod  # noqa: B027
    def prepare(cls) -> None:
        """Compile the policy's own loops, or load them. An engine calls this when it starts."""

    @property
    def budget_s(self) -> float:
        """Seconds that a task of several steps may take, infinity for no limit."""
        return self._budget_s

    @property
    def max_steps(self) -> int:
        """The most steps of a task (MaxTasksToSubmit)."""
        return self._max_steps

    def is_asked(self, view: ReadyView) -> bool:
        """Whether the scheduler has to ask for the rank of cell types now, because it is more than the `order`."""
        return type(self).rank is not CellPolicy.rank

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        """Return the cell types with ready nodes, best first. The scheduler takes the first that can form a batch.

        A type that was passed over very often in a row goes first, whatever the rank (see `ageing`).
        """
        return in_order(self.order, view)

    def not_asked(self, view: ReadyView) -> None:  # noqa: B027
        """Note that a worker was free and at most one type was ready, so that `rank` had nothing to say."""

    def admit(self, view: ReadyView) -> Admission:
        """Decide which waiting requests begin. Called whenever a worker is about to get work.

        If no request is in flight and none begins, the first in line begins anyway.
        """
        return Admission(view.waiting(view.num_waiting).tolist())

    def begins_on_arrival(self, view: ReadyView) -> bool:
        """Whether requests that have just arrived begin without `admit`. Called only while nobody waits."""
        return False

    def begins_together(self, view: ReadyView) -> int | None:
        """Return how many requests begin together, once those in flight are done and not before; None: as they come."""
        return None

    def lets_go_on(self, request: Coming) -> bool:
        """Whether a request begins on arrival whoever waits: the next chunk of a sequence, which is being served."""
        return False

    def check_cells(self, cells: Sequence[CellType]) -> None:  # noqa: B027
        """Raise unless the policy can serve these cell types. Called once all types are known."""

    def step_finished(self, type_id: TypeId, batch: int, seconds: float) -> None:  # noqa: B027
        """Note that a step of `batch` rows took so long on its worker."""

    def requests_finished(self, view: ReadyView, slots: Sequence[int]) -> None:  # noqa: B027
        """Note that requests were answered. Their facts can be read for the last time."""


def in_order(order: int, view: ReadyView) -> Sequence[TypeId]:
    """Return the cell types with ready nodes in one of the orders of `policies/order.py`."""
    ready = view.ready
    if len(ready) < 2:
        return ready
    if order == ALGORITHM_1:
        measure: Callable[[TypeId], float] = view.num_running
    elif order == LONGEST_READY:
        measure = view.ready_since
    elif order == READY_SHARE:
        measure = view.frontiers.independent
    else:
        depths = view.depths
        measure = {LOWEST_DEPTH: depths.lowest_ready, MEAN_DEPTH: depths.mean, MEAN_DEPTH_LEFT: depths.mean_left}[order]
    cells = [view.cells[type_id] for type_id in ready]
    types: list[TypeId] = ranked(
        order,
        np.array(ready, np.int64),
        np.array([view.num_ready(type_id) for type_id in ready], np.int64),
        np.array([cell.max_batch for cell in cells], np.int64),
        np.array([measure(t) for t in ready], np.float64),
        np.array([cell.priority for cell in cells], np.int64),
    ).tolist()
    return types


class GraphPolicy(ABC):
    """Decides which whole requests an idle worker computes together, and when (graph batching).

    Requests of different models never share a batch. Among requests that a policy ranks equal, the highest priority
    comes first, then the earliest arrival. Times are engine seconds and never run backwards.
    """

    name: str

    @property
    @abstractmethod
    def max_batch(self) -> int:
        """The most requests computed together. Above 1 they are padded to a common length."""

    @abstractmethod
    def add(
        self,
        request: int,
        length: int,
        at_s: float,
        deadline_s: float | None = None,
        model: int = 0,
        priority: int = 0,
    ) -> None:
        """Note that a request of this length has arrived."""

    @abstractmethod
    def discard(self, request: int) -> None:
        """Note that a waiting request was given up. Unknown requests are ignored."""

    @abstractmethod
    def choose(self, now_s: float) -> Sequence[int]:
        """Remove and return the requests of the next batch, all of one model; empty if none may start now."""

    def next_wakeup_s(self, now_s: float) -> float | None:
        """Return when `choose` may return a batch without another arrival; None if it will not."""
        return None

    def refuse(self, now_s: float) -> Sequence[int]:
        """Remove and return the requests to refuse. Called whenever a worker is about to get work."""
        return ()

    def batch_finished(self, model: int, lengths: Sequence[int], seconds: float) -> None:  # noqa: B027
        """Note that a batch of requests of these lengths took so long on its worker."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of waiting requests."""
