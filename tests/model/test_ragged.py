"""Sequences of several lengths in one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import batchmaker as bm
from batchmaker.errors import OptionError


@given(st.lists(st.integers(0, 5), max_size=6), st.booleans(), st.sampled_from([(), (3,)]))
def test_what_is_joined_is_there_again_one_by_one(lengths: list[int], tensors: bool, shape: tuple[int, ...]) -> None:
    total, made = sum(lengths), bm.Ragged
    values: Any = np.arange(total * int(np.prod(shape, dtype=int))).reshape(total, *shape)
    values = torch.from_numpy(values) if tensors else values
    whole = made(values, lengths)
    assert len(whole) == len(lengths)
    parts = whole.split()
    assert [len(part) for part in parts] == lengths == whole.lengths.tolist()
    assert all(type(part) is type(values) and part.shape[1:] == shape for part in parts)
    assert [part.tolist() for part in whole] == [whole[i].tolist() for i in range(len(whole))]
    assert [part.tolist() for part in parts] == [whole[i - len(whole)].tolist() for i in range(len(whole))]
    if lengths:
        again = made.join(parts)
        assert again.values.tolist() == values.tolist()
        assert again.lengths.tolist() == lengths


def test_sequences_are_views_and_lengths_cannot_be_changed() -> None:
    whole = bm.Ragged(np.zeros(5), torch.tensor([2, 3]))
    whole[1][0] = 1.0
    assert whole.values.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="read-only"):
        whole.lengths[0] = 3
    with pytest.raises(IndexError):
        whole[2]


@pytest.mark.parametrize(
    ("values", "lengths", "said"),
    [
        ([1, 2], [2], r"values is an array or tensor \[total, ...\], got <class 'list'>"),
        (np.array(1), [1], r"got one of shape \(\)"),
        (np.zeros(3), [2], "the lengths add up to 2, got 3 values"),
        (np.zeros(3), [4, -1], "at least 0, got -1"),
        (np.zeros(3), [1.0, 2.0], "whole numbers, got float64"),
        (np.zeros(3), [[3]], r"of shape \(1, 1\)"),
    ],
)
def test_what_does_not_fit_is_refused(values: Any, lengths: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        bm.Ragged(values, lengths)


def test_results_with_several_tensors_are_joined_place_by_place() -> None:
    results = [{"tags": torch.ones(n, 2), "ends": (torch.zeros(n), [torch.arange(4)])} for n in (2, 3)]
    joined = bm.Ragged.join(results)
    assert joined["tags"].values.shape == (5, 2)
    assert joined["ends"][0].lengths.tolist() == [2, 3]
    assert joined["ends"][1][0].values.tolist() == [0, 1, 2, 3] * 2
    assert len(bm.Ragged.join([])) == 0


@pytest.mark.parametrize(
    "results",
    [
        [1, 2],
        [torch.tensor(1.0)],
        [torch.ones(2), torch.ones(2, dtype=torch.int64)],
        [torch.ones(2, 1), torch.ones(2, 2)],
        [torch.ones(2), np.ones(2)],
        [(torch.ones(1),), (torch.ones(1), torch.ones(1))],
        [{"a": torch.ones(1)}, {"b": torch.ones(1)}],
    ],
)
def test_results_that_are_not_alike_are_not_joined(results: list[Any]) -> None:
    with pytest.raises(OptionError, match="a Ragged is made of tensors that differ only in their first dimension"):
        bm.Ragged.join(results)
