"""Data of a request becomes rows of the declared dtype, or a clear error."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from batchmaker.errors import InvalidRequestError, ShapeError
from batchmaker.graph.spec import ValueSpec
from batchmaker.model.host_values import host_sequence, host_value

ROWS = ValueSpec((2,), "float32")


@pytest.mark.parametrize("data", [[[1, 2.0]], np.array([[1, 2.0]]), torch.tensor([[1, 2.0]]), [torch.tensor([1, 2.0])]])
def test_lists_arrays_and_tensors_give_the_same_rows(data: Any) -> None:
    for spec in (ROWS, None):
        values = host_sequence(data, spec, "float32", "here")
        assert (values.count, str(values.spec)) == (1, str(ROWS))
        assert np.asarray(values.values).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("data", "error"),
    [([], InvalidRequestError), (3.0, InvalidRequestError), ([[1.0]], ShapeError),
     ([["a", "b"]], ShapeError), ([[1.0], [1.0, 2.0]], ShapeError), ([[True, False]], ShapeError)],
)  # fmt: skip
def test_data_that_does_not_fit_is_refused_by_name(data: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="here"):
        host_sequence(data, ROWS, "float32", "here")


def test_floats_convert_to_the_declared_dtype() -> None:
    value = host_value(np.array([1.0, 2.0]), ValueSpec((2,), "bfloat16"), "float32", "here").values
    assert value.dtype == torch.bfloat16
    assert value.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    "data", [[[1, 2]], np.array([[1, 2]]), torch.tensor([[1, 2]]), np.array([[1, 2]], np.uint64), [[np.int8(1), 2]]]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_integers_convert_to_floats_and_keep_their_values(data: Any, dtype: str) -> None:
    values = host_sequence(data, ValueSpec((2,), dtype), "float32", "here").values
    assert torch.as_tensor(values).dtype == getattr(torch, dtype)
    assert values.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (2**24 + 1, "float32"), (-(2**24) - 1, "float32"), (2**53 + 1, "float64"), (2**11 + 1, "float16"),
        (257, "bfloat16"), (2**63, "int64"), (2**31, "int32"), (-129, "int8"), (256, "uint8"), (-1, "uint8"),
        (1e39, "float32"), (-1e39, "float32"), (1e5, "float16"), (1e300, "bfloat16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("give", [lambda x: x, np.array, torch.tensor], ids=["number", "array", "tensor"])
def test_a_number_that_a_dtype_cannot_hold_is_an_error(number: Any, dtype: str, give: Any) -> None:
    if number == 2**63 and give is torch.tensor:
        pytest.skip("torch has no such tensor")
    given = give(number, dtype=torch.float64) if give is torch.tensor and isinstance(number, float) else give(number)
    with pytest.raises(InvalidRequestError, match=f"here: .* does not fit {dtype}"):
        host_value(given, ValueSpec((), dtype), "float32", "here")


def test_infinity_and_nan_are_numbers_of_every_float() -> None:
    values = host_sequence([float("inf"), float("nan"), 1.0], ValueSpec((), "float16"), "float32", "here").values
    assert np.isinf(values[0])
    assert np.isnan(values[1])


def test_complex_numbers_are_not_taken_for_integers() -> None:
    for data in (1j, np.array(1j), torch.tensor(1j)):
        with pytest.raises(ShapeError, match=r"here: got (a complex number|values of dtype torch.complex64), expected"):
            host_value(data, ValueSpec((), "int64"), "float32", "here")


@pytest.mark.parametrize(
    ("data", "said"),
    [(None, "None"), ("abc", "the text 'abc'"), ([1.0, None], "None at position 1"),
     (["a", 2], "the text 'a' at position 0"),
     ([[1, 2], [3, 1 << 70]], "an integer of 71 bits (no dtype holds it) at position 3"), ({"a": 1}, "a dict"),
     (object(), "an object")],
)  # fmt: skip
@pytest.mark.parametrize("spec", [None, ValueSpec((), "float32")], ids=["first use", "later"])
def test_data_that_is_no_number_is_named_with_its_place(data: Any, said: str, spec: ValueSpec | None) -> None:
    wanted = re.escape(f"here: got {said}, expected {'numbers' if spec is None else 'float32[]'}; give numbers")
    for layout in (host_value, host_sequence):
        with pytest.raises(ShapeError, match=wanted):
            layout(data, spec, "float32", "here")
