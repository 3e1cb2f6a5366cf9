"""Replicas as compiled loops: a thousand of them, and ten million requests, in minutes."""

from __future__ import annotations

import math
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.core.batching import BATCHES_AHEAD
from batchmaker.errors import OptionError
from batchmaker.fleet.routing import Router
from batchmaker.graph.cell_graph import Run
from batchmaker.lab.simulator.core_tables import CoreTables
from batchmaker.lab.simulator.fleet import fast_loop, replica_tasks
from batchmaker.lab.simulator.fleet.records import FleetWork
from batchmaker.lab.simulator.fleet.replica_tasks import ChainCosts, ReplicaTables
from batchmaker.lab.simulator.fleet.replicas import Replicas
from batchmaker.lab.simulator.simulate import SimulatedDevice
from batchmaker.lab.simulator.workload import SimulatedModel, SimulatedRequest
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.cellular import CellularPolicy

MOST_HELD: Final = 1 << 16
"""Requests that one call of the loop may put aside."""
_NOTHING: Final = -1


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
        if request.decided is not None or len(parts) != 1 or not isinstance(parts[0], Run) or parts[0].open_ended:
            return f"a request of model {model.name!r} is not one chain whose length is known when it comes"
    return None


@final
class FastReplicas(Replicas):
    """Each replica is the tables of a scheduler, whose requests are chains of one cell. Answers come when ExactReplicas
    says that they come, with the same router and seed, to the last digits; one compiled loop plays all replicas.

    Raises OptionError for what `why_not_fast` names.
    """

    def __init__(
        self, model: SimulatedModel, policy: CellPolicy, work: FleetWork, router: Router, device: SimulatedDevice
    ) -> None:
        super().__init__(work, router)
        shapes = list(work.requests.shapes)
        if (reason := why_not_fast(model, shapes, policy, device)) is not None:
            raise OptionError(f"this fleet cannot be simulated fast: {reason}. Simulate it with fidelity `exact`")
        cell, overhead = model.cells[0], device.overhead
        self._most_done = cell.max_batch * (BATCHES_AHEAD if policy.budget_s < math.inf else policy.max_steps)
        self._costs = ChainCosts(
            np.ascontiguousarray(device.costs.seconds[0, : cell.max_batch + 1]),
            overhead.step_s,
            overhead.row_s,
            overhead.turn_s,
            overhead.request_s,
        )
        self._first = CoreTables(model.cells, policy, [shape.graph for shape in shapes], overhead)
        self._tables = dict[int, CoreTables]()  # by place
        self._offer = fast_loop.Offer(
            _plain(work.arrived_s, np.float64),
            _plain(work.requests.kinds, np.int32),
            _plain(work.known_ns, np.int64),
            _plain(self.weight, np.int64),
            _plain(self.sequence, np.int32),
            self.records.outcome,
            self.records.finished_s,
            self.records.replica,
            self.records.tries,
            self.home,
            self.chunks_left,
            self.totals,
        )
        self._busy_s = np.zeros(1)
        self._places = self._room(16)
        self._tree = np.full(32, math.inf)
        self._aside, self._wanted = np.zeros(MOST_HELD, np.int64), np.full(2, _NOTHING)
        self._never = np.zeros(0, np.bool_)

    def play(self, until_s: float) -> None:
        """See Replicas.play. A compiled loop plays; it comes back early when MOST_HELD requests are put aside, and
        where the tables of a replica must grow."""
        while True:
            num_held = fast_loop.play(
                self._offer,
                self._routing(),
                self._first.forms,
                self._places,
                self._costs,
                self._never,
                self._tree,
                self._busy_s,
                self._aside,
                self._wanted,
                until_s,
            )
            self._held += self._aside[:num_held].tolist()
            place, request = self._wanted.tolist()
            if place != _NOTHING:
                self._wanted[:] = _NOTHING
                self._hand_over(request, place, float(self._offer.arrived_s[request]))
            elif num_held < MOST_HELD:
                break
        self.records.busy_s = float(self._busy_s[0])

    def num_here(self, place: int) -> int:
        return int(self._places.num_here[place])

    def _routing(self) -> fast_loop.Routing:
        router = self.router
        return fast_loop.Routing(router.how, router.state, router.replicas, router.load, self.sticky)

    def _fresh(self, place: int) -> None:
        room = len(self._places.num_here)
        if place >= room:
            larger = self._room(2 * room)
            for name in ReplicaTables._fields:
                getattr(larger, name)[:room] = getattr(self._places, name)
            self._places = larger
            tree = np.full(4 * room, math.inf)
            for other in range(room):
                fast_loop.set_event(tree, other, float(self._tree[room + other]))
            self._tree = tree
        self._clear(place)

    def _clear(self, place: int) -> None:
        """An engine that has seen nothing is in this place."""
        places = self._places
        for column in (places.num_new, places.is_busy, places.num_done, places.next_done, places.num_here):
            column[place] = 0
        self._tables[place] = self._first.another()
        places.addresses[place] = self._tables[place].addresses

    def _drop(self, place: int) -> list[int]:
        places, ready = self._places, self._tables[place].ids_of_ready(0)
        planned: list[int] = places.done[place, places.next_done[place] : places.num_done[place]].tolist()
        self._offer.finished_s[planned] = np.nan
        self._clear(place)
        fast_loop.set_event(self._tree, place, math.inf)
        return ready + planned

    def _hand_over(self, request: int, place: int, now_s: float) -> None:
        places, tables, kind = self._places, self._tables[place], int(self._offer.kinds[request])
        if not replica_tasks.join(places, self._first.forms, place, request, kind):
            tables.make_room(np.array([kind]))
            places.addresses[place] = tables.addresses
            replica_tasks.join(places, self._first.forms, place, request, kind)
        if not places.is_busy[place]:
            fast_loop.set_event(self._tree, place, now_s)

    def _room(self, places: int) -> ReplicaTables:
        """Return the tables of so many replicas, none of which is there yet."""
        shapes: dict[str, tuple[tuple[int, ...], Any]] = dict.fromkeys(ReplicaTables._fields, ((), np.int64))
        shapes |= {
            "addresses": (self._first.addresses.shape, np.int64),
            "task_end_s": ((), np.float64),
            "done": ((self._most_done,), np.int32),
        }
        return ReplicaTables(**{name: np.zeros((places, *shape), kind) for name, (shape, kind) in shapes.items()})


def _plain(array: NDArray[Any], kind: Any) -> Any:
    return np.require(array, kind, ["C", "W"])
