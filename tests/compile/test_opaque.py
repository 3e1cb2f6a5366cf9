"""Functions over arrays are cells: called on whole batches, proved once, never looked into."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import batchmaker as bm
from batchmaker.compile.opaque import RowForm, row_forms
from batchmaker.errors import CellError, ModelError, OptionError, RequestShapeError, SavedModelError, ShapeError
from batchmaker.graph.spec import ValueSpec

Array = NDArray[Any]


def nearest(points: Array) -> tuple[Array, Array]:
    distances = ((points[:, None] - np.eye(4, dtype=np.float32)) ** 2).sum(-1)
    return distances.argmin(-1), distances.min(-1)


class Function(bm.Model):
    """One function, called once on each request."""

    def __init__(self, function: Any, inputs: Any, outputs: Any, **options: Any) -> None:
        self.call = bm.Cell(bm.opaque(function, inputs=inputs, outputs=outputs), batch_sizes=(1, 2, 4), **options)

    def unfold(self, request: Any) -> Any:
        return self.call(request)


def answers(model: bm.Model, requests: list[Any]) -> list[Any]:
    with bm.Engine(model) as engine:
        return engine.map(requests, progress=False)


def test_a_function_over_arrays_is_called_on_batches_and_gives_its_dtypes():
    points = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    model = Function(nearest, {"point": 4}, {"centre": ((), "int64"), "distance": ()})
    for point, (centre, distance) in zip(points, answers(model, list(points)), strict=True):
        expected = nearest(point[None])
        assert (type(centre), centre) == (int, expected[0][0])
        np.testing.assert_allclose(distance, expected[1][0], rtol=1e-6)


def test_several_rows_come_in_one_call_of_the_function():
    sizes: list[int] = []

    def count(x: Array) -> Array:
        sizes.append(len(x))
        return x

    class Mapped(Function):
        def unfold(self, request: Any) -> Any:
            return self.call.map(request)

    answers(Mapped(count, [()], [()]), [[1.0, 2.0, 3.0, 4.0]])
    assert sizes[-1] == 4


class Chain(Function):
    def unfold(self, request: Any) -> Any:
        return self.call.run(request)


def test_a_function_with_state_is_a_chain_from_zeros():
    def add(x: Array, total: Array) -> tuple[Array, Array]:
        return x * 2, total + x

    model = Chain(add, {"x": 2, "total": 2}, [2, 2])
    ((doubled, total),) = answers(model, [np.ones((5, 2), np.float32)])
    assert doubled.tolist() == [2.0, 2.0]
    assert total.tolist() == [5.0, 5.0]


def test_it_may_change_and_keep_what_it_is_given_and_give_one_buffer_again_and_again():
    kept: list[Array] = []
    buffer = np.zeros((4, 2), np.float32)

    def untidy(x: Array) -> Array:
        kept.append(x)
        buffer[: len(x)] = x * 2
        x[:] = -1
        return buffer[: len(x)]

    class Twice(Function):
        def unfold(self, request: Any) -> Any:
            return self.call(request), self.call(self.call(request))

    rows = [np.full(2, k, np.float32) for k in range(6)]
    for row, (once, twice) in zip(rows, answers(Twice(untidy, [2], [2]), rows), strict=True):
        assert once.tolist() == (row * 2).tolist()
        assert twice.tolist() == (row * 4).tolist()


def test_a_size_that_is_none_is_chosen_by_each_request():
    model = Function(lambda x: x.sum(1), {"x": ((None,), "int64")}, [((), "int64")])
    assert answers(model, [[1, 2, 3], [4, 5], [6, 7, 8]]) == [6, 9, 21]


def test_a_row_that_makes_it_raise_fails_alone():
    def root(x: Array) -> Array:
        if (x < 0).any():
            raise ValueError("a negative number")
        return np.sqrt(x)

    with bm.Engine(Function(lambda x: root(np.where(x < -50, x, abs(x))), [()], [()])) as engine:
        futures = [engine.submit(x) for x in (4.0, -99.0, 9.0)]
        with pytest.raises(CellError, match="ValueError: a negative number"):
            futures[1].result()
        assert [futures[0].result(), futures[2].result()] == [2.0, 3.0]


def test_it_is_not_looked_into_as_a_part_of_other_modules():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.inner = bm.opaque(lambda x: np.sort(x, 1), inputs=[3], outputs=[3])

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(self.linear(x))[0]

    network = Around()
    row = torch.randn(3)
    with torch.no_grad():
        expected = network.linear(row).sort()[0]
    with bm.Engine(bm.layers(network)) as engine:
        (result,) = engine.map([row], progress=False)
    torch.testing.assert_close(result, expected)


LIES = {
    "another shape": (
        lambda x: x[:, :1],
        r"output 'output0': got float32\[2, 1\] for 2 rows, expected rows of float32\[3\]",
    ),
    "another dtype": (lambda x: x.astype(np.float64), r"got float64\[2, 3\]"),
    "no batch": (lambda x: x.sum(), r"got float32\[\] for 2 rows"),
    "two outputs": (lambda x: (x, x), r"got 2 outputs, expected 1"),
    "a mean over the batch": (lambda x: x - x.mean(0), r"Rows must not depend on each other"),
    "chance": (lambda x: np.random.default_rng().normal(size=x.shape).astype("float32"), r"nor on chance"),
    "an error": (
        lambda x: 1 / 0,
        r"trial run with \(input0: float32\[2, 3\]\) raised ZeroDivisionError.*must take them",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_what_it_says_of_itself_is_proved_before_the_first_request(name):
    function, message = LIES[name]
    with bm.Engine(Function(function, [3], [3])) as engine, pytest.raises(ModelError, match=message):
        engine.map([np.ones(3, np.float32)], progress=False)


def test_outputs_of_another_shape_than_at_first_are_an_error_and_are_not_spread_over_the_row():
    def narrow(x: Array) -> Array:
        return x[:, :1] if (x > 50).any() else x

    with bm.Engine(Function(narrow, [3], [(None,)])) as engine:
        engine.map([np.ones(3, np.float32)], progress=False)
        with pytest.raises(CellError, match=r"got shape \(1, 1\) for 1 rows, expected rows of float32\[3\]"):
            engine.map([np.full(3, 99, np.float32)], progress=False)


def test_wrong_requests_say_which_input_and_what_was_wanted():
    model = Function(nearest, {"point": 4}, {"centre": ((), "int64"), "distance": ()})
    message = r"input 0: got rows of shape \(3,\), expected \(4,\)"
    with bm.Engine(model) as engine, pytest.raises(RequestShapeError, match=message):
        engine.map([np.ones(3, np.float32)], progress=False)
    open_model = Function(lambda x, y: x, {"x": (None, 2), "y": ()}, [(None, 2)])
    with bm.Engine(open_model) as engine, pytest.raises(ModelError, match=r"takes 2 inputs \(x: float32\[\?, 2\], y: "):
        engine.map([np.ones((3, 2), np.float32)], progress=False)


def test_a_cell_of_a_function_is_not_saved_and_says_why(tmp_path):
    model = Saved()
    with pytest.raises(
        SavedModelError, match=r"cell 'call': cannot be saved: it is the function nearest, which is code"
    ):
        bm.save(model, tmp_path / "saved", example_request=[0.0] * 4)
    assert not (tmp_path / "saved").exists()


class Saved(Function):
    def __init__(self) -> None:
        super().__init__(nearest, [4], [((), "int64"), ()])


def test_outside_an_engine_it_takes_and_gives_tensors():
    module = bm.opaque(lambda x: x + 1, inputs=[2], outputs=[2])
    (made,) = module(torch.ones(3, 2))
    assert made.tolist() == [[2.0, 2.0]] * 3


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (4, RowForm("input0", (4,), "float32")),
        ((), RowForm("input0", (), "float32")),
        ((2, 4), RowForm("input0", (2, 4), "float32")),
        ((None, 4), RowForm("input0", (None, 4), "float32")),
        ((4, "int32"), RowForm("input0", (4,), "int32")),
        (((), np.uint8), RowForm("input0", (), "uint8")),
        (((2, None), torch.float64), RowForm("input0", (2, None), "float64")),
        (ValueSpec((3,), "bool"), RowForm("input0", (3,), "bool")),
    ],
)
def test_a_row_is_written_as_sizes_with_or_without_a_dtype(given, form):
    assert row_forms([given], "input") == (form,)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: row_forms([(4, "bfloat16")], "input"), OptionError, "dtype 'bfloat16' is not one"),
        (lambda: row_forms([(4, "string")], "input"), OptionError, "dtype 'str"),
        (lambda: row_forms([(0,)], "input"), OptionError, "a row is written as its sizes"),
        (lambda: row_forms(["x"], "input"), OptionError, "a row is written as its sizes"),
        (lambda: row_forms([], "output"), OptionError, "outputs must be a list of rows"),
        (lambda: row_forms(4, "output"), OptionError, "outputs must be a list of rows"),  # type: ignore[arg-type]
        (lambda: bm.opaque(nn.Linear(2, 2), inputs=[2], outputs=[2]), ModelError, r"Linear is a module: bm\.Cell"),
        (lambda: bm.opaque(3, inputs=[2], outputs=[2]), ModelError, "takes a function over arrays, got int"),  # type: ignore[arg-type]
        (lambda: bm.Cell(nearest), ModelError, r"got function\. Write bm\.Cell\(bm\.opaque\(function, inputs="),  # type: ignore[arg-type]
        (lambda: bm.layers(nearest), ModelError, r"Write bm\.layers\(bm\.opaque"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_row_or_no_function_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_shape_errors_are_shape_errors():
    module = bm.opaque(lambda x: x, inputs=[2], outputs=[3])
    with pytest.raises(ShapeError, match="expected rows of"):
        module(torch.ones(2, 2))
