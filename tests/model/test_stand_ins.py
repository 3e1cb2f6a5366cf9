"""Stand-ins: they are cut like the values that they stand for, and tell when they are asked for one."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.graph.spec import ValueSpec
from batchmaker.model.stand_ins import Looked, StandIn, StandIns

ASKS: list[Callable[[Any], Any]] = [
    bool, int, float, complex, str, repr, hash, operator.index, abs, math.floor, round, copy.copy, copy.deepcopy,
    lambda x: x == 1, lambda x: x != x, lambda x: x < 1, lambda x: x >= 1, lambda x: x + 1, lambda x: 1 - x,
    lambda x: x * 2.0, lambda x: -x, lambda x: x % 2, lambda x: 2**x, lambda x: x.item(), lambda x: x.tolist(),
    lambda x: f"{x}", lambda x: {x: 1}, lambda x: [0, 1][x],
    lambda x: x in (1, 2), lambda x: np.asarray(x), lambda x: np.asarray([x, x]), lambda x: np.add(x, 1),
    lambda x: range(x), lambda x: x.value, lambda x: setattr(x, "value", 1), lambda x: sorted([x, x]),
    lambda x: max(x, 1), lambda x: [3, 4].index(x), lambda x: divmod(x, 2),
]  # fmt: skip


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("request_", [[1, 2], [1.0, 2.0], np.array([1, 2]), torch.tensor([1, 2])])
def test_asking_for_a_value_is_noticed(ask: Callable[[Any], Any], request_: Any) -> None:
    stand_ins = StandIns()
    stand_in = stand_ins.of(request_)
    assert not stand_ins.looked
    with pytest.raises(Looked):
        ask(stand_in[0])
    assert stand_ins.looked


@pytest.mark.parametrize("request_", [[1], [1.0], np.array([1]), torch.tensor([1])])
def test_what_kind_of_number_it_is_is_a_value(request_: Any) -> None:
    with pytest.raises(Looked):
        isinstance(StandIns().of(request_)[0], int | float)


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("ask", [torch.as_tensor, torch.tensor, torch.sum, lambda x: torch.add(x, 1)])
@pytest.mark.parametrize("request_", [np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])])
def test_torch_gets_no_values_of_arrays(ask: Callable[[Any], Any], request_: Any) -> None:
    stand_in = StandIns().of(request_)
    with pytest.raises((Looked, TypeError, ValueError, RuntimeError)):
        ask(stand_in)


def test_whoever_asks_for_the_memory_of_an_array_has_looked_and_hears_that_there_is_none() -> None:
    stand_ins = StandIns()
    assert not hasattr(stand_ins.of(np.array([1.0])), "__cuda_array_interface__")
    assert stand_ins.looked


def test_an_unfold_function_that_swallows_the_signal_has_looked_all_the_same() -> None:
    stand_ins = StandIns()
    (one,) = stand_ins.of([1])
    try:
        int(one)
    except BaseException:
        one = None
    assert one is None
    assert stand_ins.looked


def test_containers_stay_what_they_are() -> None:
    stand_in = StandIns().of({"words": [1, 2, 3], "pair": (1.0, None), "deep": True})
    assert type(stand_in["words"]) is list
    assert len(stand_in["words"][1:]) == 2
    assert type(stand_in["pair"]) is tuple
    assert stand_in["pair"][1] is None
    assert stand_in["deep"] is True
    assert isinstance(stand_in["words"], list)


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor])
def test_arrays_say_what_they_are_and_can_be_cut(make: Callable[[Any], Any]) -> None:
    real = make(np.arange(24.0).reshape(4, 6))
    stand_in = StandIns().of(real)
    if isinstance(real, np.ndarray):
        assert isinstance(stand_in, np.ndarray)
    assert stand_in.shape == real.shape
    assert stand_in.ndim == 2
    assert stand_in.dtype == real.dtype
    assert len(stand_in) == 4
    assert [len(row) for row in stand_in] == [6] * 4
    for cut in (
        lambda x: x[1:3], lambda x: x[0], lambda x: x[:, ::2], lambda x: x.reshape(3, 8), lambda x: x.T,
        lambda x: x[..., None], lambda x: x[np.array([2, 0])], lambda x: x[-1],
    ):  # fmt: skip
        assert np.array_equal(np.asarray(real).reshape(-1)[np.asarray(cut(stand_in).codes)], np.asarray(cut(real)))


@given(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=4), st.integers(0, 9))
def test_rows_are_made_of_the_values_that_were_given(rows: list[list[int]], constant: int) -> None:
    stand_ins = StandIns()
    given_ = [*stand_ins.of(rows), [constant, constant]]
    made = stand_ins.rows(given_, ValueSpec((2,), "int64"))
    flat = [number for row in rows for number in row]
    codes = made.values.codes.reshape(-1).tolist()
    assert codes[:-2] == list(range(len(flat)))
    assert stand_ins.constants[int] == [constant, constant]


@pytest.mark.parametrize(
    ("data", "spec"),
    [
        (lambda x: x, ValueSpec((), "float32")),
        (lambda x: x, ValueSpec((2,), "int64")),
        (lambda x: [x[0], 1.0], ValueSpec((), "int64")),
        (lambda x: [x[0], True], ValueSpec((), "int64")),
        (lambda x: [x[0], [x[1]]], ValueSpec((), "int64")),
        (lambda x: x, None),
    ],
)
def test_what_an_input_may_refuse_is_left_to_a_request_with_values(data: Any, spec: ValueSpec | None) -> None:
    stand_ins = StandIns()
    with pytest.raises(Looked):
        stand_ins.rows(data(stand_ins.of([1, 2, 3])), spec)


def test_stand_ins_are_not_taken_for_what_they_are_made_of() -> None:
    assert type(StandIns().of([1])[0]) is StandIn
