"""Which way to compute recurrent steps is the fastest here, found by trying at a few batch sizes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.kernels.cpu.loop import LoopTask, RecurrentLoop
from batchmaker.kernels.cpu.steps import BLOCK, OWN

_OWN_ROWS: Final = 8
"""Above so many rows, own loops are not tried where a library could multiply: they read the weights again and again."""
_SIZE_S: Final = 3e-3
_ROUND_S: Final = 12e-3
"""How long a size may take, and a round of all ways from which on larger sizes are not tried."""


def choose(loop: RecurrentLoop, step: Callable[[int], Callable[[], Any]], largest: int) -> NDArray[np.bool_]:
    """Set the loop's ways; return for n from 0 to `largest` whether it is faster for tasks of at most n rows a step.

    step: makes the same step of n rows as it is computed otherwise. Takes some 10 ms, for wide cells up to 100.
    """
    sizes: list[int] = []
    ratios: list[float] = []
    best = loop.products.ways[-1]
    for n in _ladder(largest):
        ways = [best]
        if n <= BLOCK:
            ways = [way for way in loop.products.ways if way != OWN or n <= _OWN_ROWS or loop.products.ways == [OWN]]
        num_steps = 4 if n <= 16 else 1
        px = np.random.default_rng(0).standard_normal((n * num_steps, loop.width), np.float32)
        task = example_task(loop, n, num_steps)
        calls: list[Callable[[], Any]] = [_way(loop, way, task, loop.as_stored(px)) for way in ways]
        *looped, stepped = _least_s([*calls, step(n)])
        least = min(looped)
        best = ways[looped.index(least)]
        if n <= BLOCK:
            loop.ways[sizes[-1] + 1 if sizes else 0 : n + 1] = best
            loop.ways[n + 1 :] = best
        sizes.append(n)
        ratios.append(least / num_steps / stepped)
        if sum(looped) + stepped > _ROUND_S:
            break
    faster: NDArray[np.bool_] = np.interp(np.arange(largest + 1), sizes, ratios) < 1
    return faster


def example_task(loop: RecurrentLoop, n: int, num_steps: int) -> LoopTask:
    """Return a task of n chains from their first step on; its inputs are left out."""
    none = np.zeros(0, np.int64)
    lanes = np.arange(n, dtype=np.int64)
    state, entering = (tuple(loop.zeros(rows) for _ in range(loop.num_state)) for rows in (n, 0))
    return LoopTask(
        ends=np.arange(1, num_steps + 1, dtype=np.int64) * n,
        lanes=np.tile(lanes, num_steps),
        inputs=(),
        move_at=lanes,
        move_from=np.full(n, -1, np.int64),
        entering=entering,
        state=state,
        keep_at=none,
        keep_rows=none,
        keep_tables=(),
        fetch_at=(),
        fetch_of=(),
        fetched=(),
    )


def _ladder(largest: int) -> list[int]:
    sizes = [size for size in (1, 2, 4, 8, 16, BLOCK) if size < largest]
    quadrupled = itertools.takewhile(lambda size: size < largest, (BLOCK * 4**i for i in itertools.count(1)))
    return [*sizes, *quadrupled, largest]


def _way(loop: RecurrentLoop, way: int, task: LoopTask, px: NDArray[Any]) -> Callable[[], Any]:
    ways = np.full(BLOCK + 1, way, np.int64)
    return lambda: loop.run_projected(task, px, ways=ways)


def _least_s(calls: list[Callable[[], Any]]) -> list[float]:
    """Return the least time of each call, in some milliseconds all together; the first round does not count."""
    least = [np.inf] * len(calls)
    end_s = np.inf
    for turn in itertools.count():
        for i, call in enumerate(calls):
            begin_s = time.perf_counter()
            call()
            taken_s = time.perf_counter() - begin_s
            least[i] = taken_s if turn == 1 else min(least[i], taken_s)
        if turn == 0:
            end_s = time.perf_counter() + _SIZE_S
        elif time.perf_counter() > end_s:
            break
    return least
