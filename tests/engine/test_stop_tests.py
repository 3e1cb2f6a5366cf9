"""Stop tests: which loops of a task end with a step, and which of its rows run after that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.cells.cell import OpenLoop
from batchmaker.engine.stop_tests import LoopTests
from batchmaker.executor.base import StepsResult
from batchmaker.executor.inline import InlineExecutor

SHORTEST, LONGEST = 1, 9


class Request:
    """A request whose loops begin at these nodes: {first node: (number of steps, test)}."""

    def __init__(self, loops: dict[int, tuple[int, Any]]) -> None:
        self._loops = loops

    def loop_at(self, node: int) -> tuple[int, OpenLoop] | None:
        for first, (count, until) in self._loops.items():
            if first <= node < first + count:
                return node - first, OpenLoop(0, count - 1, until)
        return None


def loop_tests(nodes: list[int], loops: dict[int, tuple[int, Any]]) -> LoopTests:
    return LoopTests("walk", np.array(nodes), [Request(loops)] * len(nodes))  # type: ignore[list-item]


def test_equal_stop_tests_are_asked_once_with_numbers_as_wide_as_pythons() -> None:
    asked: list[Any] = []

    def even(values: Any) -> Any:
        asked.append(values)
        return values % 2 == 0

    tests = loop_tests([0, 10, 20, 30], {0: (5, even), 10: (5, even), 20: (5, 7), 30: (5, even)})
    ended, failed = tests.apply(np.array([0, 10, 20, 30]), torch.tensor([4, 1, 7, 2], dtype=torch.int8))
    assert ended.tolist() == [True, False, True, True]
    assert failed == ()
    assert [(values.tolist(), values.dtype) for values in asked] == [([4, 1, 2], np.int64)]


def test_a_stop_test_sees_rows_of_a_type_that_numpy_lacks() -> None:
    def far(rows: Any) -> Any:
        return rows[:, 0] > 1

    values = torch.tensor([[2.0, 0.0], [1.0, 3.0]], dtype=torch.bfloat16)
    ended, failed = loop_tests([0, 8], {0: (3, far), 8: (3, far)}).apply(np.array([0, 8]), values)
    assert failed == ()
    assert ended.tolist() == [True, False]


def test_a_stop_test_that_raises_fails_at_the_values_that_make_it_raise() -> None:
    def picky(values: Any) -> Any:
        if (values < 0).any():
            raise ValueError("negative")
        return values > 1.0

    nodes = [0, 1, 10, 11, 20, 21]
    tests = loop_tests(nodes, {0: (4, picky), 10: (4, picky), 20: (4, picky)})
    ended, failed = tests.apply(np.array([0, 10, 20]), torch.tensor([2.0, -1.0, 0.5]))
    assert ended.tolist() == [True, False, False]
    assert failed == ((1, "until of cell 'walk' raised ValueError: negative"),)
    assert tests.running(np.array([1, 11, 21])).tolist() == [False, False, True]


def test_a_test_that_cannot_be_compared_meets_no_other() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, values: Any) -> Any:
            return values == 1

    tests = loop_tests([0, 4], {0: (4, Odd()), 4: (4, Odd())})
    assert tests.apply(np.array([0, 4]), torch.tensor([1, 2]))[0].tolist() == [True, False]


def test_a_loop_ends_at_its_last_node_and_never_ends_what_lies_behind_it() -> None:
    tests = loop_tests([3, 4, 5, 6], {3: (2, 7), 5: (2, 7)})
    assert tests.apply(np.array([3, 5]), torch.tensor([7, 0]))[0].tolist() == [True, False]
    assert tests.running(np.array([4, 5, 6])).tolist() == [False, True, True]
    assert tests.apply(np.array([6]), torch.tensor([0]))[0].tolist() == [True]


def test_nodes_that_are_of_no_loop_always_run() -> None:
    tests = loop_tests([0, 1, 2], {0: (2, 7)})
    ended, _ = tests.apply(np.array([0, 2]), torch.tensor([7, 7]))
    assert ended.tolist() == [True, False]
    assert tests.running(np.array([1, 2])).tolist() == [False, True]


# --- in the engine -------------------------------------------------------------------------------------------------


class Countdown(nn.Module):
    """n, total -> n - 1, total + n."""

    def forward(self, n: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return n - 1, total + n


class Counting(bm.Model):
    """Counts down from a number to 0 and adds up on the way; answers with the sum and what it met."""

    example_request = 3

    def __init__(self) -> None:
        self.count = bm.Cell(Countdown(), max_batch=4, host_outputs=[0])

    def unfold(self, number: int) -> Any:
        met, total = self.count.loop((number, 0), until=0, max_steps=LONGEST)
        return total, met.steps


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[StepsResult]:
    """What the executor tells of steps."""
    told: list[StepsResult] = []
    poll = InlineExecutor.poll

    def listening(executor: InlineExecutor) -> list[StepsResult]:
        told.extend(found := poll(executor))
        return found

    monkeypatch.setattr(InlineExecutor, "poll", listening)
    return told


def answers(numbers: list[int], **options: Any) -> list[tuple[int, list[int]]]:
    with bm.Engine(Counting(), **options) as engine:
        found = engine.map(numbers, progress=False)
    return [(int(total), steps.tolist()) for total, steps in found]


def expected(number: int) -> tuple[int, list[int]]:
    met = list(range(number - 1, max(-1, number - 1 - LONGEST), -1))
    return sum(number + 1 for number in met), met


def test_loops_that_end_at_different_steps_of_a_task_answer_as_alone(reports: list[StepsResult]) -> None:
    numbers = [*range(SHORTEST, LONGEST + 3)] * 5
    assert answers(numbers, policy=bm.policies.make("cellular", budget_ms=1000.0)) == [expected(n) for n in numbers]
    assert any(result.end - result.first > 1 and result.stopped is not None for result in reports)
    assert any(result.skipped is not None and result.skipped.any() for result in reports)


def test_tasks_that_are_counted_in_steps_hold_one_step_of_a_loop(reports: list[StepsResult]) -> None:
    numbers = [*range(SHORTEST, LONGEST)]
    assert answers(numbers, policy="cellular:max_steps=5") == [expected(n) for n in numbers]
    assert all(result.skipped is None or not result.skipped.any() for result in reports)
