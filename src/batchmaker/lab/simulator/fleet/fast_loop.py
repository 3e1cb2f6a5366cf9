"""The loop of `FastReplicas`: arrivals, routing, tasks and answers of a whole fleet in virtual time, compiled."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Floats, Ints
from batchmaker.compiled import compiled
from batchmaker.fleet.routing import NUM_OPEN, pick
from batchmaker.lab.simulator.fleet.records import ANSWERED, FAILED
from batchmaker.lab.simulator.fleet.replica_tasks import (
    ChainCosts,
    ReplicaTables,
    form_task,
    has_work,
    join,
)
from batchmaker.lab.simulator.fleet.replicas import (
    ENDED,
    NEXT,
    NO_HOME,
    ROWS,
    SEQUENCES,
    STEPS,
    UNANSWERED,
    WORK_NS,
)


class Offer(NamedTuple):
    """What is offered and how it is counted. See Replicas, FleetWork and FleetRecords for the arrays."""

    arrived_s: Floats
    kinds: NDArray[np.int32]
    known_ns: Ints
    weight: Ints
    sequence: NDArray[np.int32]
    outcome: NDArray[np.int8]
    finished_s: Floats
    replica: NDArray[np.int32]
    tries: NDArray[np.int8]
    home: Ints
    chunks_left: Ints
    totals: Ints


class Routing(NamedTuple):
    """The arrays of a Router, and whether it is sticky."""

    how: int
    state: NDArray[np.uint64]
    replicas: Ints
    load: Ints
    sticky: bool


@compiled
def set_event(tree: Floats, place: int, at_s: float) -> None:
    """Say when a replica is to be looked at next. tree: [2 * a power of two]; each entry is the least of its two."""
    at = len(tree) // 2 + place
    tree[at] = at_s
    while at > 1:
        at //= 2
        least = min(tree[2 * at], tree[2 * at + 1])
        if tree[at] == least:
            break
        tree[at] = least


@compiled
def _next_place(tree: Floats) -> int:
    """Return the replica that is to be looked at first; of several, that with the lowest number."""
    at = 1
    while at < len(tree) // 2:
        at *= 2
        if tree[at + 1] < tree[at]:
            at += 1
    return at - len(tree) // 2


@compiled
def _answer(offer: Offer, routing: Routing, places: ReplicaTables, place: int, request: int) -> None:
    """A request is answered: the counts of its replica and its sequence go down."""
    offer.outcome[request] = ANSWERED
    places.num_here[place] -= 1
    offer.totals[UNANSWERED] -= 1
    offer.totals[WORK_NS] -= offer.known_ns[request]
    if not routing.sticky:
        routing.load[place] -= offer.weight[request]
        return
    sequence = offer.sequence[request]
    offer.chunks_left[sequence] -= 1
    if offer.chunks_left[sequence] == 0:
        offer.home[sequence] = ENDED
        offer.totals[SEQUENCES] -= 1
        routing.load[place] -= 1


@compiled
def _home_of(offer: Offer, routing: Routing, request: int) -> int:
    """Return the replica of a request; NO_HOME where none is open, ENDED where its sequence is over."""
    if routing.sticky:
        home = offer.home[offer.sequence[request]]
        if home != NO_HOME:
            return int(home)
    if routing.state[NUM_OPEN] == 0:
        return NO_HOME
    place = pick(routing.how, routing.state, routing.replicas, routing.load)
    routing.load[place] += offer.weight[request]
    if routing.sticky:
        offer.home[offer.sequence[request]] = place
        offer.totals[SEQUENCES] += 1
    return place


@compiled
def play(
    offer: Offer,
    routing: Routing,
    forms: Ints,
    places: ReplicaTables,
    costs: ChainCosts,
    never: NDArray[np.bool_],
    tree: Floats,
    busy_s: Floats,
    held: Ints,
    wanted: Ints,
    until_s: float,
) -> int:
    """Play up to a time, itself included; return how many requests are held, for no replica is open: see `held`.

    Ends early where `held` is full; and where a replica lacks room: `wanted` is then the replica and the request, which
    must be handed over. Arrivals come before what ends at the same time.
    """
    num_held, count = 0, len(offer.arrived_s)
    while num_held < len(held):
        request = offer.totals[NEXT]
        arrival_s = offer.arrived_s[request] if request < count else math.inf
        event_s = tree[1]
        now_s = min(arrival_s, event_s)
        if now_s > until_s or now_s == math.inf:
            break
        if arrival_s <= event_s:
            offer.totals[NEXT] += 1
            place = _home_of(offer, routing, request)
            if place == ENDED:
                offer.outcome[request] = FAILED
                offer.finished_s[request] = now_s
            elif place == NO_HOME:
                held[num_held] = request
                num_held += 1
            else:
                offer.replica[request] = place
                offer.tries[request] += 1
                offer.totals[UNANSWERED] += 1
                offer.totals[WORK_NS] += offer.known_ns[request]
                if not join(places, forms, place, request, int(offer.kinds[request])):
                    wanted[0], wanted[1] = place, request
                    break
                if not places.is_busy[place]:
                    set_event(tree, place, now_s)
            continue
        place = _next_place(tree)
        at, end = places.next_done[place], places.num_done[place]
        while at < end and offer.finished_s[places.done[place, at]] <= now_s:
            _answer(offer, routing, places, place, int(places.done[place, at]))
            at += 1
        places.next_done[place] = at
        if at == end and (not places.is_busy[place] or places.task_end_s[place] <= now_s):
            places.is_busy[place] = 0
            if not has_work(places, place):
                set_event(tree, place, math.inf)
                continue
            steps, rows = form_task(places, costs, offer.finished_s, never, place, now_s, busy_s)
            offer.totals[STEPS] += steps
            offer.totals[ROWS] += rows
            at, end = 0, places.num_done[place]
        next_s = offer.finished_s[places.done[place, at]] if at < end else places.task_end_s[place]
        set_event(tree, place, next_s)
    return num_held
