"""A harness per test whose state must balance at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scheduler_harness import Harness


@pytest.fixture
def harness() -> Iterator[Callable[..., Harness]]:
    """Makes harnesses; at teardown each must have answered every request and have nothing left."""
    made: list[Harness] = []

    def make(*args: Any, **options: Any) -> Harness:
        made.append(Harness(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.run()
        one.check_nothing_left()
        one.check_replay()
