"""Finds the fastest way to compute recurrent steps by trials at a few batch sizes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.kernels.cpu.greedy import GreedyLoop
from batchmaker.kernels.cpu.loop import LoopPlan, LoopTask, RecurrentLoop
from batchmaker.kernels.cpu.steps import BLOCK, OWN, TILED
from batchmaker.kernels.cpu.tile_steps import Rows

_OWN_ROWS: Final = 8
"""Above this number of rows, slow loops are not tried if a library could multiply: see _is_slow."""
_WIDE: Final = 1 << 20
_SIZE_S: Final = 3e-3
_ALL_S: Final = 80e-3
"""Time limits of one size and of all sizes. After that, the results so far are used for the other sizes."""
_NEEDED: Final = 3
"""The first sizes, which are tried whatever they take. The ends alone would decide for what is between them."""
_HOPELESS: Final = 3.0
"""A way that takes so many times the least is not tried again at this size."""
_SHORT: Final = 1 << 22
"""A task of several steps is timed up to so many multiplications per step."""


def choose(
    loop: RecurrentLoop, step: Callable[[int], Callable[[], Any]], batch_sizes: Sequence[int]
) -> NDArray[np.bool_]:
    """Choose the loop's plan; return, for each n, whether it is faster for tasks of at most n rows a step.

    n goes up to the largest size. step: makes the alternative, the same step of n rows. batch_sizes: the sizes at which
    the alternative has been run before, ascending. Takes about 10 ms, for wide cells up to 100.
    """
    largest = batch_sizes[-1]
    ways = np.full(BLOCK + 1, loop.products.ways[-1], np.int64)
    loop.plan = LoopPlan(ways, np.zeros(1, np.bool_), batch_sizes)
    _compile(loop)
    measured: dict[int, _Times] = {}
    end_s = time.thread_time() + _ALL_S
    for n in _sizes(largest):
        if len(measured) >= _NEEDED and time.thread_time() > end_s:
            break
        measured[n] = _times(loop, step, n)
    of_rows = sorted(n for n in measured if n <= BLOCK)
    ways[:] = measured[of_rows[-1]].way
    for n in reversed(of_rows):
        ways[: n + 1] = measured[n].way
    sizes, every = sorted(measured), np.arange(largest + 1)
    times = np.array([[measured[n].compiled_s, measured[n].products_s, measured[n].step_s] for n in sizes])
    times = np.maximum(times, 1e-9)  # a clock may return the same time twice
    by_product = np.interp(every, sizes, times[:, 1] / times[:, 0]) < 1
    loop.plan = LoopPlan(ways, by_product, batch_sizes if by_product.any() else ())
    faster: NDArray[np.bool_] = np.interp(every, sizes, times[:, :2].min(1) / times[:, 2]) < 1
    return faster


def choose_greedy(
    loop: GreedyLoop, step: Callable[[int], Callable[[], Any]], batch_sizes: Sequence[int]
) -> NDArray[np.bool_]:
    """As `choose`, for a greedy decoder: first for its recurrent step, then for the whole.

    The second part compares the whole with the alternative.
    """
    choose(loop.recurrent, step, batch_sizes)
    _greedy(loop, 1, 1)()  # compile or load it
    faster: dict[int, float] = {}
    end_s = time.thread_time() + _ALL_S
    for n in _sizes(batch_sizes[-1]):
        if len(faster) >= _NEEDED and time.thread_time() > end_s:
            break
        num_steps = _num_steps(loop.recurrent, n)
        looped, stepped = least_s([_greedy(loop, n, num_steps), step(n)])
        faster[n] = looped / max(num_steps * stepped, 1e-9)
    sizes = sorted(faster)
    is_faster: NDArray[np.bool_] = np.interp(np.arange(batch_sizes[-1] + 1), sizes, [faster[n] for n in sizes]) < 1
    return is_faster


def _greedy(loop: GreedyLoop, n: int, num_steps: int) -> Callable[[], Any]:
    task = example_task(loop.recurrent, n, num_steps)
    task.state = loop.zeros(n)
    task.move_tables = task.move_rows = np.zeros((loop.num_state, n), np.int64)
    return lambda: loop.run(task, task.lanes, None)


@final
@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of the same steps in one compiled call, with the fastest product, and with the alternative."""

    way: int
    compiled_s: float
    products_s: float
    step_s: float


