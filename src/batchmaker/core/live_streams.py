"""Notices live streams: sequences to which a few frames come at a time. While they are served, tasks are short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.core.events import RequestArrived
from batchmaker.core.layout import SHORT_TASKS

FRAMES: Final = 64
"""A chunk with at most so many nodes is one of a live stream. One with more is a recording, which nobody waits for
frame by frame."""

SILENCE_S: Final = 1.0
"""A stream is live until so many seconds after its last chunk."""


@final
class LiveStreams:
    """Sets the rule SHORT_TASKS while chunks of live streams come. rules: see State. are_served: whether they do."""

    __slots__ = ("_rules", "_until_s", "are_served")

    def __init__(self, rules: NDArray[np.int64]) -> None:
        self._rules = rules
        self._until_s = -np.inf
        self.are_served = False

    def look(self, arrivals: Sequence[RequestArrived], now_s: float) -> None:
        """Note the requests that arrive, and the time."""
        for event in arrivals:
            if event.sequence is not None and event.graph.num_nodes <= FRAMES:
                self._until_s = event.at_s + SILENCE_S
                break
        self.are_served = self._rules[SHORT_TASKS] = now_s < self._until_s
