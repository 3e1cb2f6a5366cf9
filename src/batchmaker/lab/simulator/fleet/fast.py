"""Replicas as compiled loops: a thousand of them, and ten million requests, in minutes."""

from __future__ import annotations

import math
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import OptionError
from batchmaker.fleet.routing import Router
from batchmaker.graph.cell_graph import Run
from batchmaker.lab.simulator.fleet import chain_tasks, fast_loop
from batchmaker.lab.simulator.fleet.chain_tasks import NOBODY, ChainCosts, ReplicaTables, RequestLine, Scratch
from batchmaker.lab.simulator.fleet.records import FleetWork
from batchmaker.lab.simulator.fleet.replicas import Replicas
from batchmaker.lab.simulator.run import SimulatedDevice
from batchmaker.lab.simulator.workload import SimulatedModel, SimulatedRequest
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.cellular import CellularPolicy
from batchmaker.scheduler.batching import BATCHES_AHEAD

MOST_HELD: Final = 1 << 16
"""Requests that one call of the loop may put aside."""


def why_not_fast(
    model: SimulatedModel, requests: list[SimulatedRequest], policy: CellPolicy, device: SimulatedDevice
) -> str | None:
    """Return why these cannot be played as chains, None if they can."""
    if type(policy) is not CellularPolicy:
        return f"the policy is {policy.name!r}, and the loops know `cellular` alone"
    if device.workers != 1 or device.run_ahead:
        return "replicas have several workers or run ahead, and the loops know one worker that does not"
    if len(model.cells) != 1:
        return f"model {model.name!r} has {len(model.cells)} cells, and the loops know chains of one"
    for request in requests:
        parts = request.graph.parts
        if len(parts) != 1 or not isinstance(parts[0], Run) or parts[0].open_ended:
            return f"a request of model {model.name!r} is not one chain whose length is known when it comes"
    return None


@final
class FastReplicas(Replicas):
    """Each replica is a line of chains of one cell. Answers come when ExactReplicas says that they come, with the same
    router and seed, to the last digits; but one compiled loop decides, not the scheduler.

    Raises OptionError for what `why_not_fast` names.
    """

    def __init__(
        self, model: SimulatedModel, policy: CellPolicy, work: FleetWork, router: Router, device: SimulatedDevice
    ) -> None:
        super().__init__(work, router)
        shapes = list(work.requests.shapes)
        if (reason := why_not_fast(model, shapes, policy, device)) is not None:
            raise OptionError(f"this fleet cannot be simulated fast: {reason}. Simulate it with fidelity `exact`")
        cell, overhead, count = model.cells[0], device.overhead, len(work.requests)
        ahead = cell.max_batch * (BATCHES_AHEAD if policy.budget_s < math.inf else policy.max_steps)
        self._costs = ChainCosts(
            np.ascontiguousarray(device.costs.seconds[0, : cell.max_batch + 1]), overhead.step_s, overhead.row_s,
            overhead.turn_s, overhead.request_s, cell.max_batch, cell.min_batch, policy.max_steps, policy.budget_s,
            ahead,
        )  # fmt: skip
        self._line = RequestLine(np.zeros(count, np.int32), np.zeros(count, np.int32), self.records.finished_s)
        self._scratch = Scratch(
            np.zeros(cell.max_batch, np.int64), np.zeros(policy.max_steps, np.int64),
            np.zeros(policy.max_steps, np.int64),
        )  # fmt: skip
        steps = np.array([_length(request) for request in shapes], np.int32)
        self._offer = fast_loop.Offer(
            _plain(work.arrived_s, np.float64), _plain(work.requests.kinds, np.int32), steps,
            _plain(work.known_ns, np.int64), _plain(self.weight, np.int64), _plain(self.sequence, np.int32),
            self.records.outcome, self.records.replica, self.records.tries, self.home, self.chunks_left, self.totals,
        )  # fmt: skip
        self._busy_s = np.zeros(1)
        self._places = self._room(16)
        self._tree = np.full(32, math.inf)
        self._aside = np.zeros(MOST_HELD, np.int64)

    def play(self, until_s: float) -> None:
        """See Replicas.play. A compiled loop plays; it comes back early when MOST_HELD requests are put aside."""
        while True:
            num_held = fast_loop.play(
                self._offer, self._routing(), self._line, self._places, self._costs, self._scratch, self._tree,
                self._busy_s, self._aside, until_s,
            )  # fmt: skip
            self._held += self._aside[:num_held].tolist()
            if num_held < MOST_HELD:
                break
        self.records.busy_s = float(self._busy_s[0])

    def num_here(self, place: int) -> int:
        return int(self._places.num_here[place])

    def _routing(self) -> fast_loop.Routing:
        router = self.router
        return fast_loop.Routing(router.how, router.state, router.replicas, router.load, self.sticky)

    def _fresh(self, place: int) -> None:
        room = len(self._places.first)
        if place >= room:
            larger = self._room(2 * room)
            for name in ReplicaTables._fields:
                getattr(larger, name)[:room] = getattr(self._places, name)
            self._places = larger
            tree = np.full(4 * room, math.inf)
            for other in range(room):
                fast_loop.set_event(tree, other, float(self._tree[room + other]))
            self._tree = tree
        chain_tasks.clear(self._places, place)

    def _drop(self, place: int) -> list[int]:
        places, found = self._places, []
        request = int(places.first[place]) if places.num_line[place] else NOBODY
        while request != NOBODY:
            found.append(request)
            request = int(self._line.following[request])
        planned: list[int] = places.done[place, places.next_done[place] : places.num_done[place]].tolist()
        self._line.finished_s[planned] = np.nan
        chain_tasks.clear(places, place)
        fast_loop.set_event(self._tree, place, math.inf)
        return found + planned

    def _hand_over(self, request: int, place: int, now_s: float) -> None:
        self._line.left[request] = self._offer.steps[self._offer.kinds[request]]
        chain_tasks.join(self._line, self._places, place, request)
        if not self._places.is_busy[place]:
            fast_loop.set_event(self._tree, place, now_s)

    def _room(self, places: int) -> ReplicaTables:
        """Return the tables of so many replicas."""
        most, ahead = self._costs.max_batch, self._costs.num_ahead
        shapes: dict[str, tuple[tuple[int, ...], Any]] = dict.fromkeys(ReplicaTables._fields, ((), np.int64))
        shapes |= {
            "task_end_s": ((), np.float64), "known": ((most.bit_length(),), np.float64),
            "seconds": ((most + 1,), np.float64), "done": ((ahead,), np.int32),
        }  # fmt: skip
        made = ReplicaTables(**{name: np.zeros((places, *shape), kind) for name, (shape, kind) in shapes.items()})
        for place in range(places):
            chain_tasks.clear(made, place)
        return made


def _length(request: SimulatedRequest) -> int:
    (part,) = request.graph.parts
    assert isinstance(part, Run)
    return part.length


def _plain(array: NDArray[Any], kind: Any) -> Any:
    return np.require(array, kind, ["C", "W"])
