"""The CPU executor as its engine sees it: whatever a cell does with its rows, each request gets its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import OptionError
from batchmaker.executor import task_steps
from batchmaker.executor.inline import InlineExecutor
from covering import covering
from insides import scheduler_of


class Swap(nn.Module):
    """x, h, c -> c, h + x: hands a state through in the other's place."""

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return c, h + x


class Keep(nn.Module):
    """x, h, c -> x, h, c + x: hands an input and a state through as they are."""

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, h, c + x


class Chains(bm.Model):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.cell = bm.Cell(module, **options)

    def unfold(self, xs: Sequence[float], form: str) -> Any:
        state: Any = ([1.0, 2.0], [3.0, 4.0])
        if form == "run":
            ends = self.cell.run([[float(x), 0.5] for x in xs], state)
            return [ends, [end.steps for end in ends]]
        for x in xs:
            outputs = self.cell([float(x), 0.5], *state)
            state = outputs[-2:]
        return [outputs]


def plainly(module: nn.Module, xs: Sequence[float]) -> tuple[list[Tensor], list[Tensor]]:
    state, steps = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])], []
    for x in xs:
        outputs = module(torch.tensor([[float(x), 0.5]]), *state)
        state = list(outputs[-2:])
        steps.append([value[0] for value in outputs])
    return steps[-1], [torch.stack(column) for column in zip(*steps, strict=True)]


@pytest.mark.parametrize(("module", "sizes", "workers"), covering([Swap(), Keep()], [[1], [3], [2, 4, 16]], [1, 2]))
def test_cells_that_hand_rows_through_give_every_request_its_own(module: nn.Module, sizes: Any, workers: int) -> None:
    requests = [{"xs": [i, *range(1 + i % 7)], "form": ("run", "nodes")[i % 3 == 0]} for i in range(50)]
    with bm.Engine(Chains(module, batch_sizes=sizes), threads=1, workers=workers) as engine:
        for request, answer in zip(requests, engine.map(requests), strict=True):
            end, steps = plainly(module, request["xs"])
            torch.testing.assert_close(list(answer[0]), end)
            if request["form"] == "run":
                torch.testing.assert_close(answer[1], steps)
        for driver in engine.drivers:
            scheduler_of(driver).check_invariants()


class Exchange(nn.Module):
    """h, c -> c, h: hands both through, each in the other's place."""

    def forward(self, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return c, h


def test_values_that_change_places_are_all_read_before_one_is_written() -> None:
    class Exchanges(bm.Model):
        def __init__(self) -> None:
            self.cell = bm.Cell(Exchange())

        def unfold(self, count: int) -> Any:
            made = [self.cell([1.0, 2.0], [3.0, 4.0])]
            for _ in range(count):
                made.append(self.cell(*made[-1]))
            return [list(each) for each in made]

    with bm.Engine(Exchanges(), threads=1) as engine:
        for answer in engine.map([5, 5, 5], progress=False):
            for number, (h, c) in enumerate(answer):
                pair = [[3.0, 4.0], [1.0, 2.0]]
                assert [h.tolist(), c.tolist()] == (pair if number % 2 == 0 else pair[::-1])


def test_steps_that_shrink_within_a_task_run_as_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a step was run row by row")

    monkeypatch.setattr(task_steps, "_row_by_row", refuse)
    lengths = [5, 5, 4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1, 1]
    with bm.Engine(Chains(Swap(), batch_sizes=[2, 4, 16]), threads=1) as engine:
        answers = engine.map([{"xs": list(range(length)), "form": "run"} for length in lengths], progress=False)
    for length, answer in zip(lengths, answers, strict=True):
        torch.testing.assert_close(answer[1], plainly(Swap(), range(length))[1])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_many_chains_and_few_lanes_stay_right(workers: int) -> None:
    torch.manual_seed(0)
    cell = nn.GRUCell(2, 5)

    class Grus(bm.Model):
        def __init__(self) -> None:
            self.cell = bm.Cell(cell, max_batch=4)

        def unfold(self, request: Any) -> Any:
            return self.cell.run(request)

    requests = [torch.randn(1 + (i * 13) % 23, 2) for i in range(90)]
    with bm.Engine(Grus(), threads=1, workers=workers) as engine:
        answers = engine.map(requests)
        for driver in engine.drivers:
            scheduler_of(driver).check_invariants()
    with torch.no_grad():
        for xs, answer in zip(requests, answers, strict=True):
            h = torch.zeros(1, 5)
            for x in xs:
                h = cell(x[None], h)
            torch.testing.assert_close(answer, h[0], rtol=1e-5, atol=1e-5)


def test_tables_grow_while_requests_are_in_flight() -> None:
    with bm.Engine(Chains(Swap()), threads=1) as engine:
        small = [engine.submit({"xs": list(range(20)), "form": "run"}) for _ in range(3)]
        large = [engine.submit({"xs": list(range(900)), "form": "run"}) for _ in range(6)]
        for futures, length in ((small, 20), (large, 900)):
            end, steps = plainly(Swap(), range(length))
            for future in futures:
                torch.testing.assert_close(list(future.result()[0]), end)
                torch.testing.assert_close(future.result()[1], steps)


def test_bfloat16_weights_make_bfloat16_rows() -> None:
    torch.manual_seed(0)
    cell = nn.GRUCell(4, 4).to(torch.bfloat16)

    class Half(bm.Model):
        def __init__(self) -> None:
            self.cell = bm.Cell(cell)

        def unfold(self, request: Any) -> Any:
            return self.cell.run(request)

    xs = torch.randn(6, 4)
    with bm.Engine(Half(), threads=1) as engine:
        answers = engine.map([xs, xs.numpy(), xs.to(torch.bfloat16)])
    h = torch.zeros(1, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        for x in xs.to(torch.bfloat16):
            h = cell(x[None], h)
    for answer in answers:
        assert answer.dtype == torch.bfloat16
        torch.testing.assert_close(answer, h[0], rtol=0.05, atol=0.02)


def test_impossible_numbers_of_threads_are_refused() -> None:
    with pytest.raises(OptionError, match="at least 1"):
        InlineExecutor([], [], num_threads=0)


def test_a_task_that_is_computed_at_once_has_the_compute_threads_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that comes alone may be the first that its thread computes."""
    monkeypatch.setattr(task_steps.TaskRunner, "begin", lambda _, task: SimpleNamespace(num_finished=len(task.ends)))
    task: Any = SimpleNamespace(ends=[1])
    seen = list[int]()

    def compute(count: int) -> None:
        torch.set_num_threads(3 - count)  # as another part of the process may have
        InlineExecutor([], [], num_threads=count).compute(task)
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    for count in (1, 2):
        thread = threading.Thread(target=compute, args=(count,))
        thread.start()
        thread.join()
    torch.set_num_threads(before)
    assert seen == [1, 2]
