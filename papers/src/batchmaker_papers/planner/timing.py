"""Comparable times of several calls on a machine with other work."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def times_in_turn_s(
    calls: Sequence[Callable[[], Any]], seconds: float, *, least: int = 3, most: int = 100_000
) -> list[list[float]]:
    """Return the times of each call, after one call to warm up.

    The calls take turns, so other work on the machine affects all alike. The order of each round is random, so that no
    call always finds the caches as the same other call left them. The measurement takes about `seconds` in total, with
    at least `least` and at most `most` times each. Item i of each list is from round i.
    """
    order, generator = list(range(len(calls))), random.Random(0)
    times: list[list[float]] = [[] for _ in calls]
    with torch.no_grad():
        for call in calls:
            call()
        end_s = time.perf_counter() + seconds
        while len(times[0]) < least or (time.perf_counter() < end_s and len(times[0]) < most):
            generator.shuffle(order)
            for index in order:
                begin_s = time.perf_counter()
                calls[index]()
                times[index].append(time.perf_counter() - begin_s)
    return times
