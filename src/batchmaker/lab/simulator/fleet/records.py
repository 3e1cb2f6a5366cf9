"""What a fleet is offered, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Floats
from batchmaker.errors import OptionError
from batchmaker.lab.simulator.workload import ShapedRequests

OUTCOMES: Final = ("waiting", "answered", "failed")
"""Meaning of `FleetRecords.outcome`. Failed: its replica died, and a second one or its sequence's state with it."""
WAITING, ANSWERED, FAILED = range(3)

MOST_TRIES: Final = 2
"""Replicas that a request is given to: where the first dies, one more."""


@final
@dataclass(frozen=True, slots=True)
class FleetWork:
    """What a fleet is offered. Arrays are [num_requests], in order of arrival.

    arrived_s: seconds, ascending, from 0 on. known_ns: nanoseconds of work at full batches that a router takes a
    request for; true_ns: that it is. sequence: number of its sequence, counted from 0; None where there are none.
    OptionError if they do not fit together.
    """

    requests: ShapedRequests
    arrived_s: Floats
    known_ns: NDArray[np.int64]
    true_ns: NDArray[np.int64]
    sequence: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        count = len(self.requests)
        if not count:
            raise OptionError("there is no request to simulate; give at least one")
        for name in ("arrived_s", "known_ns", "true_ns", "sequence"):
            array = getattr(self, name)
            if array is not None and array.shape != (count,):
                raise OptionError(f"{name} has shape {list(array.shape)}, expected [{count}], one for each request")
        if not np.isfinite(self.arrived_s).all() or self.arrived_s[0] < 0 or (np.diff(self.arrived_s) < 0).any():
            raise OptionError("times of arrival must be finite, at least 0 and ascending")


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one time. serving: replicas that may be chosen; starting, leaving: others that are paid for.

    unanswered: requests. queued_s: seconds of work at full batches that they are, all replicas together.
    """

    at_s: float
    serving: int
    starting: int
    leaving: int
    unanswered: int
    queued_s: float


@dataclass(slots=True)
class FleetRecords:
    """What became of each request. Arrays [num_requests], in order of arrival.

    finished_s: when it was answered or failed. outcome: index into OUTCOMES. replica: number of the place of the last
    replica that it was given to, -1 for none; a place is used again. tries: replicas that it was given to. steps,
    rows, busy_s: of all replicas. deaths: replicas that died. paid_s: seconds of all replicas, from when they were
    asked for. samples: the fleet over time.
    """

    arrived_s: Floats
    finished_s: Floats
    outcome: NDArray[np.int8]
    replica: NDArray[np.int32]
    tries: NDArray[np.int8]
    steps: int = 0
    rows: int = 0
    busy_s: float = 0.0
    deaths: int = 0
    paid_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def of(cls, arrived_s: Floats) -> FleetRecords:
        """Return records in which nothing has happened yet."""
        count = len(arrived_s)
        return cls(
            arrived_s,
            np.full(count, np.nan),
            np.zeros(count, np.int8),
            np.full(count, -1, np.int32),
            np.zeros(count, np.int8),
        )
