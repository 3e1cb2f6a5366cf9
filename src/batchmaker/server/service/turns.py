"""How often threads take turns in a server: by how long the steps of its engines take (decision 5)."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from batchmaker.server.service.repository import Repository

LONG_STEP_S: Final = 5e-3
"""From here on a step counts as long."""

SHORT_TURN_S: Final = 2e-5
"""Seconds for which a thread may keep the interpreter from others while steps are long."""

_LOOK_S: Final = 1.0


def turn_s(busy_s: float, steps: int, usual_s: float) -> float:
    """Return how long a thread may keep the interpreter from others, in seconds.

    A step takes it several times, once for each operation. While calls keep the event loop's thread busy, each time can
    cost a turn, which adds up to a third of a long step. Where steps are short, most of the work is Python's own, and
    short turns cost more than they save. busy_s, steps: of all engines, lately.
    """
    return min(SHORT_TURN_S, usual_s) if steps and busy_s / steps >= LONG_STEP_S else usual_s


async def keep_turns(repository: Repository) -> None:
    """Set the turns of this process by the steps of the last second, until cancelled; then leave them as they were."""
    usual_s = sys.getswitchinterval()
    before: tuple[float, int] = (0.0, 0)
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            stats = [model.port.stats for model in repository.models()]
            now = sum(one.busy_s for one in stats), sum(one.steps for one in stats)
            if now[1] != before[1]:
                sys.setswitchinterval(turn_s(now[0] - before[0], now[1] - before[1], usual_s))
            before = now
    finally:
        sys.setswitchinterval(usual_s)
