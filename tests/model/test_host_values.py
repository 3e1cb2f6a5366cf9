"""Data of a request becomes rows of the declared dtype, or a clear error."""

from __future__ import annotations

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
    [([], InvalidRequestError), (3.0, InvalidRequestError), ([[1.0]], ShapeError), ([[1, 2]], ShapeError),
     ([["a", "b"]], ShapeError), ([[1.0], [1.0, 2.0]], ShapeError), ([[True, False]], ShapeError)],
)  # fmt: skip
def test_data_that_does_not_fit_is_refused_by_name(data: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="here"):
        host_sequence(data, ROWS, "float32", "here")


def test_floats_convert_to_the_declared_dtype() -> None:
    value = host_value(np.array([1.0, 2.0]), ValueSpec((2,), "bfloat16"), "float32", "here").values
    assert value.dtype == torch.bfloat16
    assert value.tolist() == [[1.0, 2.0]]
