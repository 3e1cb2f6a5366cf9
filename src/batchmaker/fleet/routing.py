"""Which replica a request goes to: rules without I/O, for a live router and for the simulator of fleets.

    router = Router("least-work")
    router.open(0), router.open(1)
    replica = router.route(weight)      # weight: what the request adds to its replica, see RULES
    ...
    router.answered(replica, weight)

A router knows only what it has routed and what has been answered. Nothing here asks a replica.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.errors import OptionError, StoppedError, unknown_name

RULES: Final = {
    "random": "any replica, each as likely",
    "round-robin": "one after the other",
    "two-choices": "of two random ones, that with fewer unanswered requests",
    "least-requests": "that with the fewest unanswered requests",
    "least-work": "that with the least unanswered work, by what is known of lengths when a request comes",
    "least-work-true": "the same with true lengths: what no router knows before, and so a bound",
    "sticky": "a sequence stays where it began; a new one goes where the fewest are open",
}
"""Rules by name, and what each does."""

RANDOM, ROUND_ROBIN, TWO_CHOICES, LEAST = range(4)
"""How one is picked, see `pick`."""
_PICKS: Final = {"random": RANDOM, "round-robin": ROUND_ROBIN, "two-choices": TWO_CHOICES}  # the others: LEAST

RANDOM_STATE, CURSOR, NUM_OPEN = range(3)
"""Places in `Router.state`."""


@compiled
def random_below(state: NDArray[np.uint64], limit: int) -> int:
    """Return a random number from 0 to limit - 1, and move the state on (SplitMix64: Steele, Lea and Flood, 2014)."""
    state[RANDOM_STATE] += np.uint64(0x9E3779B97F4A7C15)
    mixed = state[RANDOM_STATE]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return int(np.int64((mixed >> np.uint64(33)) % np.uint64(limit)))


@compiled
def pick(how: int, state: NDArray[np.uint64], replicas: Ints, load: Ints) -> int:
    """Return one of the open replicas.

    how: RANDOM, ROUND_ROBIN, TWO_CHOICES or LEAST. state: see Router; it changes. replicas: the open ones come first.
    load: [replicas] by number. Of several that have equally little to do, the next after the one chosen last is
    taken, so that idle replicas take turns.
    """
    count = int(np.int64(state[NUM_OPEN]))
    if how == RANDOM:
        return int(replicas[random_below(state, count)])
    if how == TWO_CHOICES:
        one = random_below(state, count)
        if count == 1:
            return int(replicas[one])
        other = (one + 1 + random_below(state, count - 1)) % count
        return int(replicas[one if load[replicas[one]] <= load[replicas[other]] else other])
    begin = int(np.int64(state[CURSOR])) % count
    best = begin
    if how == LEAST:
        least = load[replicas[begin]]
        for place in range(begin + 1, count):
            if load[replicas[place]] < least:
                best, least = place, load[replicas[place]]
        for place in range(begin):
            if load[replicas[place]] < least:
                best, least = place, load[replicas[place]]
    state[CURSOR] = np.uint64(best + 1)
    return int(replicas[best])


@final
class Router:
    """Chooses replicas by one rule. Replicas are small numbers from 0 on, which the caller gives.

    rule: one of RULES; OptionError names the nearest for another. seed: of what is random: the same calls with the same
    seed choose the same replicas. Not safe for several threads at once.

    load: [replicas] int64, the weights that were routed to each and not answered. replicas: [replicas] int64, of which
    the first `num_open` are those that may be chosen. state: [3] uint64 of `pick`. The simulator's compiled loop reads
    and writes these three.
    """

    __slots__ = ("how", "load", "replicas", "rule", "state")

    def __init__(self, rule: str, seed: int = 0) -> None:
        if rule not in RULES:
            raise unknown_name("router", rule, tuple(RULES))
        if seed < 0:
            raise OptionError(f"the seed of a router must be at least 0, got {seed}")
        self.rule = rule
        self.how = _PICKS.get(rule, LEAST)
        self.state: NDArray[np.uint64] = np.array([seed, 0, 0], np.uint64)
        self.replicas: Ints = np.zeros(4, np.int64)
        self.load: Ints = np.zeros(4, np.int64)

    @property
    def num_open(self) -> int:
        """How many replicas may be chosen."""
        return int(self.state[NUM_OPEN])

    def open(self, replica: int) -> None:
        """A replica may be chosen from now on, with nothing to do yet. OptionError if it may be already."""
        count = self.num_open
        if replica in self.replicas[:count]:
            raise OptionError(f"replica {replica} is open already")
        room = max(replica, count) + 1
        if room > len(self.load):
            self.load = np.concatenate((self.load, np.zeros(room, np.int64)))
            self.replicas = np.concatenate((self.replicas, np.zeros(room, np.int64)))
        self.load[replica] = 0
        self.replicas[count] = replica
        self.state[NUM_OPEN] = count + 1

    def close(self, replica: int) -> None:
        """A replica gets no new requests; those that it has are answered. OptionError if it was not open."""
        count = self.num_open
        (places,) = np.nonzero(self.replicas[:count] == replica)
        if not len(places):
            raise OptionError(f"replica {replica} is not open, so it cannot be closed")
        place = int(places[0])
        self.replicas[place : count - 1] = self.replicas[place + 1 : count].copy()
        self.state[NUM_OPEN] = count - 1

    def route(self, weight: int) -> int:
        """Return the replica for a request, which then has `weight` more to do. StoppedError if none is open."""
        if not self.num_open:
            raise StoppedError("no replica is open; wait until one has started, then route again")
        replica = pick(self.how, self.state, self.replicas, self.load)
        self.load[replica] += weight
        return replica

    def answered(self, replica: int, weight: int) -> None:
        """A request was answered, or failed there: its replica has so much less to do."""
        self.load[replica] -= weight
