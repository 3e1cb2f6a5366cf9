"""Cells as an unfold function uses them: forms of calls, what they compute, and what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.compile.state_loop import StateChoice
from batchmaker.errors import ModelError, OptionError
from batchmaker.model.batch_sizes import default_batch_sizes
from insides import scheduler, scheduler_of

H = 4


class Recording(nn.Module):
    """Records the batch sizes that it is called with; cannot be traced, so every call is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) != float("inf"):
            self.sizes.append(len(x))
        return x + 1


class Combine(nn.Module):
    """a, b -> tanh(A a + B b): anything may be fed to it, as state or as input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(H, H)
        self.b = nn.Linear(H, H)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.a(a) + self.b(b))


class Double(nn.Module):
    def forward(self, n: Tensor) -> Tensor:
        return n * 2


class Given(bm.Model):
    """Cells given by name; a request is an unfold function over them."""

    def __init__(self, **cells: bm.Cell) -> None:
        for name, cell in cells.items():
            setattr(self, name, cell)

    def unfold(self, request: Callable[[Any], Any]) -> Any:
        return request(self)


class Waiting(Given):
    def unfold(self, request: Callable[[Any], Any]) -> Any:
        return (yield from request(self))


def answer(model: bm.Model, *requests: Callable[[Any], Any]) -> list[Any]:
    with bm.Engine(model, threads=1) as engine:
        answers, driver = engine.map(requests), engine.driver
    scheduler_of(driver).check_invariants()  # once its thread has ended, which frees nodes after it has answered
    assert scheduler_of(driver).num_rows == 0
    return answers


@pytest.fixture
def combine() -> Combine:
    torch.manual_seed(1)
    return Combine()


def ones(n: int = H) -> Tensor:
    return torch.linspace(-1, 1, n)


# --- how cells are made --------------------------------------------------------------------------------------------


def test_the_module_is_only_called_at_its_batch_sizes() -> None:
    module = Recording()
    model = Given(cell=bm.Cell(module, batch_sizes=[3, 8]))
    with bm.Engine(model, threads=1) as engine:
        engine.submit(lambda m: m.cell([0.0])).result()
        module.sizes.clear()
        values = engine.submit(lambda m: m.cell.map([[float(i)] for i in range(21)])).result()
        engine.map([lambda m: m.cell([5.0])] * 2)
    assert values.tolist() == [[i + 1.0] for i in range(21)]
    assert set(module.sizes) == {3, 8}


def test_default_batch_sizes_pad_little() -> None:
    sizes = default_batch_sizes(256)
    assert sizes[:32] == tuple(range(1, 33))
    assert sizes[-1] == 256
    assert all((after - 1) / size < 1.13 + 1 / size for size, after in pairwise(sizes))


@pytest.mark.parametrize(
    "options", [{"max_batch": 0}, {"batch_sizes": []}, {"batch_sizes": [0, 1]}, {"batch_sizes": [2, 4], "max_batch": 8}]
)
def test_impossible_batch_sizes_are_refused(options: Any) -> None:
    with pytest.raises(OptionError):
        bm.Cell(Double(), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"priority": "x"}, "priority must be a whole number .* got str 'x'"),
        ({"priority": None}, "priority must be a whole number"),
        ({"priority": 0.5}, "priority must be a whole number"),
        ({"max_batch": 2.5}, "max_batch must be at least 1, a whole number, got float 2.5"),
        ({"batch_sizes": [1, "2"]}, "each of batch_sizes must be at least 1, a whole number, got str '2'"),
        ({"optimize": 1}, "optimize must be True or False"),
    ],
)
def test_options_of_another_kind_are_refused_where_they_are_given(options: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        bm.Cell(nn.Linear(2, 2), **options)


def test_only_modules_are_cells() -> None:
    with pytest.raises(ModelError, match=r"nn\.Module"):
        bm.Cell(lambda x: x)  # type: ignore[arg-type]


def test_equal_cells_share_one_type_and_other_weights_do_not(combine: Combine) -> None:
    other = copy.deepcopy(combine)
    with torch.no_grad():
        other.a.weight[0, 0] += 1
    model = Given(one=bm.Cell(combine), two=bm.Cell(copy.deepcopy(combine)), three=bm.Cell(other))
    with bm.Engine(model, threads=1) as engine:
        same, also, different = engine.submit(
            lambda m: [m.one(ones(), ones()), m.two(ones(), ones()), m.three(ones(), ones())]
        ).result()
        assert len(engine.registry.types) == 2
    assert torch.equal(same, also)
    assert not torch.equal(same, different)


def test_host_outputs_that_the_cell_does_not_have_are_refused() -> None:
    with pytest.raises(ModelError, match=r"host_outputs names output 1, the cell has 1"):
        answer(Given(cell=bm.Cell(Double(), host_outputs=(1,))), lambda m: m.cell(1))


def test_a_cell_that_returns_no_state_for_a_number_of_inputs_cannot_be_run_with_it(combine: Combine) -> None:
    model = Given(cell=bm.Cell(combine), other=bm.Cell(combine))
    with pytest.raises(ModelError, match="returns 1 outputs"):
        answer(model, lambda m: [m.cell.run([ones()], ones()), m.cell.loop((ones(), ones()), max_steps=2)])


# --- what calls compute ------------------------------------------------------------------------------------------


def chain(module: nn.Module, xs: Any, h: Tensor) -> list[Tensor]:
    steps = []
    for x in xs:
        h = module(x[None], h[None])[0]
        steps.append(h)
    return steps


@torch.no_grad()
def test_two_layers_are_two_runs_and_a_reversed_one_reads_backwards() -> None:
    torch.manual_seed(2)
    first, second, back = Combine(), Combine(), Combine()
    cells = {"first": bm.Cell(first), "second": bm.Cell(second), "back": bm.Cell(back)}
    xs, zero = torch.randn(7, H), torch.zeros(H)

    def unfold(m: Any) -> Any:
        below = m.first.run(xs, zero)
        return [
            m.second.run(below.steps, zero).steps,
            m.back.run(xs.flip(0), zero).steps[::-1],
            m.back.run(below.steps[::-1], zero).steps[::-1],
            m.second.map(below.steps, below.steps[::-1]),
            m.second.map(below.steps[2:5], xs[2:5]),
            m.second(below.steps[-2], below),
        ]

    (found,) = answer(Given(**cells), unfold)
    below = chain(first, xs, zero)
    wanted = [
        torch.stack(chain(second, below, zero)),
        torch.stack(chain(back, xs.flip(0), zero)[::-1]),
        torch.stack(chain(back, below[::-1], zero)[::-1]),
        second(torch.stack(below), torch.stack(below[::-1])),
        second(torch.stack(below[2:5]), xs[2:5]),
        second(below[-2][None], below[-1][None])[0],
    ]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_run_takes_several_sequences_as_a_tuple() -> None:
    class Both(nn.Module):
        def forward(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
            return h * 2 + a - b

    def unfold(m: Any) -> Any:
        return m.cell.run(([[1.0], [2.0], [3.0]], [[0.5], [0.0], [1.0]]), ([1.0],)).steps

    (found,) = answer(Given(cell=bm.Cell(Both())), unfold)
    assert found.tolist() == [[2.5], [7.0], [16.0]]


@pytest.mark.parametrize("until", [32, lambda values: values >= 32, {0: 32}, {0: lambda values: values >= 32}])
@pytest.mark.parametrize(("max_steps", "wanted"), [(3, [2, 4, 8]), (5, [2, 4, 8, 16, 32]), (9, [2, 4, 8, 16, 32])])
def test_a_loop_ends_at_its_value_or_after_its_steps(until: Any, max_steps: int, wanted: list[int]) -> None:
    def unfold(m: Any) -> Any:
        end = m.double.loop(1, until=until, max_steps=max_steps)
        return [end.steps, end, m.double(end)]

    (found,) = answer(Given(double=bm.Cell(Double(), host_outputs=(0,))), unfold)
    assert found[0].tolist() == wanted
    assert int(found[1]) == wanted[-1]
    assert int(found[2]) == 2 * wanted[-1]


@pytest.mark.parametrize("max_steps", [3, 9])
@pytest.mark.parametrize("late", [False, True])
def test_an_unfold_function_can_wait_for_the_end_of_a_loop(max_steps: int, late: bool) -> None:
    class Waits(bm.Model):
        def __init__(self) -> None:
            self.double = bm.Cell(Double(), host_outputs=(0,))

        def unfold(self, start: int) -> Any:
            end = self.double.loop(start, until=32, max_steps=max_steps)
            if late:
                yield self.double(end)
            return (yield end)

    with bm.Engine(Waits()) as engine:
        assert [int(end) for end in engine.map([1, 16, 32], progress=False)] == [
            min(32, 2**max_steps),
            32,
            32 * 2**max_steps,
        ]


class Countdown(nn.Module):
    """(n, rest) -> (n - 1, whether n is 1 now, half of n, n - 1, rest - 2)."""

    def forward(self, n: Tensor, rest: Tensor) -> tuple[Tensor, ...]:
        return n - 1, n == 2, n / 2, n - 1, rest - 2


@pytest.mark.parametrize(
    ("until", "last"),
    [
        ({1: True}, 1),
        ({2: 2}, 3),
        ({2: lambda halves: halves < 2.5}, 3),
        ({1: True, 4: 0}, 5),
        ({4: 5, 1: True}, 1),
        ({0: 7, 2: lambda halves: halves == 3, 4: -1}, 7),
        ({1: False}, 8),
        ({3: 100}, 0),
    ],
)
@pytest.mark.parametrize("in_loops", [True, False])
def test_a_loop_ends_at_what_is_said_for_any_of_its_outputs(
    monkeypatch: pytest.MonkeyPatch, until: Any, last: int, in_loops: bool
) -> None:
    monkeypatch.setattr(StateChoice, "fastest", lambda self, batch: self.loop if in_loops else None)
    given = dict(until)

    def unfold(m: Any) -> Any:
        n, *_ = m.down.loop((9, 8), until=given, max_steps=9)
        given.clear()  # the loop has what it was given
        given.update(until)
        return [n.steps, n]

    answers = answer(Given(down=bm.Cell(Countdown())), unfold, unfold)
    for steps, end in answers:
        assert steps.tolist() == list(range(8, last - 1, -1))
        assert int(end) == last


def test_stop_values_with_equal_hashes_are_told_apart() -> None:
    class Down(nn.Module):
        def forward(self, n: Tensor) -> Tensor:
            return n - 1

    def loop(until: int) -> Callable[[Any], Any]:
        return lambda m: m.down.loop(3, until=until, max_steps=9).steps

    found = answer(Given(down=bm.Cell(Down(), host_outputs=(0,))), *[loop(u) for u in (-1, -2, -1, -2)])
    assert [int(steps[-1]) for steps in found] == [-1, -2, -1, -2]


# --- waiting --------------------------------------------------------------------------------------------------------


def test_a_generator_may_wait_for_tuples_old_values_and_sequences() -> None:
    def unfold(m: Any) -> Any:
        first = m.double(1)
        second = m.double(first)
        got = [(yield (first, second))]
        for _ in range(3):
            second = m.double(second)
            got.append((yield second))
        got.append((yield first))
        got.append((yield {"again": [second, first]}))
        sequence = yield m.double.map([5, 6, 7])
        return [got, sequence, m.double(first)]

    (found,) = answer(Waiting(double=bm.Cell(Double())), unfold)
    assert found[0] == [(2, 4), 8, 16, 32, 2, {"again": [32, 2]}]
    assert found[1].tolist() == [10, 12, 14]
    assert int(found[2]) == 4


def test_a_handle_kept_for_long_is_still_there_and_dropped_ones_are_freed() -> None:
    most: list[int] = []

    def unfold(m: Any) -> Any:
        kept = value = m.double(1)
        for i in range(60):
            value = m.double(value if i % 20 else 1)
            yield value
            most.append(scheduler(engine).num_rows)
        return m.double(kept)

    model = Waiting(double=bm.Cell(Double()))
    with bm.Engine(model, threads=1) as engine:
        assert int(engine.submit(unfold).result()) == 4
        assert scheduler(engine).num_rows == 0
    assert max(most) <= 8


class Branches(bm.Model):
    """A tree whose nodes run over their children's states: a leaf's run is over nothing, and it is the cell's first."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.join = bm.Cell(nn.GRUCell(4, 6))
            self.up = bm.Cell(nn.Linear(6, 4))

    def unfold(self, tree: list[Any]) -> Any:
        return self.of(tree)

    def of(self, tree: list[Any]) -> Any:
        return self.up(self.join.run([self.of(child) for child in tree], torch.ones(6)))


