"""Stop tests: which loops of a task end with a step, and which of its rows run after that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.engine.stop_tests import StopTests
from batchmaker.executor.base import StepsResult
from batchmaker.executor.inline import InlineExecutor
from batchmaker.model.scope import OpenLoop

SHORTEST, LONGEST = 1, 9


def stop_tests(loops: dict[int, tuple[int, Any]]) -> StopTests:
    """Return the tests of loops that begin at these nodes: {first node: (number of steps, test)}."""
    tests = StopTests()
    tests.enter([(first, OpenLoop(0, count - 1, until)) for first, (count, until) in loops.items()])
    return tests


def test_equal_stop_tests_are_asked_once_with_numbers_as_wide_as_pythons() -> None:
    asked: list[Any] = []

    def even(values: Any) -> Any:
        asked.append(values)
        return values % 2 == 0

    tests = stop_tests({0: (5, even), 10: (5, even), 20: (5, 7), 30: (5, even)})
    ended, failed = tests.apply("walk", np.array([0, 10, 20, 30]), torch.tensor([4, 1, 7, 2], dtype=torch.int8))
    assert ended.tolist() == [True, False, True, True]
    assert failed == ()
    assert [(values.tolist(), values.dtype) for values in asked] == [([4, 1, 2], np.int64)]


def test_a_loop_that_watches_several_outputs_ends_at_any_of_them() -> None:
    def large(values: Any) -> Any:
        return values > 9

    tests = StopTests()
    loops = [(0, OpenLoop(0, 3, {0: 7, 2: large})), (4, OpenLoop(0, 3, 7)), (8, OpenLoop(0, 3, 7, watched=2))]
    tests.enter(loops)
    nodes = np.array([0, 4, 8])
    assert tests.is_constant.tolist() == [False, True, True]
    assert (sorted(tests.outputs), tests.output_of[1:].tolist()) == ([0, 2], [0, 2])
    assert tests.apply("walk", nodes, torch.tensor([6, 7, 7]))[0].tolist() == [False, True, False]
    assert tests.apply("walk", nodes, torch.tensor([10, 10, 7]), 2)[0].tolist() == [True, False, True]
    assert tests.running(nodes + 1).tolist() == [False, False, False]
    tests.leave(loops)
    assert sorted(tests.outputs) == []


def test_a_stop_test_sees_rows_of_a_type_that_numpy_lacks() -> None:
    def far(rows: Any) -> Any:
        return rows[:, 0] > 1

    values = torch.tensor([[2.0, 0.0], [1.0, 3.0]], dtype=torch.bfloat16)
    ended, failed = stop_tests({0: (3, far), 8: (3, far)}).apply("walk", np.array([0, 8]), values)
    assert failed == ()
    assert ended.tolist() == [True, False]


def test_a_stop_test_that_raises_fails_at_the_values_that_make_it_raise() -> None:
    def picky(values: Any) -> Any:
        if (values < 0).any():
            raise ValueError("negative")
        return values > 1.0

    tests = stop_tests({0: (4, picky), 10: (4, picky), 20: (4, picky)})
    ended, failed = tests.apply("walk", np.array([0, 10, 20]), torch.tensor([2.0, -1.0, 0.5]))
    assert ended.tolist() == [True, False, False]
    assert failed == ((1, "until of cell 'walk' raised ValueError: negative"),)
    assert tests.running(np.array([1, 11, 21])).tolist() == [False, False, True]


def test_a_test_that_cannot_be_compared_meets_no_other() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, values: Any) -> Any:
            return values == 1

    tests = stop_tests({0: (4, Odd()), 4: (4, Odd())})
    assert tests.apply("walk", np.array([0, 4]), torch.tensor([1, 2]))[0].tolist() == [True, False]


def test_a_loop_ends_at_its_last_node_and_never_ends_what_lies_behind_it() -> None:
    tests = stop_tests({3: (2, 7), 5: (2, 7)})
    assert tests.apply("walk", np.array([3, 5]), torch.tensor([7, 0]))[0].tolist() == [True, False]
    assert tests.running(np.array([4, 5, 6])).tolist() == [False, True, True]
    assert tests.apply("walk", np.array([6]), torch.tensor([0]))[0].tolist() == [True]


def test_nodes_that_are_of_no_loop_always_run() -> None:
    tests = stop_tests({0: (2, 7)})
    ended, _ = tests.apply("walk", np.array([0, 2]), torch.tensor([7, 7]))
    assert ended.tolist() == [True, False]
    assert tests.running(np.array([1, 2])).tolist() == [False, True]


def test_a_loop_of_another_request_at_the_same_nodes_begins_anew() -> None:
    first, second = [(0, OpenLoop(0, 3, 7))], [(0, OpenLoop(0, 2, 8))]
    tests = StopTests()
    tests.enter(first)
    tests.apply("walk", np.array([0]), torch.tensor([7]))
    tests.leave(first)
    assert tests.running(np.array([0, 1, 2, 3])).all()
    assert tests.apply("walk", np.array([0]), torch.tensor([7]))[0].tolist() == [False]
    tests.enter(second)
    assert tests.running(np.array([0, 1, 2])).tolist() == [True, True, True]
    assert tests.apply("walk", np.array([0]), torch.tensor([7]))[0].tolist() == [False]
    assert tests.apply("walk", np.array([1]), torch.tensor([8]))[0].tolist() == [True]


def test_a_loop_that_has_ended_stays_so_until_the_task_ends_though_its_request_leaves() -> None:
    loops = [(0, OpenLoop(0, 3, 7))]
    tests = StopTests()
    tests.enter(loops)
    tests.begin_task()
    tests.apply("walk", np.array([0]), torch.tensor([7]))
    tests.leave(loops)
    assert tests.running(np.array([0, 1, 2, 3])).tolist() == [True, False, False, False]
    tests.end_task()
    assert tests.running(np.array([0, 1, 2, 3])).all()


def test_the_end_of_a_task_spares_the_loops_that_have_entered_in_place_of_those_that_left() -> None:
    first, second = [(0, OpenLoop(0, 3, 7))], [(2, OpenLoop(0, 3, 8))]
    tests = StopTests()
    tests.enter(first)
    tests.begin_task()
    tests.apply("walk", np.array([0]), torch.tensor([7]))
    tests.leave(first)
    tests.enter(second)
    tests.apply("walk", np.array([2]), torch.tensor([8]))
    tests.end_task()
    assert tests.running(np.arange(6)).tolist() == [True, True, True, False, False, False]


def test_tests_that_no_loop_needs_any_more_are_forgotten() -> None:
    tests = StopTests()
    tests.fit(5 * 700)
    for number in range(3000):
        loops = [(5 * (number % 700), OpenLoop(0, 4, lambda values, n=number: values > n))]
        tests.enter(loops)
        tests.leave(loops)
    assert len(tests.constants) == 1


def test_integers_are_told_from_tests_that_are_called() -> None:
    tests = stop_tests({0: (2, 7), 2: (2, lambda values: values > 1), 4: (2, 2.5), 6: (2, np.int64(-3))})
    numbers = tests.test_of[[0, 2, 4, 6]]
    assert tests.is_constant[numbers].tolist() == [True, False, False, True]
    assert tests.constants[numbers[[0, 3]]].tolist() == [7, -3]


def test_there_is_room_for_nodes_of_no_loop_behind_those_of_loops() -> None:
    tests = stop_tests({0: (5, 7)})
    tests.fit(5000)
    nodes = np.array([0, 1023, 1024, 4999])
    assert tests.running(nodes).all()
    assert tests.apply("walk", nodes, torch.tensor([7, 7, 7, 7]))[0].tolist() == [True, False, False, False]
    assert tests.running(np.array([1, 4999])).tolist() == [False, True]


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


class Mixed(bm.Model):
    """Counts down from a number: until 0, or so many steps. Answers as Counting, with a value of a wide cell."""

    def __init__(self) -> None:
        self.count = bm.Cell(Countdown(), max_batch=8, host_outputs=[0])
        self.widen = bm.Cell(Wide(), max_batch=8)

    def unfold(self, number: int, steps: int, ends: bool) -> Any:
        met, total = self.count.loop((number, 0), until=0 if ends else None, max_steps=steps)
        return total, met.steps, self.widen(total)


class Wide(nn.Module):
    """total -> more numbers than a table of results holds."""

    def forward(self, total: Tensor) -> Tensor:
        return total[:, None] + torch.arange(100)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("policy", ["auto", "cellular", "cellular:budget_ms=1000"])
def test_loops_with_a_stop_test_beside_the_same_cell_without_one_answer_as_alone(policy: str, workers: int) -> None:
    asked = [{"number": 200 + n, "steps": 300, "ends": True} for n in range(3)]  # first: they have the small numbers
    asked += [{"number": 5, "steps": 150, "ends": False} for _ in range(20)]
    with bm.Engine(Mixed(), policy, workers=workers, threads=1) as engine:
        found = engine.map(asked, progress=False)
        assert engine.heartbeat.alive
    for request, (total, met, wide) in zip(asked, found, strict=True):
        number, steps = request["number"], request["number"] if request["ends"] else request["steps"]
        assert met.tolist() == list(range(number - 1, number - 1 - steps, -1))
        assert int(total) == sum(range(number, number - steps, -1))
        assert wide.tolist() == [int(total) + i for i in range(100)]


class Streamed(bm.Model):
    """The steps of a loop, as they come."""

    def __init__(self) -> None:
        self.count = bm.Cell(Countdown(), max_batch=8, host_outputs=[0])

    def unfold(self, number: int, ends: bool) -> Any:
        return self.count.loop((number, 0), until=0 if ends else None, max_steps=number)[0].steps


@pytest.mark.parametrize("workers", [1, 2])
def test_values_of_nodes_behind_the_first_thousand_are_streamed_and_returned(workers: int) -> None:
    with bm.Engine(Streamed(), workers=workers, threads=1) as engine:
        assert engine.map([{"number": 2, "ends": True}], progress=False)[0].tolist() == [1, 0]  # tables are made
        asked = [engine.submit({"number": 700 + n, "ends": n == 0}, stream=n < 2) for n in range(4)]
        for n, answer in enumerate(asked):
            expected = list(range(699 + n, -1, -1))
            assert n >= 2 or list(answer) == expected
            assert answer.result(60).tolist() == expected
