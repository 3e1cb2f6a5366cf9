"""How long a section of the GPU benchmark may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time by which a section should have ended. clock: seconds."""

    at_s: float
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        return self.at_s - self.clock()

    @property
    def passed(self) -> bool:
        return self.left_s <= 0
