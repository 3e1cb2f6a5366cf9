"""Few of many combinations for the usual tests; the others are slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from itertools import product
from typing import Any

import pytest


def covering(*axes: Collection[Any], has: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """All combinations of values of axes, as parameters, in the order of `itertools.product`.

    Few of them have each value of each axis at least once, and all values of an axis about equally often; the others
    are marked slow. has: whether there is a combination of these values.
    """
    numbered = [list(enumerate(axis)) for axis in axes]
    combinations = {
        tuple(number for number, _ in pairs): tuple(value for _, value in pairs) for pairs in product(*numbered)
    }
    left = [places for places, values in combinations.items() if has(*values)]
    missing = {pair for places in left for pair in enumerate(places)}
    used = Counter[tuple[int, int]]()
    few = set[tuple[int, ...]]()

    def gain(places: tuple[int, ...]) -> tuple[int, int]:
        pairs = list(enumerate(places))
        return len(missing.intersection(pairs)), -sum(used[pair] for pair in pairs)

    while missing:
        best = max(left, key=gain)
        few.add(best)
        used.update(enumerate(best))
        missing.difference_update(enumerate(best))
    return [
        pytest.param(*values, marks=() if places in few else pytest.mark.slow)
        for places, values in combinations.items()
        if has(*values)
    ]