def _times(loop: RecurrentLoop, step: Callable[[int], Callable[[], Any]], n: int) -> _Times:
    ways = loop.products.ways
    tried = [way for way in ways if n <= _OWN_ROWS or len(ways) == 1 or not _is_slow(loop, way)]
    num_steps = _num_steps(loop, n)
    px = loop.as_stored(np.random.default_rng(0).standard_normal((n * num_steps, loop.width), np.float32))
    task = example_task(loop, n, num_steps)
    calls = [*(_compiled(loop, way, task, px) for way in tried), _products(loop, task, px), step(n)]
    *compiled, products, stepped = least_s(calls)
    return _Times(tried[compiled.index(min(compiled))], min(compiled), products, num_steps * stepped)


def _num_steps(loop: RecurrentLoop, n: int) -> int:
    return 4 if n * loop.width * loop.hidden <= _SHORT else 1


def _is_slow(loop: RecurrentLoop, way: int) -> bool:
    """Whether a way is slow for many rows.

    Own loops read the weights repeatedly, and tiles of bfloat16 do not use the processor's bfloat16 products.
    """
    wide = loop.width * loop.hidden > _WIDE and loop.products.w.dtype == np.int16
    return way == OWN or (way == TILED and wide)


def example_task(loop: RecurrentLoop, n: int, num_steps: int) -> LoopTask:
    """Return a task of n chains from their first step on, without inputs."""
    none = np.zeros(0, np.int64)
    lanes = np.arange(n, dtype=np.int64)
    zeros = np.zeros((loop.num_state, n), np.int64)
    return LoopTask(
        ends=np.arange(1, num_steps + 1, dtype=np.int64) * n,
        largest=n,
        used=np.ones(num_steps, np.bool_),
        lanes=np.tile(lanes, num_steps),
        tables=np.zeros(1, np.int64),
        source_tables=none,
        source_rows=none,
        inputs=(),
        move_at=lanes,
        move_tables=zeros,
        move_rows=zeros,
        state=tuple(loop.zeros(n) for _ in range(loop.num_state)),
        keep_at=none,
        keep_rows=none,
        keep_tables=none,
        fetch_at=(),
        fetch_of=(),
        fetched=(),
    )


def _sizes(largest: int) -> list[int]:
    """Return the sizes to try, the most informative first: there may not be time for all."""
    return list(dict.fromkeys(min(size, largest) for size in (1, 64, 8, BLOCK, 2, 16, 4, 4 * BLOCK)))


def _compile(loop: RecurrentLoop) -> None:
    """Compile or load everything that a task needs."""
    task = example_task(loop, 1, 1)
    task.fetch_at, task.fetch_of, task.fetched = (task.lanes,), (0,), (loop.zeros(1),)
    px = np.zeros((1, loop.width), loop.zeros(0).dtype)
    loop.run_compiled(task, px, task.ends[:0], loop.plan.ways)
    loop.run_products(task, px, task.ends[:0])


def _compiled(loop: RecurrentLoop, way: int, task: LoopTask, px: Rows) -> Callable[[], Any]:
    ways = np.full(BLOCK + 1, way, np.int64)
    return lambda: loop.run_compiled(task, px, task.move_at[:0], ways)


def _products(loop: RecurrentLoop, task: LoopTask, px: Rows) -> Callable[[], Any]:
    return lambda: loop.run_products(task, px, task.move_at[:0])


def least_s(calls: list[Callable[[], Any]]) -> list[float]:
    """Return the least time of each call.

    The calls take turns for some milliseconds, at least two or three times each; a hopeless one only twice, since the
    first time may touch memory that is new. The clock is that of this thread, so other work on the machine does not
    count.
    """
    least = [np.inf] * len(calls)
    started_s = time.thread_time()
    for turn in itertools.count(1):
        for i, call in enumerate(calls):
            if turn > 2 and least[i] > _HOPELESS * min(least):
                continue
            begin_s = time.thread_time()
            call()
            least[i] = min(least[i], time.thread_time() - begin_s)
        taken_s = time.thread_time() - started_s
        if taken_s > _SIZE_S and turn > (1 if taken_s > 4 * _SIZE_S else 2):
            break
    return least
