"""The shape of a request: the same for requests that differ in values alone, and for no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.model.request_shapes import MAX_PARTS, shapes_of
from batchmaker.model.stand_ins import StandIns

numbers = st.integers(-5, 5) | st.floats(-5, 5, allow_nan=False)
lists = st.lists(st.integers(-5, 5), max_size=4) | st.lists(st.floats(-5, 5), max_size=4)
requests = st.recursive(
    numbers | st.none() | st.booleans() | lists,
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), parts, max_size=3)
    ),
    max_leaves=8,
)


def shape_of(request: Any, leaves: list[Any]) -> Any:
    """The shape of a request that is looked at alone."""
    (shape,) = shapes_of([request], [leaves])
    return shape


def other_values(request: Any) -> Any:
    """The same request with other numbers."""
    if isinstance(request, bool) or request is None:
        return request
    if isinstance(request, list | tuple):
        return type(request)(map(other_values, request))
    if isinstance(request, dict):
        return {name: other_values(part) for name, part in request.items()}
    return request + 1


@given(requests)
def test_values_are_no_part_of_a_shape(request: Any) -> None:
    assert shape_of(request, []) == shape_of(other_values(request), [])


@given(st.lists(requests, max_size=5))
def test_requests_that_are_looked_at_together_have_the_shapes_that_they_have_alone(together: list[Any]) -> None:
    leaves: list[list[Any]] = [[] for _ in together]
    alone: list[list[Any]] = [[] for _ in together]
    assert shapes_of(together, leaves) == [shape_of(one, own) for one, own in zip(together, alone, strict=True)]
    assert [[kind for kind, _ in own] for own in leaves] == [[kind for kind, _ in own] for own in alone]


@given(requests)
def test_what_holds_the_values_is_counted_as_the_stand_ins_count_it(request: Any) -> None:
    leaves: list[Any] = []
    if shape_of(request, leaves) is None:
        return
    stand_ins = StandIns()
    stand_ins.of(request)
    counted: dict[Any, int] = {}
    for kind, values in leaves:
        counted[kind] = counted.get(kind, 0) + (len(values) if isinstance(values, list) else 1)
    assert counted == stand_ins.sizes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [1, 2, 3]),
        ([1, 2], [1.0, 2.0]),
        ([1, 2], (1, 2)),
        ([1, 2], [1, 2.0]),
        ([1, 2], [1, True]),
        ([True, 2], [False, 2]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (1, None),
    ],
)
def test_requests_that_a_function_could_tell_apart_have_different_shapes(one: Any, other: Any) -> None:
    assert shape_of(one, []) != shape_of(other, [])


@pytest.mark.parametrize(
    "request_",
    ["word", [], {}, ["a"], {"a": "b"}, {1: 2}, object(), np.array(["a"]), np.zeros(0), [[0]] * (MAX_PARTS + 1), 1j],
)
def test_what_is_a_value_itself_or_too_much_has_no_shape(request_: Any) -> None:
    assert shape_of(request_, []) is None


class Numbers(list):  # type: ignore[type-arg]
    """A list with ideas of its own."""


def test_only_plain_containers_have_shapes() -> None:
    assert shape_of(Numbers([1, 2]), []) is None
    assert shape_of(torch.nn.Parameter(torch.zeros(2)), []) is None
