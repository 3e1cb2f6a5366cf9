"""Requests whose values do not fit into memory fail alone; the others are answered, in the same turn and afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import Accumulate, Count, assert_balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import batchmaker as bm
from batchmaker.core.commands import Reserve
from batchmaker.errors import MemoryLimitError, lacks_memory
from batchmaker.executor.state_tables import StateTables


class Totals(bm.Model):
    """Running totals of numbers, each step's kept for another cell; by `at`, single calls that wait for each other."""

    def __init__(self) -> None:
        self.add = bm.Cell(Accumulate(), max_batch=4)
        self.count = bm.Cell(Count(), max_batch=4, host_outputs=(0,))

    def unfold(self, xs: list[float]) -> Any:
        return self.count.map(self.add.run(xs, (0.0,)).steps)


class Waiting(Totals):
    """The same, but it waits for the first total, and then begins its other steps."""

    def unfold(self, xs: list[float]) -> Iterator[Any]:
        first = self.count(self.add(xs[0], 0.0))
        yield first
        return self.count.map(self.add.run(xs, (0.0,)).steps)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("batchmaker.engine")
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(logging.NOTSET)


class SmallMemory:
    """Tables have no memory for more than this number of rows."""

    most = 1 << 40

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        real = StateTables.reserve

        def reserve(tables: StateTables, command: Reserve) -> None:
            if command.num_rows > self.most:
                raise MemoryError(f"no memory for {command.num_rows} rows")
            real(tables, command)

        patch.setattr(StateTables, "reserve", reserve)


@pytest.fixture(scope="module")
def memory() -> Iterator[SmallMemory]:
    with pytest.MonkeyPatch.context() as patch:
        yield SmallMemory(patch)


@pytest.fixture(
    scope="module", params=[(Totals, 1), (Totals, 2), (Waiting, 1)], ids=lambda p: f"{p[0].__name__}-{p[1]}"
)
def make(request: Any) -> Any:
    model, workers = request.param
    return lambda: bm.Engine(model(), "cellular", workers=workers, threads=1)


def right(xs: list[float]) -> list[float]:
    return (np.cumsum(xs) + 1).tolist()


def test_a_request_that_is_too_large_fails_alone_and_says_what_it_wanted(make: Any, memory: SmallMemory) -> None:
    small, large = [1.0, 2.0], [1.0] * 3000
    with make() as engine:
        memory.most = 1 << 40
        assert engine.submit(small).result(120).tolist() == right(small)
        memory.most = 2000
        before, bad, after = ([engine.submit(xs) for xs in some] for some in ([small] * 20, [large], [small] * 20))
        error = bad[0].exception(120)
        assert isinstance(error, MemoryLimitError)
        assert "rows" in str(error)
        assert "MB were wanted" in str(error)
        assert [answer.result(120).tolist() for answer in (*before, *after)] == [right(small)] * 40
        assert engine.submit([1.0] * 300).result(120).tolist() == right([1.0] * 300)
        memory.most = 1 << 40
        assert engine.submit(large).result(120).tolist() == right(large)
        assert engine.stats.restarts == 0
    assert_balanced(engine)


@pytest.mark.slow
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.sampled_from([1, 3, 60, 300, 700, 1500]), min_size=1, max_size=12),
    most=st.sampled_from([256, 300, 600, 1024, 1500, 3000]),
)
def test_in_any_mix_what_fits_is_right_and_what_does_not_says_so(
    make: Any, memory: SmallMemory, lengths: list[int], most: int
) -> None:
    memory.most = 1 << 40
    with make() as engine:
        engine.submit([1.0]).result(120)
        memory.most = max(1024, most)  # node numbers have room for so many at first
        for _ in range(2):
            answers = [engine.submit([float(i % 7) for i in range(n)]) for n in lengths]
            for n, answer in zip(lengths, answers, strict=True):
                error = answer.exception(120)
                if error is None:
                    assert answer.result().tolist() == right([float(i % 7) for i in range(n)])
                else:
                    assert isinstance(error, MemoryLimitError)
                    assert "were wanted" in str(error)
            assert engine.submit([1.0, 2.0]).result(120).tolist() == [2.0, 4.0]
        assert engine.stats.restarts == 0
    memory.most = 1 << 40
    assert_balanced(engine)


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:128] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("other"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_lacks_memory_is_known(error: Exception, lacks: bool) -> None:
    assert lacks_memory(error) == lacks
