"""Tasks that follow each other in one compiled call, as values decide: same answers, nothing lost, fewer turns."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_models import assert_balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_decisions import NOW, PRIME, Eager, Program, calls, cells, datas, maps, picks, places, run_program
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.engine import decided_tasks
from batchmaker.engine.answer import Answer
from batchmaker.errors import CancelledError, CellError, DeadlineError
from insides import decided_together, loops_everywhere

EXAMPLES = int(os.environ.get("BATCHMAKER_EXAMPLES", "6"))


@pytest.fixture(autouse=True)
def in_loops() -> Iterator[None]:
    with loops_everywhere():
        yield


# --- random programs -------------------------------------------------------------------------------------------------

simple = st.one_of(calls, calls, datas, picks, maps)


def statements(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    block = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.tuples(st.just("cond"), places, block, block),
        st.tuples(st.just("switch"), places, block, block, block),
        st.tuples(
            st.just("loop"), places, block, st.integers(1, 6), st.booleans(), st.booleans(),
            st.sampled_from(("none", "none", "map")),
        ),
    )  # fmt: skip


programs = st.lists(st.recursive(simple, statements, max_leaves=10), min_size=2, max_size=5)


@settings(max_examples=5 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(programs, min_size=1, max_size=3), st.sampled_from(("cellular", "auto", "depth", "agenda")),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, PRIME)), min_size=1, max_size=12), st.integers(1, 4),
)  # fmt: skip
def test_random_programs_give_what_plain_python_gives(
    listed: Sequence[Any], policy: str, asked: Sequence[tuple[int, int]], together: int
) -> None:
    use, requests = cells(Eager), []
    for which, seed in asked:
        x = torch.randint(0, PRIME, (3, 2), generator=torch.Generator().manual_seed(seed))
        requests.append({"number": which % len(listed), "x": x})
    wanted = [run_program(listed[one["number"]], NOW, use, one["x"]).tolist() for one in requests]
    with bm.Engine(Program(listed), policy, threads=1) as engine:
        for size in (len(requests), together, 1):  # others come while some are in flight
            answers = [engine.submit(one) for one in requests[:size]] + engine.submit_many(requests[size:])
            assert [answer.result().tolist() for answer in answers] == wanted
    assert_balanced(engine)


# --- one model -------------------------------------------------------------------------------------------------------


class Halve(nn.Module):
    """A number -> Collatz's next one, whether it is above 1, whether it is odd."""

    def forward(self, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        odd = n % 2
        n = odd * (3 * n + 1) + (1 - odd) * (n // 2)
        return n, n > 1, n % 2 == 1


class Count(nn.Module):
    def forward(self, count: Tensor) -> Tensor:
        return count + 1


class Add(nn.Module):
    """A sum and a number below 4,096 -> the sum with the number's row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4096, 4)
        with torch.no_grad():
            self.rows.weight.copy_(torch.arange(4 * 4096).reshape(4096, 4) % 7)

    def forward(self, total: Tensor, n: Tensor) -> Tensor:
        return total + self.rows(n)


class Collatz(bm.Model):
    """How many steps it is from n to 1, and the sum of the rows of the odd numbers on the way, all below 4,096."""

    example_request = 5
    most = 300

    def __init__(self) -> None:
        self.halve, self.count, self.add = (bm.Cell(module, max_batch=8) for module in (Halve(), Count(), Add()))

    def unfold(self, n: int) -> Any:
        def body(state: Any) -> Any:
            number, _, odd, total, count = state
            total = bm.cond(odd, lambda: self.add(total, number), lambda: total)
            return (*self.halve(number), total, self.count(count))

        init = (n, n > 1, n % 2 == 1, torch.zeros(4), 0)
        *_, total, count = bm.while_loop(lambda state: state[1], body, init, max_steps=self.most)
        return count, total


def collatz(n: int) -> tuple[int, list[float]]:
    total, count = [0.0] * 4, 0
    while n > 1:
        if n % 2:
            total = [t + (4 * n + k) % 7 for k, t in enumerate(total)]
        n, count = (3 * n + 1 if n % 2 else n // 2), count + 1
    return count, total


def tame(first: int, count: int) -> list[int]:
    """Numbers from `first` on on whose way no odd number is above 4,095."""

    def highest(n: int) -> int:
        odd = 0
        while n > 1:
            odd = max(odd, n if n % 2 else 0)
            n = 3 * n + 1 if n % 2 else n // 2
        return odd

    return [n for n in range(first, first + 9 * count) if highest(n) < 4096][:count]


WILD = 703
"""On its way there are odd numbers above 4,095."""


def said(answer: Any) -> tuple[int, list[float]]:
    count, total = answer.result() if isinstance(answer, Answer) else answer
    return count, total.tolist()


def test_a_request_alone_is_computed_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decided_tasks, "REPORT_S", 1e6)  # however busy the machine is
    with decided_together() as runs, bm.Engine(Collatz(), threads=1) as engine:
        said(engine.submit(6))
        runs.clear()
        before = replace(engine.stats)
        assert said(engine.submit(97)) == collatz(97)
        assert 200 < sum(runs) < engine.stats.steps - before.steps + 1
        assert len(runs) < 10
    assert_balanced(engine)


def test_a_call_ends_when_its_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decided_tasks, "REPORT_S", 0.0)
    monkeypatch.setattr(decided_tasks, "TASK_S", 0.0)
    with decided_together() as runs, bm.Engine(Collatz(), threads=1) as engine:
        assert [said(one) for one in engine.map(range(1, 9), progress=False)] == [collatz(n) for n in range(1, 9)]
        assert runs
        assert set(runs) == {1}
    assert_balanced(engine)


@pytest.mark.parametrize("policy", ["auto", "cellular"])
def test_what_is_counted_is_the_same_as_step_by_step(policy: str) -> None:
    """Alone, where batches do not depend on time."""
    counts = []
    for watched in (False, True):
        with decided_together() as runs, bm.Engine(Collatz(), policy, threads=1) as engine:
            said(engine.submit(6))
            seen = list[Any]()
            if watched:
                engine.driver.observer = seen.append
            before, ran = replace(engine.stats), sum(runs)
            for n in (27, 97):
                engine.submit(n).exception()
            for n in tame(1, 20):
                assert said(engine.submit(n)) == collatz(n)
            after = engine.stats
            assert (sum(runs) > ran) is not watched
            assert bool(seen) is watched
            counts.append([getattr(after, name) - getattr(before, name) for name in ("steps", "cells", "padded_cells")])
    assert counts[0] == counts[1]


def test_many_together_with_those_that_come_meanwhile_are_right() -> None:
    numbers = tame(1, 400)
    wanted = [collatz(n) for n in numbers]
    with decided_together() as runs, bm.Engine(Collatz(), threads=1) as engine:
        found: dict[int, Any] = {}

        def client(first: int) -> None:
            for k in range(first, len(numbers), 4):
                found[k] = said(engine.submit(numbers[k]))

        clients = [threading.Thread(target=client, args=(k,)) for k in range(4)]
        for one in clients:
            one.start()
        assert [said(one) for one in engine.map(numbers, progress=False)] == wanted
        for one in clients:
            one.join()
        assert [found[k] for k in range(len(numbers))] == wanted
        assert sum(runs) > len(runs) > 0
    assert_balanced(engine)


def test_a_token_without_a_row_fails_its_own_request() -> None:
    numbers = [*tame(600, 6), WILD, *tame(700, 6)]
    with decided_together() as runs, bm.Engine(Collatz(), threads=1) as engine:
        for answers in ([engine.submit(n) for n in numbers], engine.submit_many(numbers)):
            for n, answer in zip(numbers, answers, strict=True):
                if n == WILD:
                    assert isinstance(answer.exception(), CellError)
                else:
                    assert said(answer) == collatz(n)
        assert runs
    assert_balanced(engine)


class Endless(Collatz):
    most = 20


def test_a_loop_that_takes_too_many_steps_fails_its_own_request() -> None:
    with decided_together() as runs, bm.Engine(Endless(), threads=1) as engine:
        long, short = engine.submit(97), engine.submit(6)
        assert said(short) == collatz(6)
        assert long.exception() is not None or said(long)[0] == 20
        assert runs
    assert_balanced(engine)


class Forever(Collatz):
    """1 goes to 4, 2 and 1 again."""

    example_request = None
    most = 1 << 40

    def unfold(self, n: int) -> Any:
        init = (n, True, False)
        return bm.while_loop(lambda state: state[0], lambda state: self.halve(state[0]), init, max_steps=self.most)[0]


def test_who_is_cancelled_or_late_leaves_and_others_go_on() -> None:
    with decided_together() as runs, bm.Engine(Forever(), "cellular", threads=1, max_nodes=1 << 24) as engine:
        cancelled, late = engine.submit(3), engine.submit(5, deadline_ms=200)
        assert isinstance(late.exception(), DeadlineError)
        assert not cancelled.done()
        assert cancelled.cancel()
        assert isinstance(cancelled.exception(), CancelledError)
        assert runs
    assert_balanced(engine)
