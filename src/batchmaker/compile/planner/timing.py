"""Times of calls beside each other, on a machine that does other things too."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def times_in_turn_s(
    calls: Sequence[Callable[[], Any]], seconds: float, *, least: int = 3, most: int = 100_000
) -> list[list[float]]:
    """Return the times of each call, after one to warm up.

    They are called in turn, so that what else the machine does meets all alike, and in an order drawn anew for each
    round, so that none always finds in the caches what the same other one left there: for about so many seconds
    together, at least `least` and at most `most` times each. Place i of each list is from round i.
    """
    order, drawn = list(range(len(calls))), random.Random(0)
    times: list[list[float]] = [[] for _ in calls]
    with torch.no_grad():
        for call in calls:
            call()
        end_s = time.perf_counter() + seconds
        while len(times[0]) < least or (time.perf_counter() < end_s and len(times[0]) < most):
            drawn.shuffle(order)
            for index in order:
                begin_s = time.perf_counter()
                calls[index]()
                times[index].append(time.perf_counter() - begin_s)
    return times
