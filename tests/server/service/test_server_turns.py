"""How often threads take turns follows the steps of the engines, and nothing of it stays."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import pytest

from batchmaker.server.limits import Limits
from batchmaker.server.service.repository import Repository
from batchmaker.server.service.turns import LONG_STEP_S, SHORT_TURN_S, keep_turns, turn_s


@pytest.mark.parametrize(
    ("busy_s", "steps", "turn"),
    [
        (0.9, 60, SHORT_TURN_S),
        (100 * LONG_STEP_S, 100, SHORT_TURN_S),
        (0.9, 1000, 5e-4),
        (0.0, 0, 5e-4),
    ],
)
def test_turns_are_short_while_steps_are_long(busy_s, steps, turn):
    assert turn_s(busy_s, steps, 5e-4) == turn


def test_turns_that_are_shorter_already_stay():
    assert turn_s(1.0, 10, 1e-5) == 1e-5


def test_the_interpreter_is_left_as_it_was():
    async def scenario():
        keeping = asyncio.create_task(keep_turns(Repository([], Limits())))
        await asyncio.sleep(0)
        sys.setswitchinterval(SHORT_TURN_S)
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping

    before = sys.getswitchinterval()
    asyncio.run(scenario())
    assert sys.getswitchinterval() == before
