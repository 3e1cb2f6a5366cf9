"""Values of many requests are laid out one after the other."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.model.template_values import joined

SHAPES = st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=5)


@given(SHAPES)
def test_tensors_of_any_shapes_are_joined_in_order(shapes):
    tensors = [torch.randn(shape) for shape in shapes]
    numbers = [number for tensor in tensors for number in tensor.reshape(-1).tolist()]
    assert joined(tensors).reshape(-1).tolist() == numbers
