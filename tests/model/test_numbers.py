"""Numbers of requests follow the module, whatever the first request gave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, ShapeError


def engine_of(module: nn.Module, unfold: Any, example: Any = None) -> bm.Engine:
    class Numbers(bm.Model):
        example_request = example

        def __init__(self) -> None:
            self.cell = bm.Cell(module)

        def unfold(self, request: Any) -> Any:
            return unfold(self.cell, request)

    return bm.Engine(Numbers())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, temperature: Tensor) -> Any:
        return self.linear(x) / temperature[:, None]


X = [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    "temperatures",
    [
        (1, 0.7, 2.0, 1),
        (0.7, 1, 2),
        (True, 0.7, 3),
        (np.float32(0.7), np.int64(2), 1, np.float64(0.5)),
        (torch.tensor(2), torch.tensor(0.7), torch.tensor(0.7, dtype=torch.float64), np.array(3)),
    ],
)
def test_each_request_gives_what_torch_gives_whatever_the_first_one_was(temperatures: tuple[Any, ...]) -> None:
    module = Scale()
    with engine_of(module, lambda cell, t: cell(X, t)) as engine, torch.no_grad():
        for temperature in temperatures:
            made = engine.submit(temperature).result()
            wanted = module(torch.tensor([X]), torch.as_tensor(temperature)[None])[0]
            torch.testing.assert_close(made, wanted, check_dtype=False)


def test_a_first_request_that_is_wrong_harms_no_other() -> None:
    with engine_of(Scale(), lambda cell, t: cell(X, t)) as engine:
        for wrong in (1 << 70, "warm", 1e300, None):
            with pytest.raises(InvalidRequestError):
                engine.submit(wrong).result()
        assert engine.submit(0.7).result().shape == (4,)


@pytest.mark.parametrize("first", [[1, 2, 3, 4], np.arange(4), torch.arange(4), [1.0, 2, 3, 4]])
def test_integers_are_floats_for_a_module_that_takes_floats(first: Any) -> None:
    linear = nn.Linear(4, 2)
    with engine_of(linear, lambda cell, x: cell(x)) as engine, torch.no_grad():
        for x in (first, [0.5] * 4, [4, 3, 2, 1]):
            torch.testing.assert_close(engine.submit(x).result(), linear(torch.as_tensor(x).float()))
        with pytest.raises(InvalidRequestError, match="16777217 does not fit float32"):
            engine.submit([2**24 + 1, 0, 0, 0]).result()


def test_integers_are_floats_in_maps_runs_and_states_too() -> None:
    linear, step = nn.Linear(2, 2), nn.GRUCell(2, 2)
    with engine_of(linear, lambda cell, rows: cell.map(rows)) as engine, torch.no_grad():
        torch.testing.assert_close(engine.submit([[1, 2], [3, 4]]).result(), linear(torch.tensor([[1.0, 2], [3, 4]])))
    wanted = torch.zeros(1, 2)
    with torch.no_grad():
        for x in ([1.0, 2.0], [3.0, 4.0]):
            wanted = step(torch.tensor([x]), wanted)
    for init in (None, np.zeros(2, np.int64), torch.zeros(2)):
        with engine_of(step, lambda cell, rows, init=init: cell.run(rows, init)) as engine:
            torch.testing.assert_close(engine.submit([[1, 2], [3, 4]]).result(), wanted[0])


class Add(nn.Module):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        return total + x


def test_a_sum_of_integers_stays_one_and_a_sum_of_floats_may_start_at_0() -> None:
    with engine_of(Add(), lambda cell, request: cell.run(*request)) as engine:
        for given, total in [(([1, 2], 0), 3), (([0.5, 0.25], 0.0), 0.75), (([0.5, 0.25], 0), 0.75), (([1, 2], 0), 3)]:
            made = engine.submit(given).result()
            assert (made, type(made)) == (total, type(total))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 3)

    def forward(self, word: Tensor) -> Any:
        return self.embed(word)


def test_tokens_stay_integers() -> None:
    with engine_of(Words(), lambda cell, word: cell(word)) as engine:
        with pytest.raises(ShapeError, match="a float is given for an integer"):
            engine.submit(1.0).result()
        assert engine.submit(1).result().shape == (3,)
        for wrong in (1.0, 0.5, True):
            with pytest.raises(ShapeError, match="expected int64"):
                engine.submit(wrong).result()


class Annotated(nn.Module):
    def forward(self, x: Tensor, factor: float) -> Any:
        return x * factor


def test_an_annotation_says_what_a_number_is() -> None:
    with engine_of(Annotated(), lambda cell, factor: cell(1, factor)) as engine:
        for factor in (2, 0.5):
            made = engine.submit(factor).result()
            assert (made, type(made)) == (float(factor), float)
        assert len(engine.registry.types) == 1


class Sample(nn.Module):
    """Takes a share between 0 and 1; a trial with any other number would raise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell, self.out = nn.Embedding(50, 16), nn.GRUCell(16, 16), nn.Linear(16, 50)

    def forward(self, word: Tensor, h: Tensor, share: Tensor) -> Any:
        h = self.cell(self.embed(word), h)
        ranked, order = self.out(h).softmax(-1).sort(-1, descending=True)
        ranked = torch.where(ranked.cumsum(-1) - ranked < share[:, None], ranked, 0.0)
        return order.gather(1, torch.multinomial(ranked, 1))[:, 0], h, share


@pytest.mark.parametrize("seed", range(4))
def test_the_trial_takes_the_examples_own_values(seed: int) -> None:
    torch.manual_seed(seed)

    def unfold(cell: bm.Cell, share: float) -> Any:
        return cell.loop((3, torch.zeros(16), share), until=1, max_steps=5)[0].steps

    with engine_of(Sample(), unfold, example=0.9) as engine:
        assert len(engine.submit(0.9).result()) <= 5


class Checked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("x must not be negative")
        return x.sqrt()


def test_values_that_another_cell_computes_are_real_in_the_trial_too() -> None:
    class Two(bm.Model):
        example_request = 4.0

        def __init__(self) -> None:
            self.first, self.second = bm.Cell(Checked()), bm.Cell(Checked())

        def unfold(self, x: float) -> Any:
            return self.second(self.first(x))

    with bm.Engine(Two()) as engine:
        assert engine.submit(16.0).result() == 2.0


def test_the_error_of_the_trial_is_the_cells_own() -> None:
    with (
        pytest.raises(bm.errors.ModelError, match="ValueError: x must not be negative") as raised,
        engine_of(Checked(), lambda cell, x: cell(x), example=-1.0),
    ):
        pass
    assert "int64" not in str(raised.value)


class Picky(nn.Module):
    """Refuses one number, as code that looks at values does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x == 13).any()):
            raise ValueError("unlucky")
        return x + 1


def test_a_first_request_whose_values_the_cell_refuses_fails_alone_when_it_runs() -> None:
    class Plus(bm.Model):
        def __init__(self) -> None:
            self.plus = bm.Cell(Picky())

        def unfold(self, x: list[float]) -> Any:
            return self.plus(x)

    with bm.Engine(Plus(), threads=1) as engine:
        error = engine.submit([13.0]).exception(60)
        assert isinstance(error, bm.errors.CellError)
        assert "cell 'plus' raised ValueError: unlucky" in str(error)
        assert engine.submit([1.0]).result(60).tolist() == [2.0]