@pytest.mark.parametrize("example", [False, True])
def test_the_first_run_of_a_cell_may_be_over_nothing(example: bool) -> None:
    model = Branches()
    join, up = model.join.module, model.up.module
    if example:
        model.example_request = [[], [[]]]

    def alone(tree: list[Any]) -> Tensor:
        state = torch.ones(1, 6)
        for child in tree:
            state = join(alone(child), state)
        return up(state)

    with bm.Engine(model, threads=1) as engine, torch.no_grad():
        for tree in ([], [[]], [[], [[]], []]):
            torch.testing.assert_close(engine.submit(tree).result(), alone(tree)[0])


class Backwards(bm.Model):
    def __init__(self) -> None:
        self.step = bm.Cell(nn.GRUCell(3, 3))

    def unfold(self, frames: Any) -> Any:
        return self.step.run(frames[::-1])


def test_one_row_that_is_read_backwards_is_a_row() -> None:
    """NumPy counts it as contiguous, which torch does not take."""
    model = Backwards()
    step = model.step.module
    with bm.Engine(model, threads=1) as engine, torch.no_grad():
        for count in (1, 2, 1):
            frames = np.arange(3 * count, dtype=np.float32).reshape(count, 3)
            state = torch.zeros(1, 3)
            for frame in frames[::-1]:
                state = step(torch.tensor(frame[None]), state)
            torch.testing.assert_close(engine.submit(frames).result(), state[0])
